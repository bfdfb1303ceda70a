"""Placements and loads to and from the serving engines' files.

SGLang (``--init-expert-location``): ``{"physical_to_logical_map": [num_layers][P]}`` and no other key, since its reader
(``compute_initial_expert_location_metadata``, of 0.5.23) passes every key on as an argument; rows are the model's
layers, dense ones included (their rows must be valid and are not used).
vLLM: ``physical_to_logical_map`` as nested lists, [MoE layers][P], as its pull requests 49572 and 53022 propose.
TensorRT-LLM (``llmapi/llm_args.py``, ``MoeLoadBalancerConfig``): ``num_slots``, ``initial_global_assignments`` and
``layer_updates_per_iter``; every MoE layer has a row under its number in the model. These files are written alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ...utils.files import FileError, require_writable, write_file
from ...utils.placement_file import ENDINGS, FILE_FORMAT
from . import loads
from .reading import Content, about, expert_ids, open_content

OWN = "eplb-runtime"
FORMATS = {OWN: ENDINGS, "sglang": (".json",), "vllm": (".json",), "tensorrt-llm": (".yaml", ".yml")}
"""Endings of what can be written, by format."""
NUMBERS_DENSE_LAYERS = ("sglang", "tensorrt-llm", "slime")
"""Formats whose layer numbers count the model's dense layers too; others have MoE layers only."""


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did. ``kind`` is "placement" or "load"; ``shape`` is [L, P] or [T, L, E].

    ``filled_slots``: empty replica slots that were given a copy, since no engine's map can hold an empty slot.
    """

    kind: str
    source_format: str
    format: str
    shape: tuple[int, ...]
    filled_slots: int = 0


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str | None = None,
    num_ranks: int | None = None,
    dense_layers: int | None = None,
) -> Conversion:
    """Read a placement or a load, write it in another format, and return what was done.

    Args:
        source: any file that :func:`read_placement` or :func:`loads.read_load` understands.
        destination: the file to write.
        to: one of ``FORMATS``; None: TensorRT-LLM's for ``.yaml``, else our own. Loads are written in our own.
        num_ranks: EP size R; engines' maps do not say it, and our own files need it.
        dense_layers: leading layers of the model without experts: left out of files that number them when read, put
            back when written. Required where one of both formats numbers them.

    Raises:
        FileError: what is wrong with which file.
        OSError: the destination cannot be written.
    """
    source, destination = loads.resolved_path(source), Path(destination)
    to = to or ("tensorrt-llm" if destination.suffix in FORMATS["tensorrt-llm"] else OWN)
    if to not in FORMATS:
        raise FileError(f"unknown format {to!r}; choose one of: {', '.join(FORMATS)}")
    with about(source):
        content = open_content(source)
        kind, loaded = _map_in(content), None
        if kind is None and (loaded := loads.find_load(content)) is None:
            raise FileError(f"neither a placement nor a load: {loads.held_in(content)}")
        if loaded is not None and num_ranks is not None:
            raise FileError("it holds a load, which has no ranks: leave --ranks out")
        if loaded is not None and to != OWN:
            raise FileError(f"{to} reads no load file: plan, and convert the plan")
        if kind not in (None, OWN) and to == OWN and num_ranks is None:
            raise FileError(f"a {kind} map does not say how many ranks it is for: give --ranks R")
        origin = kind or (loaded[0] if loaded else "")
        numbering = [name for name in (origin, to) if name in NUMBERS_DENSE_LAYERS]
        if numbering and dense_layers is None:
            asked = "give --dense-layers N, the number before the first MoE layer (0: none)"
            raise FileError(f"{numbering[0]} files number each layer of the model: {asked}")
        if dense_layers and not numbering:
            raise FileError(f"neither {origin} nor {to} files number dense layers: leave --dense-layers out")
        skipped = (dense_layers or 0) if origin in NUMBERS_DENSE_LAYERS else 0
        if loaded is not None:
            load = loads.checked_load(loaded[1].load, skipped)
        else:
            placement = _placement_in(content, num_ranks, skipped)
    if loaded is not None:
        loads.write_load(destination, load)
        return Conversion("load", origin, to, load.shape)
    filled = write_placement(destination, placement, to, dense_layers or 0)
    return Conversion("placement", origin, to, placement.physical_to_logical.shape, filled)


def read_placement(path: str | Path, num_ranks: int, dense_layers: int = 0) -> Placement:
    """Return the placement in our own file, or in SGLang's or vLLM's map, which has the free layout.

    Args:
        num_ranks: EP size R.
        dense_layers: leading rows of an SGLang map that are left out.

    Raises:
        FileError: the file holds no placement, or one for another number of ranks.
    """
    path = Path(path)
    with about(path):
        content = open_content(path)
        kind = _map_in(content)
        if kind is None:
            raise FileError(f"no placement: {loads.held_in(content)}")
        return _placement_in(content, num_ranks, dense_layers if kind in NUMBERS_DENSE_LAYERS else 0)


def write_placement(path: str | Path, placement: Placement, to: str = OWN, dense_layers: int = 0) -> int:
    """Write a placement to a file in one of ``FORMATS``; an engine's map loses homes and epoch. Layers of SGLang's and
    TensorRT-LLM's maps are numbered from ``dense_layers`` on; SGLang's has a row for each dense layer, too.

    Returns:
        how many empty replica slots were given a copy (0 in our own format, which keeps them empty).
    """
    require_writable(path := Path(path), FORMATS[to])
    if to == OWN:
        placement.save(path)
        return 0
    rows = fill_empty_slots(placement).tolist()
    if to == "sglang":
        trivial = np.arange(placement.num_slots) % placement.num_experts  # what SGLang gives layers without a plan
        text = json.dumps({"physical_to_logical_map": [trivial.tolist()] * dense_layers + rows})
    elif to == "vllm":
        text = json.dumps(rows)
    else:
        lines = [f"  {layer}: {json.dumps(row)}\n" for layer, row in enumerate(rows, start=dense_layers)]
        head = f"num_slots: {placement.num_slots}\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n"
        text = head + "".join(lines)
    write_file(path, text)
    return int((placement.physical_to_logical == EMPTY).sum())


def fill_empty_slots(placement: Placement) -> NDArray[np.int32]:
    """Return int32 [L, P], a copy of the map in which each empty slot has the expert that has fewest copies so far and
    is not on that rank; ties go to the lower id."""
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


def _map_in(content: Content) -> str | None:
    """Return the format of the placement in a file; None: it holds none."""
    if content.kind == "json" and content.holds("format") and content.value["format"] == FILE_FORMAT:
        return OWN
    if content.kind in ("json", "pt") and content.holds("physical_to_logical_map"):
        return "sglang"
    return "vllm" if content.kind == "json" and isinstance(content.value, list) else None


def _placement_in(content: Content, num_ranks: int | None, skipped: int) -> Placement:
    """Return the placement for so many ranks, without the first ``skipped`` rows of an engine's map."""
    if _map_in(content) == OWN:
        placement = Placement.from_fields(content.value)
        if num_ranks not in (None, placement.num_ranks):
            raise FileError(f"the placement is for {placement.num_ranks} ranks, not {num_ranks}")
        return placement
    held = content.value if isinstance(content.value, list) else content.value["physical_to_logical_map"]
    rows = expert_ids(held, "the map").astype(np.int64)
    if skipped and skipped >= len(rows):
        raise FileError(f"{skipped} dense layers of {len(rows)}: none would be left")
    rows = rows[skipped:]
    return Placement(rows, int(rows.max(initial=-1)) + 1, num_ranks or 1)
