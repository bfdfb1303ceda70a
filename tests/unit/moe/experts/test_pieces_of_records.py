"""Experts whose state is divided over ranks: what of a record goes from which rank to which."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from eplb_runtime.moe.experts.optimizer_state import OptimizerStateError
from eplb_runtime.moe.experts.record import End, Record, RecordFormat
from eplb_runtime.moe.experts.registry import ExpertTensor

RANGES = (((0, 12), (0, 0)), ((0, 5), (5, 12)), ((0, 0), (0, 12)))
"""Of three slots, over two ranks: an expert on the first, one cut, one on the second."""
LATE, UNTOUCHED = -7.0, -1.0


def record_of(rank: int, place: int) -> RecordFormat:
    """What one of the ranks has: of weights that it does not step, an old value."""
    weights, state, steps = [], [], []
    for slot, ranges in enumerate(RANGES):
        first, end = ranges[place]
        expert = 100.0 * (3 * rank + slot) + torch.arange(12.0)
        weight = torch.full((3, 4), LATE).flatten()
        weight[first:end] = expert[first:end]
        weights.append(weight.view(3, 4))
        state.append(expert[first:end] + 0.5)
        steps.append(torch.tensor(float(slot)) if first < end else torch.empty(0))
    tensors = [
        ExpertTensor("w", tuple(weights), "parameter", ranges=RANGES),
        ExpertTensor("w/exp_avg", tuple(state), "optimizer_state", ranges=RANGES, part="range"),
        ExpertTensor("w/step", tuple(steps), "optimizer_state", ranges=RANGES, part="number"),
    ]
    return RecordFormat(tuple(tensors))


def travelled(leaves: Record, arrives: Record) -> None:
    """Take a piece from one rank to another."""
    looks = [
        [(s.tensor.name, s.memory.dtype, s.memory.shape, s.offset) for s in one.shards] for one in (leaves, arrives)
    ]
    assert looks[0] == looks[1] and leaves.nbytes == arrives.nbytes
    staged = torch.zeros(leaves.nbytes, dtype=torch.uint8)
    leaves.pack(staged)
    arrives.unpack(staged)


@pytest.mark.parametrize(("source", "destination"), list(product(range(3), repeat=2)))
def test_each_element_comes_once_from_the_rank_that_steps_it(source: int, destination: int) -> None:
    here, there = [record_of(0, place) for place in range(2)], [record_of(1, place) for place in range(2)]
    arrived, state_bytes = torch.zeros(2, 12), 0
    for source_part, part in product(range(2), repeat=2):
        ends = End(source, source_part), End(destination, part)
        leaves = here[source_part].piece(*ends, here=ends[0])
        arrives = there[part].piece(*ends, here=ends[1])
        travelled(leaves, arrives)
        if not leaves.shards:
            continue
        first, end = RANGES[source][source_part]
        arrived[part, first:end] += 1
        state_bytes += sum(one.memory.nbytes for one in leaves.shards if one.tensor.name == "w/exp_avg")
    assert arrived.eq(1).all() and state_bytes == 12 * 4
    expert = 100.0 * source + torch.arange(12.0)
    for part, record in enumerate(there):
        weight, state, step = record.tensors
        first, end = RANGES[destination][part]
        assert torch.equal(weight.row(destination).flatten(), expert)
        assert torch.equal(state.row(destination), expert[first:end] + 0.5)
        assert not step.row(destination).numel() or float(step.row(destination)) == source


def test_a_rank_that_keeps_no_state_can_exchange_weights_with_those_that_do() -> None:
    with_state = record_of(0, 0)
    weights = RecordFormat(with_state.tensors[:1])
    assert weights.digest() == with_state.digest() and weights.state_digest() == b""
    assert with_state.state_digest() == record_of(1, 1).state_digest() != b""
    assert weights.is_divided and not RecordFormat((ExpertTensor("w", torch.ones(2, 3), "parameter"),)).is_divided


@pytest.mark.parametrize(("source", "destination"), list(product(range(3), repeat=2)))
def test_what_is_not_divided_comes_whole_from_the_same_place(source: int, destination: int) -> None:
    def with_whole(rank: int, place: int) -> RecordFormat:
        ours = 10.0 * rank + place
        frozen = ExpertTensor("frozen", tuple(torch.full((2, 3), ours + slot) for slot in range(3)), "parameter")
        buffer = ExpertTensor("count", ours + torch.arange(3.0), "buffer")
        return RecordFormat((frozen, *record_of(rank, place).tensors, buffer))

    here, there = [with_whole(0, place) for place in range(2)], [with_whole(1, place) for place in range(2)]
    for source_part, part in product(range(2), repeat=2):
        ends = End(source, source_part), End(destination, part)
        leaves = here[source_part].piece(*ends, here=ends[0])
        arrives = there[part].piece(*ends, here=ends[1])
        travelled(leaves, arrives)
        whole = [one.tensor.name for one in leaves.shards if one.tensor.name in ("frozen", "count")]
        assert whole == (["frozen", "count"] if source_part == part else [])
    for part, record in enumerate(there):
        frozen, *_, count = record.tensors
        for slot in range(3):
            expected = part + source if slot == destination else 10 + part + slot
            assert frozen.row(slot).eq(expected).all() and count.row(slot) == expected


def test_state_that_is_not_all_here_is_refused_before_anything_is_sent() -> None:
    state = ExpertTensor("w/exp_avg", (torch.ones(3),) * 3, "optimizer_state", ranges=RANGES, part="range")
    with pytest.raises(OptimizerStateError, match="elements 0 to 12 of an expert are not all here"):
        RecordFormat((state,)).piece(End(0, 0), End(0, 0), here=End(0, 0))


def test_other_state_for_some_tensors_of_an_expert_is_refused() -> None:
    def state(name: str) -> ExpertTensor:
        return ExpertTensor(name, (torch.ones(12),) * 3, "optimizer_state", ranges=RANGES, part="range")

    assert RecordFormat((state("v/exp_avg"), state("w/exp_avg"))).state_digest()
    with pytest.raises(OptimizerStateError, match="keeps other state for some"):
        RecordFormat((state("v/momentum"), state("w/exp_avg"))).state_digest()
