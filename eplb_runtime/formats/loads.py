"""Load files: tokens per logical expert, window after window, as people and serving engines store them.

Reads and writes arrays only; measuring a running model is the rest of this room's business. Nothing here unpickles
objects: ``.npz`` is opened without pickles, ``.pt`` with ``weights_only``.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

LoadArray = NDArray[np.float64]

KINDS = ".npz, .safetensors, .json, .pt (SGLang) or a directory of SGLang or TensorRT-LLM dumps"


class LoadFileError(ValueError):
    """A load file that cannot be used; the message names the file, says what is wrong and how to mend it."""


def read_load(path: str | Path, dense_layers: int = 0) -> LoadArray:
    """Read tokens per logical expert from a file or a directory of dumps.

    Understood, by the name's ending and then by content:

    * ``.npz`` or ``.safetensors`` with an array ``load`` of shape [L, E] or [T, L, E], oldest window first;
    * ``.json``: ``{"load": ...}`` or SGLang's ``{"logical_count": ...}``, the same shapes as nested lists;
    * ``.pt``: a dump of SGLang's expert distribution recorder, see :func:`sglang_load`;
    * a directory of SGLang ``.pt`` dumps of modes ``per_pass`` and ``per_token``, one or more files a rank;
    * a directory of TensorRT-LLM expert statistics, see :func:`tensorrt_llm_load`.

    Args:
        path: file or directory.
        dense_layers: leading layers without experts that the file counts too (SGLang numbers all layers of the
            model, 3 of DeepSeek-V3's 61 are dense); they are left out.

    Returns:
        float64 [T, L, E], tokens; T = 1 for a file of one window.

    Raises:
        LoadFileError: missing, of another format, or with values that are no token counts.
    """
    path = Path(path)
    try:
        if path.is_dir():
            load = _read_directory(path)
        else:
            reader = _READERS.get(path.suffix)
            if reader is None:
                raise LoadFileError(f"cannot tell what kind of load file this is; give {KINDS}")
            load = reader(path)
        return _checked(load, dense_layers)
    except OSError as error:
        raise LoadFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except LoadFileError as error:
        raise LoadFileError(f"{path}: {error}") from None


def write_load(path: str | Path, load: ArrayLike) -> None:
    """Write tokens per logical expert, [L, E] or [T, L, E], as ``.npz``, ``.safetensors`` or ``.json``.

    Raises:
        LoadFileError: another ending, or values that are no token counts.
    """
    path = Path(path)
    checked = _checked(load, 0)
    array = checked.astype(np.int64) if np.array_equal(checked, np.floor(checked)) else checked
    if path.suffix == ".npz":
        np.savez_compressed(path, load=array)
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file({"load": array}, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps({"load": array.tolist()}))
    else:
        raise LoadFileError(f"{path}: a load file is written as .npz, .safetensors or .json")


def layers_without_tokens(load: LoadArray) -> int:
    """How many leading layers of a [T, L, E] load carry no token in any window: dense layers, as a rule."""
    busy = np.flatnonzero(load.any(axis=(0, 2)))
    return int(busy[0]) if len(busy) else load.shape[1]


# -- the serving engines' dumps ----------------------------------------------------------------------------------


def sglang_load(content: Mapping[str, Any]) -> LoadArray:
    """Tokens per logical expert in what SGLang's expert distribution recorder dumped.

    Two shapes of dump: modes ``stat`` and ``stat_approx`` hold ``logical_count`` [passes, L, E], already summed over
    ranks (a ring buffer: passes that were never filled are zero, and left out here; once the ring has turned, its
    first row is not its oldest). Modes ``per_pass`` and ``per_token`` hold ``records`` of one rank with
    ``global_physical_count`` [L, P] by pass, and ``last_physical_to_logical_map`` [L, P]; give the whole directory, so
    that all ranks are counted. Records from before a rebalance are read through the map after it, as SGLang's own
    reader does: record with a fixed placement.

    Checked against SGLang's ``srt/eplb/expert_distribution.py`` and ``srt/eplb/eplb_simulator/reader.py``.

    Returns:
        float64 [T, L, E], one window a forward pass.
    """
    return _sglang_load([content])


def _sglang_load(contents: list[Mapping[str, Any]]) -> LoadArray:
    if len(contents) == 1 and "logical_count" in contents[0]:
        counts = _numbers(contents[0]["logical_count"], "logical_count")
        counts = counts[None] if counts.ndim == 2 else counts
        if counts.ndim != 3:
            raise LoadFileError(f"logical_count has shape {list(counts.shape)}; it must be [passes, layers, experts]")
        filled = counts.any(axis=(1, 2))
        return counts[filled] if filled.any() else counts[:1]

    by_pass: dict[int, LoadArray] = {}
    for content in contents:
        if "records" not in content or "last_physical_to_logical_map" not in content:
            raise LoadFileError(
                f'no SGLang expert distribution: it holds {_names(content)}, neither "logical_count" nor "records" '
                'with "last_physical_to_logical_map"'
            )
        try:
            records = [
                (int(record["forward_pass_id"]), record["global_physical_count"]) for record in content["records"]
            ]
        except (TypeError, KeyError, ValueError):
            raise LoadFileError('a record without "forward_pass_id" or "global_physical_count"') from None
        physical_to_logical = _numbers(content["last_physical_to_logical_map"], "last_physical_to_logical_map")
        num_slots = physical_to_logical.shape[-1] if physical_to_logical.ndim == 2 else 0
        if not num_slots or not ((physical_to_logical >= 0) & (physical_to_logical < num_slots)).all():
            raise LoadFileError("last_physical_to_logical_map must be [layers, slots] of expert ids")
        for number, counts in records:
            slots = _numbers(counts, "global_physical_count")
            if slots.shape != physical_to_logical.shape:
                raise LoadFileError(
                    f"a record counts {list(slots.shape)} [layers, slots], "
                    f"the map has {list(physical_to_logical.shape)}"
                )
            logical = _sum_by_expert(slots, physical_to_logical.astype(np.int64))
            by_pass[number] = by_pass[number] + logical if number in by_pass else logical
    if not by_pass:
        raise LoadFileError("the recorder had recorded nothing: start it before the traffic, dump after it")
    if len({counts.shape for counts in by_pass.values()}) > 1:
        raise LoadFileError("the dumps in this directory are of different models: give one run's dumps alone")
    return np.stack([by_pass[number] for number in sorted(by_pass)])


def tensorrt_llm_load(directory: Path) -> LoadArray:
    """Tokens per logical expert in a TensorRT-LLM expert statistics directory.

    ``rank*.safetensors`` hold one count vector [E] by name ``<iteration>_<layer>``; they are summed over ranks.
    ``rank*_raw.safetensors`` are left alone. Layers of the file that are dense simply do not occur, so layer numbers
    are taken in ascending order.

    Checked against TensorRT-LLM's ``examples/wide_ep/ep_load_balancer/utils.py`` (``load_expert_statistic``).

    Returns:
        float64 [T, L, E], one window an iteration.
    """
    counts: dict[tuple[int, int], LoadArray] = {}
    for file in sorted(directory.glob("rank*.safetensors")):
        if file.stem.endswith("_raw"):
            continue
        for name, array in _safetensors(file).items():
            match = re.fullmatch(r"(\d+)_(\d+)", name)
            if match is None:
                raise LoadFileError(f"{file.name} holds {name!r}, which is no <iteration>_<layer>")
            key = (int(match[1]), int(match[2]))
            counts[key] = counts.get(key, 0.0) + array.astype(np.float64)
    iterations, layers = (sorted({key[part] for key in counts}) for part in (0, 1))
    if not counts or len(counts) != len(iterations) * len(layers):
        raise LoadFileError(
            f"{len(counts)} count vectors for {len(iterations)} iterations x {len(layers)} layers: some are missing"
        )
    return np.array([[counts[iteration, layer] for layer in layers] for iteration in iterations])


# -- readers -----------------------------------------------------------------------------------------------------


def _read_npz(path: Path) -> Any:
    try:
        arrays = np.load(path, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise LoadFileError("one bare array; save it with numpy.savez(file, load=counts)")
        with arrays:
            _require(arrays, "load")
            return arrays["load"]
    except LoadFileError:
        raise
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise LoadFileError(f"not an .npz of plain numbers ({_first_line(error)})") from None


def _read_safetensors(path: Path) -> Any:
    arrays = _safetensors(path)
    _require(arrays, "load")
    return arrays["load"]


def _read_json(path: Path) -> Any:
    content = read_json(path)
    if isinstance(content, dict) and "logical_count" in content:
        return sglang_load(content)
    if not isinstance(content, dict):
        raise LoadFileError('a bare list, which is how vLLM writes a placement; write a load as {"load": [...]}')
    _require(content, "load")
    return content["load"]


def _read_pt(path: Path) -> LoadArray:
    return sglang_load(read_pt(path))


def _read_directory(path: Path) -> LoadArray:
    if list(path.glob("rank*.safetensors")):
        return tensorrt_llm_load(path)
    dumps = sorted(path.glob("*.pt"))
    if not dumps:
        raise LoadFileError("no load in this directory: neither *.pt (SGLang) nor rank*.safetensors (TensorRT-LLM)")
    return _sglang_load([read_pt(dump) for dump in dumps])


_READERS: dict[str, Callable[[Path], Any]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".json": _read_json,
    ".pt": _read_pt,
}


def read_json(path: Path) -> Any:
    """A JSON file's content.

    Raises:
        LoadFileError: not JSON.
    """
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise LoadFileError(f"not JSON ({_first_line(error)})") from None


def read_pt(path: Path) -> dict[str, Any]:
    """A ``torch.save`` file's content, a dict of tensors and plain values; refuses every other object.

    Raises:
        LoadFileError: not such a file.
    """
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, KeyError, ... for bad files
        raise LoadFileError(f"not a torch file of tensors and plain values ({_first_line(error)})") from None
    if not isinstance(content, dict):
        raise LoadFileError(f"holds a {type(content).__name__}; a dump holds a dict")
    return content


def _safetensors(path: Path) -> dict[str, NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.exists():
        raise FileNotFoundError(2, "No such file or directory")
    try:
        return dict(load_file(path))
    except (SafetensorError, KeyError, TypeError) as error:
        raise LoadFileError(f"not a safetensors file of plain numbers ({_first_line(error)})") from None


# -- checks ------------------------------------------------------------------------------------------------------


def _checked(values: ArrayLike, dense_layers: int) -> LoadArray:
    load = _numbers(values, "load")
    load = load[None] if load.ndim == 2 else load
    if load.ndim != 3 or load.size == 0:
        raise LoadFileError(
            f"load has shape {list(load.shape)}; it must be [layers, experts] or [windows, layers, experts]"
        )
    if not 0 <= dense_layers < load.shape[1]:
        raise LoadFileError(f"{dense_layers} dense layers of {load.shape[1]}: none would be left")
    load = load[:, dense_layers:]
    bad = np.argwhere(~np.isfinite(load) | (load < 0))
    if len(bad):
        window, layer, expert = bad[0]
        raise LoadFileError(
            f"window {window}, layer {layer + dense_layers}, expert {expert}: {load[window, layer, expert]} is no "
            "token count; counts are finite and not negative"
        )
    return np.ascontiguousarray(load)


def _numbers(values: Any, name: str) -> LoadArray:
    if hasattr(values, "numpy"):
        values = values.numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise LoadFileError(f"{name} is ragged: every window and layer needs the same number of entries") from None
    if array.dtype.kind not in "iuf":
        raise LoadFileError(f"{name} holds {array.dtype}; it must hold numbers")
    return array.astype(np.float64)


def _sum_by_expert(slots: LoadArray, physical_to_logical: NDArray[np.int64]) -> LoadArray:
    layers, experts = len(slots), int(physical_to_logical.max()) + 1
    flat = np.arange(layers)[:, None] * experts + physical_to_logical
    by_expert: LoadArray = np.bincount(flat.ravel(), slots.ravel(), layers * experts).astype(np.float64)
    return by_expert.reshape(layers, experts)


def _require(container: Mapping[str, Any], name: str) -> None:
    if name not in container:
        raise LoadFileError(f'no "{name}" in it, only {_names(container)}: store the counts under that name')


def _names(container: Mapping[str, Any]) -> str:
    shown = [repr(str(name)) for name in list(container)[:6]]
    return ", ".join(shown + ["..."] * (len(container) > 6)) or "nothing"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
