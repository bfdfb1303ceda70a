"""SGLang: ``--init-expert-location`` maps, and dumps of its expert distribution recorder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...observe.run_folder import JobRecord
from ...placement import Placement
from ...utils.files import replacing, write_file
from .base import Engine, ExpertMap
from .reading import Content, FormatError, LoadArray, expert_ids, names_in, numbers, read_named_pt, require_few


class SGLang(Engine):
    name = "sglang"
    numbers_dense_layers = has_dense_rows = True
    placement_endings = load_endings = (".json", ".pt")
    load_names: ClassVar = {
        "json": '"logical_count"',
        "pt": '"logical_count" (or "records" with "last_physical_to_logical_map")',
        "directory": "*.pt",
    }

    def placement(self, content: Content) -> ExpertMap | None:
        """``--init-expert-location``, as JSON or ``.pt``: ``{"physical_to_logical_map": [num_layers][P]}``.

        Its reader (``srt/eplb/expert_location.py``, ``compute_initial_expert_location_metadata``) passes every key on
        as an argument, so the map has no other; rows are the model's layers, dense ones included (their rows must be
        valid and are not used); P is experts plus ``--ep-num-redundant-experts`` and must be a multiple of the EP
        size. Files written here were read by that function of sglang 0.5.23, as JSON and as ``.pt``.
        """
        if content.kind not in ("json", "pt") or not content.holds("physical_to_logical_map"):
            return None
        return ExpertMap(content.value["physical_to_logical_map"])

    def load(self, content: Content) -> JobRecord | None:
        """A dump of its expert distribution recorder, or a directory of dumps.

        Modes ``stat`` and ``stat_approx`` dump ``logical_count``, see `_summed`; ``per_pass`` and ``per_token`` dump
        ``records`` of one rank, see `_recorded`: give their whole directory, so that all ranks are counted. Checked
        against SGLang's ``srt/eplb/expert_distribution.py`` and ``srt/eplb/eplb_simulator/reader.py``.
        """
        if content.kind == "directory":
            files = sorted(content.path.glob("*.pt"))
            first = read_named_pt(files[0]) if len(files) == 1 else None
            if first is not None and "logical_count" in first:
                return JobRecord(_summed(first["logical_count"]))
            return JobRecord(_recorded(map(read_named_pt, files))) if files else None
        if content.kind in ("json", "pt") and content.holds("logical_count"):
            return JobRecord(_summed(content.value["logical_count"]))
        return JobRecord(_recorded([content.value])) if content.kind == "pt" and content.holds("records") else None

    def save_placement(self, path: Path, placement: Placement, dense_layers: int) -> None:
        trivial = np.arange(placement.num_slots) % placement.num_experts  # what SGLang gives layers without a plan
        rows = [trivial.tolist()] * dense_layers + placement.physical_to_logical.tolist()
        _save(path, "physical_to_logical_map", rows)

    def save_load(self, path: Path, load: LoadArray, dense_layers: int) -> None:
        padded = np.pad(load, ((0, 0), (dense_layers, 0), (0, 0))).round().astype(np.int64)
        _save(path, "logical_count", padded.tolist())


def _summed(logical_count: Any) -> LoadArray:
    """Return float64 [T, L, E] from a dump's ``logical_count`` [passes, L, E], already summed over ranks.

    It is a ring buffer: passes that were never filled are zero, and left out here; once the ring has turned, its first
    row is not its oldest.
    """
    counts = numbers(logical_count, "logical_count")
    counts = counts[None] if counts.ndim == 2 else counts
    if counts.ndim != 3:
        raise FormatError(f"logical_count has shape {list(counts.shape)}; it must be [passes, layers, experts]")
    filled = counts.any(axis=(1, 2))
    return counts[filled] if filled.any() else counts[:1]


def _recorded(dumps: Iterable[Mapping[str, Any]]) -> LoadArray:
    """Return float64 [T, L, E], one window a forward pass, from the ``records`` of all ranks, one dump at a time.

    A record has ``global_physical_count`` [L, P], a dump ``last_physical_to_logical_map`` [L, P]. Records from before a
    rebalance are read through the map after it, as SGLang's own reader does: record with a fixed placement.
    """
    by_pass: dict[int, LoadArray] = {}
    shape: tuple[int, ...] = ()
    for dump in dumps:
        for number, logical in _passes(dump):
            shape = shape or logical.shape
            if logical.shape != shape:
                raise FormatError("the dumps in this directory are of different models: give one run's dumps alone")
            by_pass[number] = by_pass[number] + logical if number in by_pass else logical
            require_few(len(by_pass) * logical.size, "the recording")
    if not by_pass:
        raise FormatError("the recorder had recorded nothing: start it before the traffic, dump after it")
    return np.stack([by_pass[number] for number in sorted(by_pass)])


def _passes(dump: Mapping[str, Any]) -> Iterable[tuple[int, LoadArray]]:
    """Yield the passes that one rank recorded: their numbers and tokens per logical expert, [L, E]."""
    if "records" not in dump or "last_physical_to_logical_map" not in dump:
        raise FormatError(
            f'no SGLang expert distribution: it holds {names_in(dump)}, neither "logical_count" nor "records" '
            'with "last_physical_to_logical_map"'
        )
    try:
        records = [(record["forward_pass_id"], record["global_physical_count"]) for record in dump["records"]]
    except (TypeError, LookupError):
        raise FormatError('a record without "forward_pass_id" or "global_physical_count"') from None
    if not all(isinstance(number, int) for number, _ in records):
        raise FormatError('a "forward_pass_id" that is no whole number')
    expert_LP = expert_ids(dump["last_physical_to_logical_map"], "last_physical_to_logical_map")
    layers, slots = expert_LP.shape
    if not expert_LP.size or not ((expert_LP >= 0) & (expert_LP < slots)).all():
        raise FormatError("last_physical_to_logical_map must be [layers, slots] of expert ids")
    experts = int(expert_LP.max()) + 1
    flat = (np.arange(layers)[:, None] * experts + expert_LP).ravel()
    for number, counts in records:
        count_LP = numbers(counts, "global_physical_count")
        if count_LP.shape != expert_LP.shape:
            raise FormatError(
                f"a record counts {list(count_LP.shape)} [layers, slots], the map has {list(expert_LP.shape)}"
            )
        by_expert: LoadArray = np.bincount(flat, count_LP.ravel(), layers * experts).astype(np.float64)
        yield number, by_expert.reshape(layers, experts)


def _save(path: Path, name: str, values: list[Any]) -> None:
    if path.suffix != ".pt":
        write_file(path, json.dumps({name: values}))
        return
    import torch

    with replacing(path) as file:
        torch.save({name: torch.tensor(values)}, file)
