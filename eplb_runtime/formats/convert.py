"""Placements and loads to and from the serving engines' files.

A file is known by its content, not by a name given to it. Only files: no engine is imported, and what each engine's
own reader demands is said, and was checked against its public source, at the format's functions below.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..placement import EMPTY, FILE_FORMAT, Placement, PlacementError
from .loads import LoadArray, LoadFileError, read_json, read_load, read_pt, write_load

IntArray = NDArray[np.int32]

OWN = "eplb-runtime"
FORMATS = (OWN, "sglang", "vllm", "vllm-ascend", "tensorrt-llm")
NUMBER_ALL_LAYERS = ("sglang", "tensorrt-llm")
"""Formats whose layer numbers count the model's dense layers too; the others count MoE layers only."""


class ConvertError(ValueError):
    """A file that cannot be converted; the message says why and how to mend it."""


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did. ``kind`` is "placement" or "load"; ``shape`` is [L, P] or [T, L, E]."""

    kind: str
    source_format: str
    format: str
    shape: tuple[int, ...]
    filled_slots: int = 0
    """Empty replica slots that were given a copy, since no engine's map can hold an empty slot."""


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str | None = None,
    num_ranks: int | None = None,
    dense_layers: int = 0,
) -> Conversion:
    """Read a placement or a load and write it in another format.

    Args:
        source: any file that :func:`read_placement` or ``load.files.read_load`` understands.
        destination: the file to write.
        to: one of ``FORMATS``; None: by the ending (``.yaml`` TensorRT-LLM, ``.pt`` SGLang, others our own).
        num_ranks: EP size R; engine maps do not say it, so our own files and vLLM-Ascend's need it told.
        dense_layers: leading layers of the model without experts, which SGLang and TensorRT-LLM number too: left out
            when read, put back when written.

    Raises:
        ConvertError, LoadFileError, PlacementError: what is wrong with which file.
    """
    source, destination = Path(source), Path(destination)
    to = to or {".yaml": "tensorrt-llm", ".yml": "tensorrt-llm", ".pt": "sglang"}.get(destination.suffix, OWN)
    if to not in FORMATS:
        raise ConvertError(f"unknown format {to!r}; choose one of: {', '.join(FORMATS)}")
    content, source_format = _read_map(source)
    if dense_layers and not {source_format, to} & set(NUMBER_ALL_LAYERS):
        raise ConvertError(f"neither {source_format} nor {to} files number dense layers: leave --dense-layers out")

    if content is None:
        load = read_load(source, dense_layers if source_format == "sglang" else 0)
        _write_load(destination, load, to, dense_layers)
        return Conversion("load", source_format, to, load.shape)

    if isinstance(content, _Map):
        num_ranks = num_ranks or content.num_ranks
        if num_ranks is None and to in (OWN, "vllm-ascend"):
            raise ConvertError(f"{source}: a {source_format} map does not say how many ranks it is for: give --ranks R")
        placement = content.placement(source, num_ranks or 1, dense_layers)
    else:
        placement = _for_ranks(content, source, num_ranks)
    filled = write_placement(destination, placement, to, dense_layers)
    return Conversion("placement", source_format, to, placement.physical_to_logical.shape, filled)


def read_placement(path: str | Path, num_ranks: int, dense_layers: int = 0) -> Placement:
    """A placement from our own file (either layout) or from an engine's map (``free`` layout: maps know no homes).

    Raises:
        ConvertError, PlacementError: the file holds no placement, or one for another number of ranks.
    """
    path = Path(path)
    content, _ = _read_map(path)
    if content is None:
        raise ConvertError(f"{path}: holds a load, not a placement")
    if isinstance(content, _Map):
        return content.placement(path, num_ranks, dense_layers)
    return _for_ranks(content, path, num_ranks)


def write_placement(path: str | Path, placement: Placement, to: str = OWN, dense_layers: int = 0) -> int:
    """Write a placement in one of ``FORMATS``; an engine's map loses homes and epoch.

    Returns:
        how many empty replica slots were given a copy (0 in our own format, which keeps them empty).
    """
    path = Path(path)
    if to == OWN:
        placement.save(path)
        return 0
    rows = fill_empty_slots(placement)
    text = _WRITERS[to](rows, placement, dense_layers)
    if path.suffix == ".pt":
        if to != "sglang":
            raise ConvertError(f"{path}: {to} reads no .pt")
        _save_pt(path, json.loads(text))
    else:
        _write_text(path, text)
    return int((placement.physical_to_logical == EMPTY).sum())


