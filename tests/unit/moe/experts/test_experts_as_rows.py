"""Experts whose state is divided over ranks: what of a record goes from which rank to which."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from eplb_runtime.moe.experts.compute import Aligned, SlotCounts
from eplb_runtime.moe.experts.optimizer_state import OptimizerStateError
from eplb_runtime.moe.experts.registry import End, ExpertTensor, ExpertTensors, Record, RecordFormat, RegistryError

RANGES = (((0, 12), (0, 0)), ((0, 5), (5, 12)), ((0, 0), (0, 12)))
"""Of three slots, over two ranks: an expert on the first, one cut, one on the second."""
LATE = -7.0


def record_of(rank: int, place: int) -> RecordFormat:
    """What one of the ranks has: of weights that it does not step, an old value; and what is not divided."""
    weights, state, steps = [], [], []
    for slot, ranges in enumerate(RANGES):
        first, end = ranges[place]
        expert = 100.0 * (3 * rank + slot) + torch.arange(12.0)
        weight = torch.full((3, 4), LATE).flatten()
        weight[first:end] = expert[first:end]
        weights.append(weight.view(3, 4))
        state.append(expert[first:end] + 0.5)
        steps.append(torch.tensor(float(slot)) if first < end else torch.empty(0))
    frozen = tuple(torch.full((2, 3), 10.0 * rank + place + slot) for slot in range(3))
    tensors = [
        ExpertTensor("frozen", frozen, "parameter"),
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
        names = [one.tensor.name for one in leaves.shards]
        assert ("frozen" in names) == (source_part == part), "whole, from the same place"
        if "w" not in names:
            continue
        first, end = RANGES[source][source_part]
        arrived[part, first:end] += 1
        state_bytes += sum(one.memory.nbytes for one in leaves.shards if one.tensor.name == "w/exp_avg")
    assert arrived.eq(1).all() and state_bytes == 12 * 4
    expert = 100.0 * source + torch.arange(12.0)
    for part, record in enumerate(there):
        frozen, weight, state, step = record.tensors
        for slot in range(3):
            assert frozen.row(slot).eq(part + source if slot == destination else 10 + part + slot).all()
        first, end = RANGES[destination][part]
        assert torch.equal(weight.row(destination).flatten(), expert)
        assert torch.equal(state.row(destination), expert[first:end] + 0.5)
        assert not step.row(destination).numel() or float(step.row(destination)) == source


def test_a_rank_that_keeps_no_state_can_exchange_weights_with_those_that_do() -> None:
    with_state = record_of(0, 0)
    weights = RecordFormat(with_state.tensors[:2])
    assert weights.digest() == with_state.digest() and weights.state_digest() == b""
    assert with_state.state_digest() == record_of(1, 1).state_digest() != b""
    assert weights.is_divided and not RecordFormat((ExpertTensor("w", torch.ones(2, 3), "parameter"),)).is_divided


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


# -- Experts that are tensors of their own move as rows of one tensor do


def experts(count: int = 3) -> tuple[nn.Parameter, ...]:
    return tuple(nn.Parameter(torch.full((2, 4), float(number))) for number in range(count))


def registered(rows: tuple[nn.Parameter, ...], *optimizers: torch.optim.Optimizer) -> ExpertTensors:
    registry = ExpertTensors(1, 3, optimizers)
    registry.add(0, "weight", rows)
    return registry


def step(rows: tuple[nn.Parameter, ...], optimizer: torch.optim.Optimizer) -> None:
    for number, row in enumerate(rows):
        row.grad = torch.full_like(row, number + 1.0)
    optimizer.step()


def test_a_record_takes_an_expert_with_all_its_state_to_another_slot() -> None:
    here, there = experts(), experts()
    formats = []
    for rows in (here, there):
        optimizer = torch.optim.AdamW(rows, lr=0.1)
        step(rows, optimizer)
        formats.append(RecordFormat(tuple(registered(rows, optimizer).of_home(0))))
    record = torch.zeros(formats[0].nbytes, dtype=torch.uint8)
    assert formats[0].digest() == formats[1].digest()
    formats[0].row(2).pack(record)
    formats[1].row(0).unpack(record)
    names = [one.name for one in formats[1].tensors]
    assert names == ["weight", "weight/exp_avg", "weight/exp_avg_sq", "weight/step"]
    for source, target in zip(formats[0].tensors, formats[1].tensors, strict=True):
        assert torch.equal(source.row(2), target.row(0))
        assert torch.equal(source.row(1), target.row(1))
    assert not torch.equal(there[0], there[1]) and torch.equal(there[0], here[2])


def test_gradients_that_stay_may_not_be_used() -> None:
    rows = experts()
    for row in rows:
        row.grad = torch.ones_like(row)
    staying = registered(rows)
    staying.mark_gradients_stale(0)
    with pytest.raises(RuntimeError, match="the gradient of weight is still that of the experts that were"):
        staying.check_no_stale_gradients(rows[1])
    assert [tensor.name for tensor in staying.of_home(0)] == ["weight"]


def test_unequal_experts_and_unequal_state_are_refused() -> None:
    with pytest.raises(RegistryError, match="equal"):
        registered((*experts(2), nn.Parameter(torch.zeros(3, 4))))
    with pytest.raises(RegistryError, match="3 experts"):
        registered(experts(2))
    rows = experts()
    optimizer = torch.optim.AdamW(rows, lr=0.1)
    step(rows[:2], optimizer)
    with pytest.raises(OptimizerStateError, match="step all experts together"):
        registered(rows, optimizer).of_home(0)
    optimizer.state[rows[2]] = {}
    for row in rows:
        optimizer.state[row] = {"step": 3}
    with pytest.raises(OptimizerStateError, match="only tensors move"):
        registered(rows, optimizer).of_home(0)


# -- Rows filled up by slot, and back


COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)


def counted(counts: list[int], on_host: bool) -> SlotCounts:
    known = SlotCounts.of(counts, torch.device("cpu"))
    return known if on_host else SlotCounts(known.offsets_S, None)


@given(counts=COUNTS, multiple=st.sampled_from([1, 2, 16, 17]), on_host=st.booleans())
def test_every_slot_has_its_rows_then_zeros(counts: list[int], multiple: int, on_host: bool) -> None:
    rows, seen = torch.arange(1.0, 3 * sum(counts) + 1).view(-1, 3), {}

    def compute(rows_PD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor]) -> Tensor:
        known = counts_S.known()
        assert sum(known) == rows_PD.shape[0] and not any(count % multiple for count in known)
        assert known == counts_S.counts_S.tolist()
        for mine, filled in zip(rows.split(counts), rows_PD.split(list(known)), strict=True):
            assert torch.equal(filled[: len(mine)], mine) and not filled[len(mine) :].any()
        seen["places"] = rows_PD.shape[0]
        return rows_PD * 2 + 1

    out = Aligned(compute, multiple)(rows, counted(counts, on_host), [])
    assert torch.equal(out, rows * 2 + 1)
    least = sum(-(-count // multiple) * multiple for count in counts)
    most = sum(counts) + len(counts) * (multiple - 1) + multiple - 1
    assert seen["places"] == least if on_host else least <= seen["places"] <= most


@given(counts=COUNTS, on_host=st.booleans())
def test_gradients_are_those_without(counts: list[int], on_host: bool) -> None:
    """Of rows, and of a weight and a bias for each slot: whole numbers, so that no order of sums shows."""
    found = []
    for multiple in (0, 16):
        generator = torch.Generator().manual_seed(0)
        rows, weight, bias, grad = (
            torch.randint(-3, 4, shape, generator=generator).double()
            for shape in ((sum(counts), 2), (len(counts), 2, 2), (len(counts), 2), (sum(counts), 2))
        )
        for tensor in (rows, weight, bias):
            tensor.requires_grad_()
        compute = Aligned(by_slot, multiple) if multiple else by_slot
        compute(rows, counted(counts, on_host), [weight, bias]).backward(grad)
        found.append((rows.grad, weight.grad, bias.grad))
    assert all(map(torch.equal, *found))


def by_slot(rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor]) -> Tensor:
    weight, bias = parameters
    split = rows_MD.split(list(counts_S.known()))
    return torch.cat([rows @ weight[slot] + bias[slot] for slot, rows in enumerate(split)])


def test_where_only_the_device_knows_nothing_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCounts, "known", lambda self: pytest.fail("the host waits"))
    out = Aligned(lambda rows, counts, parameters: rows, 16)(torch.ones(5, 2), counted([2, 0, 3], False), [])
    assert torch.equal(out, torch.ones(5, 2))


def test_experts_that_drop_rows_are_named() -> None:
    with pytest.raises(ValueError, match="experts gave 5 rows for 32"):
        Aligned(lambda rows, counts, parameters: rows[:5], 16)(torch.ones(5, 2), counted([2, 3], True), [])
