"""SGLang: ``--init-expert-location`` maps, and dumps of its expert distribution recorder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..placement import Placement
from .arrays import LoadArray, names_in, numbers
from .base import Engine, ExpertMap, write_bytes, write_text
from .content import Content
from .errors import FormatError
from .readers import pt


class SGLang(Engine):
    name = "sglang"
    numbers_dense_layers = has_dense_rows = True
    load_names: ClassVar = {
        "json": '"logical_count"',
        "pt": '"logical_count" (or "records" with "last_physical_to_logical_map")',
        "directory": "*.pt",
    }

    def placement(self, content: Content) -> ExpertMap | None:
        """``--init-expert-location``, as JSON or ``.pt``: ``{"physical_to_logical_map": [num_layers][P]}``.

        Its reader (``srt/eplb/expert_location.py``, ``compute_initial_expert_location_metadata``) passes every key on
        as an argument, so the map stands alone; rows are the model's layers, dense ones included (their rows must be
        valid and are not used); P is experts plus ``--ep-num-redundant-experts`` and must be a multiple of the EP
        size. Files written here were read by that function of sglang 0.5.23, as JSON and as ``.pt``.
        """
        if content.kind not in ("json", "pt") or not content.holds("physical_to_logical_map"):
            return None
        return ExpertMap(content.value["physical_to_logical_map"])

    def load(self, content: Content) -> LoadArray | None:
        """A dump, or a directory of dumps; see :func:`recorded_load`."""
        if content.kind == "directory":
            dumps = sorted(content.path.glob("*.pt"))
            return recorded_load(pt.read(dump) for dump in dumps) if dumps else None
        names = ("logical_count",) if content.kind == "json" else ("logical_count", "records")
        if content.kind not in self.load_names or not any(content.holds(name) for name in names):
            return None
        return recorded_load([content.value])

    def save_placement(self, path: Path, placement: Placement, dense_layers: int) -> None:
        trivial = np.arange(placement.num_slots) % placement.num_experts  # what SGLang gives layers without a plan
        rows = [trivial.tolist()] * dense_layers + placement.physical_to_logical.tolist()
        _save(path, "physical_to_logical_map", rows)

    def save_load(self, path: Path, load: LoadArray, dense_layers: int) -> None:
        padded = np.pad(load, ((0, 0), (dense_layers, 0), (0, 0))).round().astype(np.int64)
        _save(path, "logical_count", padded.tolist())


def recorded_load(dumps: Iterable[Mapping[str, Any]]) -> LoadArray:
    """Tokens per logical expert in what SGLang's expert distribution recorder dumped.

    Two shapes of dump: modes ``stat`` and ``stat_approx`` hold ``logical_count`` [passes, L, E], already summed over
    ranks (a ring buffer: passes that were never filled are zero, and left out here; once the ring has turned, its
    first row is not its oldest). Modes ``per_pass`` and ``per_token`` hold ``records`` of one rank with
    ``global_physical_count`` [L, P] by pass, and ``last_physical_to_logical_map`` [L, P]; give the whole directory, so
    that all ranks are counted. Records from before a rebalance are read through the map after it, as SGLang's own
    reader does: record with a fixed placement.

    Checked against SGLang's ``srt/eplb/expert_distribution.py`` and ``srt/eplb/eplb_simulator/reader.py``.

    Args:
        dumps: one of the first kind alone, or those of all ranks of the second.

    Returns:
        float64 [T, L, E], one window a forward pass.
    """
    dumps = list(dumps)
    if len(dumps) == 1 and "logical_count" in dumps[0]:
        return _filled_passes(dumps[0]["logical_count"])
    by_pass: dict[int, LoadArray] = {}
    for dump in dumps:
        for number, logical in _passes(dump):
            by_pass[number] = by_pass[number] + logical if number in by_pass else logical
    if not by_pass:
        raise FormatError("the recorder had recorded nothing: start it before the traffic, dump after it")
    if len({counts.shape for counts in by_pass.values()}) > 1:
        raise FormatError("the dumps in this directory are of different models: give one run's dumps alone")
    return np.stack([by_pass[number] for number in sorted(by_pass)])


def _filled_passes(logical_count: Any) -> LoadArray:
    counts = numbers(logical_count, "logical_count")
    counts = counts[None] if counts.ndim == 2 else counts
    if counts.ndim != 3:
        raise FormatError(f"logical_count has shape {list(counts.shape)}; it must be [passes, layers, experts]")
    filled = counts.any(axis=(1, 2))
    return counts[filled] if filled.any() else counts[:1]


def _passes(dump: Mapping[str, Any]) -> Iterable[tuple[int, LoadArray]]:
    """The passes that one rank recorded: their numbers and tokens per logical expert, [L, E]."""
    if "records" not in dump or "last_physical_to_logical_map" not in dump:
        raise FormatError(
            f'no SGLang expert distribution: it holds {names_in(dump)}, neither "logical_count" nor "records" '
            'with "last_physical_to_logical_map"'
        )
    try:
        records = [(int(record["forward_pass_id"]), record["global_physical_count"]) for record in dump["records"]]
    except (TypeError, KeyError, ValueError):
        raise FormatError('a record without "forward_pass_id" or "global_physical_count"') from None
    physical_to_logical = numbers(dump["last_physical_to_logical_map"], "last_physical_to_logical_map")
    num_slots = physical_to_logical.shape[-1] if physical_to_logical.ndim == 2 else 0
    if not num_slots or not ((physical_to_logical >= 0) & (physical_to_logical < num_slots)).all():
        raise FormatError("last_physical_to_logical_map must be [layers, slots] of expert ids")
    for number, counts in records:
        slots = numbers(counts, "global_physical_count")
        if slots.shape != physical_to_logical.shape:
            raise FormatError(
                f"a record counts {list(slots.shape)} [layers, slots], the map has {list(physical_to_logical.shape)}"
            )
        yield number, _sum_by_expert(slots, physical_to_logical.astype(np.int64))


def _sum_by_expert(slots: LoadArray, physical_to_logical: NDArray[np.int64]) -> LoadArray:
    layers, experts = len(slots), int(physical_to_logical.max()) + 1
    flat = np.arange(layers)[:, None] * experts + physical_to_logical
    by_expert: LoadArray = np.bincount(flat.ravel(), slots.ravel(), layers * experts).astype(np.float64)
    return by_expert.reshape(layers, experts)


def _save(path: Path, name: str, values: list[Any]) -> None:
    if path.suffix != ".pt":
        write_text(path, json.dumps({name: values}))
        return
    from io import BytesIO

    import torch

    buffer = BytesIO()
    torch.save({name: torch.tensor(values)}, buffer)
    write_bytes(path, buffer.getvalue())