def fill_empty_slots(placement: Placement) -> IntArray:
    """int32 [L, P]: the map with each empty slot given a copy of the expert that has fewest copies so far.

    Ties go to the lower id; never an expert that stands on that rank already, if there is another.
    """
    rows = np.array(placement.physical_to_logical)
    counts = np.array(placement.copy_count)
    for layer, slot in np.argwhere(rows == EMPTY):
        rank_start = slot - slot % placement.slots_per_rank
        on_rank = rows[layer, rank_start : rank_start + placement.slots_per_rank]
        cost = counts[layer] + placement.num_slots * np.isin(np.arange(placement.num_experts), on_rank)
        expert = int(np.argmin(cost))
        rows[layer, slot] = expert
        counts[layer, expert] += 1
    return rows


def _for_ranks(placement: Placement, path: Path, num_ranks: int | None) -> Placement:
    if num_ranks not in (None, placement.num_ranks):
        raise ConvertError(f"{path}: the placement is for {placement.num_ranks} ranks, not {num_ranks}")
    return placement


# -- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Map:
    """An engine's physical-to-logical rows [L, P], before the number of ranks is known."""

    rows: Any
    first_is_moe: bool
    num_ranks: int | None = None

    def placement(self, path: Path, num_ranks: int, dense_layers: int) -> Placement:
        if self.num_ranks not in (None, num_ranks):
            raise ConvertError(f"{path}: the map is for {self.num_ranks} ranks, not {num_ranks}")
        try:
            rows = np.asarray(self.rows)
            if rows.dtype.kind not in "iu" or rows.ndim != 2:
                raise ConvertError("the map must be [layers, slots] of expert ids")
            if not self.first_is_moe:
                if dense_layers >= len(rows):
                    raise ConvertError(f"{dense_layers} dense layers of {len(rows)}: none would be left")
                rows = rows[dense_layers:]
            return Placement(rows, int(rows.max(initial=-1)) + 1, num_ranks)
        except PlacementError as error:
            raise PlacementError(f"{path}: {error}") from None
        except ValueError as error:
            ragged = "the map is ragged: every layer needs the same number of slots"
            raise ConvertError(f"{path}: {error if isinstance(error, ConvertError) else ragged}") from None


def _read_map(path: Path) -> tuple[Placement | _Map | None, str]:
    """The placement in a file, or None when it holds a load; and the format's name."""
    if path.is_dir():
        return None, "tensorrt-llm" if list(path.glob("rank*.safetensors")) else "sglang"
    if not path.exists():
        raise ConvertError(f"{path}: no such file")
    try:
        if path.suffix in (".yaml", ".yml"):
            return _tensorrt_llm_map(_read_yaml(path)), "tensorrt-llm"
        if path.suffix == ".pt":
            content = read_pt(path)
            return (_sglang_map(content), "sglang") if "physical_to_logical_map" in content else (None, "sglang")
        if path.suffix == ".json":
            return _read_json_map(path)
    except (LoadFileError, ConvertError) as error:
        raise type(error)(f"{path}: {error}") from None
    if path.suffix == ".safetensors" and _safetensors_format(path) == FILE_FORMAT:
        return Placement.load(path), OWN
    return None, OWN


def _read_json_map(path: Path) -> tuple[Placement | _Map | None, str]:
    content = read_json(path)
    if isinstance(content, list):
        return _Map(content, True), "vllm"
    if not isinstance(content, dict):
        raise ConvertError("neither a placement nor a load")
    if content.get("format") == FILE_FORMAT:
        return Placement.load(path), OWN
    if "physical_to_logical_map" in content:
        return _sglang_map(content), "sglang"
    if "layer_list" in content:
        return _vllm_ascend_map(content), "vllm-ascend"
    if "logical_count" in content:
        return None, "sglang"
    if "load" in content:
        return None, OWN
    raise ConvertError(f"neither a placement nor a load: it holds {', '.join(map(repr, list(content)[:6]))}")


def _sglang_map(content: Mapping[str, Any]) -> _Map:
    """``--init-expert-location`` of SGLang, as JSON or ``.pt``: ``{"physical_to_logical_map": [num_layers][P]}``.

    Its reader (``srt/eplb/expert_location.py``, ``compute_initial_expert_location_metadata``) passes every key on as
    an argument, so the map stands alone; rows are the model's layers, dense ones included (their rows must be valid
    and are not used); P is experts plus ``--ep-num-redundant-experts`` and must be a multiple of the EP size. Files
    written here were read by that function of sglang 0.5.23, as JSON and as ``.pt``.
    """
    rows = content["physical_to_logical_map"]
    return _Map(rows.tolist() if hasattr(rows, "tolist") else rows, False)


