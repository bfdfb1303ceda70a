"""One batch's route: what a rank sends fits what the others expect, whatever the placement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eplb_runtime.moe.routing import lookup
from eplb_runtime.moe.routing import splitter as splitter_module
from eplb_runtime.moe.routing.lookup import SlotTable, record_use
from eplb_runtime.moe.routing.splitter import BatchSplitter, SplitSettings
from eplb_runtime.placement import Placement

HOME = Placement([[0, 1, 2, -1, 2, 3, 1, 0]], 4, 2, [[0, 1, 4, 5]])


@pytest.mark.parametrize("least_tokens", [0, 10**6], ids=["split", "all at home"])
def test_every_choice_goes_to_a_slot_of_its_expert_that_expects_it(least_tokens: int) -> None:
    splitters = [
        BatchSplitter(HOME, torch.device("cpu"), rank, SplitSettings(ranks_per_node=1, least_tokens=least_tokens))
        for rank in range(2)
    ]
    chosen = [torch.from_numpy(np.random.default_rng(rank).integers(0, 4, (50, 2))) for rank in range(2)]
    counts_RE = np.stack([splitter.counts(ids)[0].numpy() for splitter, ids in zip(splitters, chosen, strict=True)])
    routes = [splitter.route(0, ids, counts_RE) for splitter, ids in zip(splitters, chosen, strict=True)]
    in_slot = torch.from_numpy(np.array(HOME.physical_to_logical[0]))
    for rank, (ids, (slots, counts)) in enumerate(zip(chosen, routes, strict=True)):
        assert torch.equal(in_slot[slots], ids.to(in_slot.dtype))
        assert np.array_equal(np.bincount(slots.reshape(-1), minlength=HOME.num_slots), counts.sent_P)
        expected = np.stack([other.sent_P.reshape(2, -1)[rank] for _, other in routes])
        assert np.array_equal(counts.received_RS, expected)


def splitter(placement: Placement, rank: int = 0) -> BatchSplitter:
    return BatchSplitter(placement, torch.device("cpu"), rank, SplitSettings(ranks_per_node=1))


PLACEMENTS = (
    Placement([[0, 1, 2, -1, 2, 3, 1, 0]] * 3, 4, 2, [[0, 1, 4, 5]] * 3),
    Placement(
        [[0, 1, 2, -1, 2, 3, 1, 0], [3, 1, 2, 0, 2, 0, 1, 3], [0, 1, 2, 3, 2, 3, 1, 0]],
        4,
        2,
        [[0, 1, 4, 5], [5, 1, 4, 0], [0, 1, 4, 5]],
    ),
    Placement(
        [[0, 1, -1, -1, 2, 3, -1, -1], [3, 1, 2, 0, 2, 0, 1, 3], [0, 2, 1, 3, 1, 3, -1, 0]],
        4,
        2,
        [[0, 1, 4, 5], [5, 1, 4, 0], [0, 4, 1, 5]],
    ),
)


def test_following_placements_gives_what_a_new_splitter_gives() -> None:
    following = splitter(PLACEMENTS[0])
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (50, 2)))
    counts_RE = np.stack([following.counts(ids)[0].numpy(), np.array([7, 30, 1, 62])])
    for placement in (*PLACEMENTS, PLACEMENTS[0]):
        following.prepare(placement, range(placement.num_layers))()
        fresh = splitter(placement)
        for layer in range(3):
            assert following.splits(layer) == fresh.splits(layer) == (placement.copy_count[layer].max() > 1)
            slots, counts = following.route(layer, ids, counts_RE)
            expected_slots, expected = fresh.route(layer, ids, counts_RE)
            assert torch.equal(slots, expected_slots)
            assert np.array_equal(counts.sent_P, expected.sent_P)
            assert np.array_equal(counts.received_RS, expected.received_RS)


# -- Tables that a worker's stream has made are read on the stream that trains, and are not freed under it


def test_memory_on_a_device_is_held_for_the_stream_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"training on {device}")
    for kind in ("cuda", "cpu"):
        record_use(SimpleNamespace(device=torch.device(kind), record_stream=held.append))  # type: ignore[arg-type]
    assert held == ["training on cuda"]


@pytest.mark.parametrize("kind", ["table", "splitter"])
def test_a_table_is_held_when_it_is_taken_over_and_not_before(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    used: list[torch.Tensor] = []
    for module in (lookup, splitter_module):
        monkeypatch.setattr(module, "record_use", lambda *tensors: used.extend(tensors))
    placement = Placement.initial(1, 4, 2) if kind == "table" else HOME
    maps: Any = SlotTable(placement, torch.device("cpu")) if kind == "table" else splitter(placement)
    used.clear()
    take_over = maps.prepare(placement, [0])
    assert not used
    take_over()
    assert len(used) == (2 if kind == "table" else 1), "the map and its index; the slots"
