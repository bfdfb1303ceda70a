"""Load files: tokens per logical expert, window after window, as people and serving engines store them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from ...observe.run_folder import JobRecord
from ...utils.files import require_writable
from .engines import OWN, find_load, why_no_load
from .reading import FormatError, LoadArray, about, numbers, open_content

SAMPLE = "sample"
MOST_TOKENS = 2.0**53
"""Whole numbers stay below it: larger ones have lost digits, and their sums lose more."""


def read_load(path: str | Path, dense_layers: int = 0) -> LoadArray:
    """Return the load of :func:`read_record`: float64 [T, L, E], tokens; T = 1 for a file of one window."""
    return np.asarray(read_record(path, dense_layers).load)


def read_record(path: str | Path, dense_layers: int = 0) -> JobRecord:
    """Read tokens per logical expert from a file or a folder, with what it says of the job.

    Understood, by the name's ending and then by content:

    * ``.npz`` or ``.safetensors`` with an array ``load`` of shape [L, E] or [T, L, E], oldest window first;
    * ``.json``: ``{"load": ...}`` or SGLang's ``{"logical_count": ...}``, the same shapes as nested lists;
    * a folder in which a run or ``eplb.record`` has recorded its load, see `load.series`;
    * ``.pt`` dumps of SGLang's expert distribution recorder, one or a folder of them, see `sglang`;
    * a folder of TensorRT-LLM expert statistics, see `tensorrt_llm`;
    * a folder that Megatron-LM's ``--moe-routing-trace-path`` has filled, or one rank's file of it, see `megatron`;
    * slime's ``--save-debug-rollout-data``, a file or a folder of them, one window a rollout, see `slime`;
    * the word ``sample``, where nothing has this name: a series that comes along, to try things out. It was drawn, not
      measured: 60 windows of 4 layers of 64 experts, 16,384 choices a layer, over three domains of 20 windows.

    Args:
        dense_layers: leading layers without experts that the file counts too (SGLang numbers all layers of the
            model, 3 of DeepSeek-V3's 61 are dense); they are left out.

    Raises:
        FormatError: missing, of another format, or with values that are no token counts.
    """
    path = resolved_path(path)
    with about(path):
        content = open_content(path)
        found = find_load(content)
        if found is None:
            raise FormatError(why_no_load(content))
        return replace(found[0], load=checked_load(found[0].load, dense_layers))


def resolved_path(path: str | Path) -> Path:
    """Return the file that is meant: ``sample`` comes along, where nothing has this name."""
    path = Path(path)
    return Path(__file__).with_name("sample.npz") if path == Path(SAMPLE) and not path.exists() else path


def write_load(path: str | Path, load: ArrayLike) -> None:
    """Write tokens per logical expert, [L, E] or [T, L, E], as ``.npz``, ``.safetensors`` or ``.json``.

    Raises:
        FormatError: another ending, or values that are no token counts.
    """
    path = Path(path)
    with about(path, reading=False):
        require_writable(path, OWN.load_endings)
        OWN.save_load(path, checked_load(load, 0), 0)


def layers_without_tokens(load: LoadArray) -> int:
    """Return how many leading layers of a [T, L, E] load carry no token in any window: dense layers, as a rule."""
    busy = np.flatnonzero(load.any(axis=(0, 2)))
    return int(busy[0]) if len(busy) else load.shape[1]


def checked_load(values: ArrayLike, dense_layers: int) -> LoadArray:
    """Return token counts as float64 [T, L, E] without the leading dense layers.

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
