"""Load files: tokens per logical expert, window after window, as people and serving engines store them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...placement import PlacementError
from ...utils.files import FileError, require_writable
from .arrays import LoadArray, names_in, numbers
from .base import Engine
from .content import Content, open_content
from .engines import ENGINES, OWN
from .errors import FormatError, LoadFileError

SAMPLE = "sample"
MOST_TOKENS = 2.0**53
"""Whole numbers stay below it: larger ones have lost digits, and their sums lose more."""


def read_load(path: str | Path, dense_layers: int = 0) -> LoadArray:
    """Read tokens per logical expert from a file or a directory of dumps.

    Understood, by the name's ending and then by content:

    * ``.npz`` or ``.safetensors`` with an array ``load`` of shape [L, E] or [T, L, E], oldest window first;
    * ``.json``: ``{"load": ...}`` or SGLang's ``{"logical_count": ...}``, the same shapes as nested lists;
    * ``.pt``: a dump of SGLang's expert distribution recorder, see :func:`sglang.recorded_load`;
    * a directory in which a run has recorded its load, see `load.series`;
    * a directory of SGLang ``.pt`` dumps of modes ``per_pass`` and ``per_token``, one or more files a rank;
    * a directory of TensorRT-LLM expert statistics, see :func:`tensorrt_llm.expert_statistics`;
    * a directory that Megatron-LM's ``--moe-routing-trace-path`` has filled, or one rank's ``.jsonl`` of it, see
      :func:`megatron.traced_load`;
    * a ``.pt`` file that slime's ``--save-debug-rollout-data`` has written, or a directory of them, one window a
      rollout, see :func:`slime.replayed_load`;
    * the word ``sample``, where nothing has this name: a series that comes along, to try things out. It was drawn, not
      measured: 60 windows of 4 layers of 64 experts, 16,384 choices a layer, over three domains of 20 windows.

    Args:
        path: file or directory.
        dense_layers: leading layers without experts that the file counts too (SGLang numbers all layers of the
            model, 3 of DeepSeek-V3's 61 are dense); they are left out.

    Returns:
        float64 [T, L, E], tokens; T = 1 for a file of one window.

    Raises:
        LoadFileError: missing, of another format, or with values that are no token counts.
    """
    path = resolved_path(path)
    try:
        content = open_content(path)
        found = find_load(content)
        if found is None:
            raise FormatError(_no_load(content))
        return checked_load(found[0], dense_layers)
    except OSError as error:
        raise LoadFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except FileError as error:
        raise LoadFileError(f"{path}: {error}") from None


def resolved_path(path: str | Path) -> Path:
    """The file that is meant: ``sample`` comes along, where nothing has this name."""
    path = Path(path)
    return Path(__file__).with_name("sample.npz") if path == Path(SAMPLE) and not path.exists() else path


def write_load(path: str | Path, load: ArrayLike) -> None:
    """Write tokens per logical expert, [L, E] or [T, L, E], as ``.npz``, ``.safetensors`` or ``.json``.

    Raises:
        LoadFileError: another ending, or values that are no token counts.
    """
    path = Path(path)
    try:
        require_writable(path, OWN.load_endings)
        OWN.save_load(path, checked_load(load, 0), 0)
    except FileError as error:
        raise LoadFileError(f"{path}: {error}") from None


def layers_without_tokens(load: LoadArray) -> int:
    """How many leading layers of a [T, L, E] load carry no token in any window: dense layers, as a rule."""
    busy = np.flatnonzero(load.any(axis=(0, 2)))
    return int(busy[0]) if len(busy) else load.shape[1]


def find_load(content: Content) -> tuple[Any, Engine] | None:
    """The load in a file, unchecked, and the engine whose file it is; None: it holds none."""
    for engine in ENGINES:
        load = engine.load(content)
        if load is not None:
            return load, engine
    return None


def checked_load(values: ArrayLike, dense_layers: int) -> LoadArray:
    """float64 [T, L, E] without the leading dense layers.

    Raises:
        FormatError: values that are no token counts, or another shape.
    """
    load = numbers(values, "load")
    load = load[None] if load.ndim == 2 else load
    if load.ndim != 3 or load.size == 0:
        raise FormatError(
            f"load has shape {list(load.shape)}; it must be [layers, experts] or [windows, layers, experts]"
        )
    if not 0 <= dense_layers < load.shape[1]:
        raise FormatError(f"{dense_layers} dense layers of {load.shape[1]}: none would be left")
    load = load[:, dense_layers:]
    bad = np.argwhere(~((load >= 0) & (load < MOST_TOKENS)))
    if len(bad):
        window, layer, expert = bad[0]
        raise FormatError(
            f"window {window}, layer {layer + dense_layers}, expert {expert}: {load[window, layer, expert]} is no "
            "token count; counts are from 0 to 2**53"
        )
    return np.ascontiguousarray(load)


def neither(content: Content) -> str:
    """What to say of a file in which no engine finds anything."""
    return f"neither a placement nor a load: it holds {_held(content)}"


def _no_load(content: Content) -> str:
    for engine in ENGINES:
        with suppress(FileError, PlacementError):  # one that is broken is none of ours, either
            if engine.placement(content) is not None:
                return f'holds a placement ({engine.name}), not a load; write a load as {{"load": [...]}}'
    wanted = " or ".join(engine.load_names[content.kind] for engine in ENGINES if content.kind in engine.load_names)
    if content.kind == "directory":
        return f"no load in this directory: it has no {wanted}"
    return f"no {wanted or 'load'} in it, only {_held(content)}: store the counts under that name"


def _held(content: Content) -> str:
    if content.kind == "directory":
        return "no file that an engine dumps"
    return names_in(content.value) if isinstance(content.value, Mapping) else f"a {type(content.value).__name__}"