def _vllm_ascend_map(content: Mapping[str, Any]) -> _Map:
    """vLLM-Ascend's expert map: ``layer_list[l].device_list[r].device_expert`` holds the experts of rank r's slots.

    Its readers (``eplb_utils.expert_file_to_tensor``, ``ExpertLoadBalancer``) want ``moe_layer_count`` MoE layers, all
    devices with equally many experts.
    """
    try:
        layers = [[device["device_expert"] for device in layer["device_list"]] for layer in content["layer_list"]]
    except (KeyError, TypeError) as error:
        raise ConvertError(f"a vLLM-Ascend map without {error} in a layer") from None
    ranks = {len(devices) for devices in layers}
    if len(ranks) != 1:
        raise ConvertError(f"layers differ in their number of devices: {sorted(ranks)}")
    return _Map([list(chain.from_iterable(devices)) for devices in layers], True, ranks.pop())


def _tensorrt_llm_map(content: Any) -> _Map:
    """TensorRT-LLM's load balancer configuration: ``initial_global_assignments: {layer: [num_slots]}``.

    Its reader (``llmapi/llm_args.py``, ``MoeLoadBalancerConfig``) takes these keys and no others: ``num_slots``,
    ``initial_global_assignments``, ``layer_updates_per_iter``. Every MoE layer needs a row under its number in the
    model, ``num_slots`` long, that names every expert (``fused_moe/interface.py``); EP size divides ``num_slots``.
    """
    assignments = content.get("initial_global_assignments") if isinstance(content, dict) else None
    if not isinstance(assignments, dict) or not assignments:
        raise ConvertError('no "initial_global_assignments" of layers in it')
    try:
        layers = sorted(assignments, key=int)
    except (TypeError, ValueError):
        raise ConvertError("a layer of initial_global_assignments is no number") from None
    return _Map([assignments[layer] for layer in layers], True)


# -- writing -----------------------------------------------------------------------------------------------------


def _sglang_text(rows: IntArray, placement: Placement, dense_layers: int) -> str:
    trivial = np.arange(placement.num_slots) % placement.num_experts  # what SGLang itself gives layers without a plan
    return json.dumps({"physical_to_logical_map": [trivial.tolist()] * dense_layers + rows.tolist()})


def _vllm_text(rows: IntArray, placement: Placement, dense_layers: int) -> str:
    """vLLM's ``physical_to_logical_map`` as nested lists, [MoE layers][P].

    vLLM's main branch reads no map at start; its proposals to (pull requests 49572 and 53022) take this shape and
    check ids and that every expert has a slot.
    """
    return json.dumps(rows.tolist())


def _vllm_ascend_text(rows: IntArray, placement: Placement, dense_layers: int) -> str:
    by_rank = rows.reshape(len(rows), placement.num_ranks, -1).tolist()
    layers = [
        {
            "layer_id": layer,
            "device_count": placement.num_ranks,
            "device_list": [{"device_id": rank, "device_expert": experts} for rank, experts in enumerate(ranks)],
        }
        for layer, ranks in enumerate(by_rank)
    ]
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers})


def _tensorrt_llm_text(rows: IntArray, placement: Placement, dense_layers: int) -> str:
    lines = [f"  {layer}: {json.dumps(row)}" for layer, row in enumerate(rows.tolist(), start=dense_layers)]
    head = [f"num_slots: {placement.num_slots}", "layer_updates_per_iter: 0", "initial_global_assignments:"]
    return "\n".join(head + lines) + "\n"


_WRITERS: dict[str, Callable[[IntArray, Placement, int], str]] = {
    "sglang": _sglang_text,
    "vllm": _vllm_text,
    "vllm-ascend": _vllm_ascend_text,
    "tensorrt-llm": _tensorrt_llm_text,
}


def _write_load(path: Path, load: LoadArray, to: str, dense_layers: int) -> None:
    if to == OWN:
        write_load(path, load)
        return
    if to != "sglang":
        raise ConvertError(f"{path}: {to} reads no load file; write the load for sglang, or plan and convert the plan")
    padded = np.pad(load, ((0, 0), (dense_layers, 0), (0, 0))).round().astype(np.int64)
    if path.suffix == ".pt":
        _save_pt(path, {"logical_count": padded.tolist()})
    else:
        _write_text(path, json.dumps({"logical_count": padded.tolist()}))


def _save_pt(path: Path, fields: dict[str, Any]) -> None:
    import torch

    partial = path.with_name(path.name + ".partial")
    torch.save({name: torch.tensor(values) for name, values in fields.items()}, partial)
    partial.replace(path)


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def _read_yaml(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConvertError("reading YAML needs PyYAML: pip install 'eplb-runtime[convert]'") from None
    try:
        return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConvertError(f"not YAML ({str(error).splitlines()[0]})") from None


def _safetensors_format(path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return (file.metadata() or {}).get("format")
    except SafetensorError:
        raise ConvertError(f"{path}: not a safetensors file") from None
