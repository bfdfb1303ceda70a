"""Rows filled up by slot, and back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eplb_runtime.moe.experts.aligned import Aligned, aligned, regroup
from eplb_runtime.moe.experts.compute import SlotCounts

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


def test_memory_past_the_last_slot_is_not_read() -> None:
    """And what is behind the last slot's rows comes back as zeros."""
    offsets = torch.tensor([2, 2, 3], dtype=torch.int32)
    rows = torch.full((7, 2), torch.nan)
    rows[:3] = 1
    spaced, places = aligned(SlotCounts(offsets, None), 4, 7)
    filled = regroup(rows, offsets, spaced.offsets_S, offsets, places)
    assert int(filled.sum()) == 6
    back = regroup(filled, spaced.offsets_S, offsets, offsets, 7)
    assert torch.equal(back, torch.tensor([[1.0]] * 3 + [[0.0]] * 4).expand(7, 2))


def test_experts_that_drop_rows_are_named() -> None:
    with pytest.raises(ValueError, match="experts gave 5 rows for 32"):
        Aligned(lambda rows, counts, parameters: rows[:5], 16)(torch.ones(5, 2), counted([2, 3], True), [])
