"""Rows in order go through the library's own kernel without being sorted again, and give the very same numbers."""

from __future__ import annotations

import pytest
import torch
from moe_models import FAMILIES, make_model
from torch.overrides import TorchFunctionMode

from eplb_runtime.experts.compute import SlotCounts
from eplb_runtime.hosts.transformers import compute as room
from eplb_runtime.hosts.transformers.describe import describe

COUNTS = (0, 5, 1, 17, 0, 64, 3, 8)
WIDTH = 32


class Calls(TorchFunctionMode):
    """Names of the torch functions that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def compute_of(family: str, implementation: str, dtype: torch.dtype = torch.float32) -> tuple:
    model = make_model(family).to(dtype)
    model.set_experts_implementation(implementation)
    layer = describe(model).layers[0]
    return layer.compute, [getattr(layer.experts, name).detach() for name in layer.parameters]


def run(call, weights: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(COUNTS), WIDTH, generator=generator).to(dtype).requires_grad_()
    weights = [weight.clone().requires_grad_() for weight in weights]
    out = call(rows, SlotCounts.of(COUNTS, rows.device), weights)
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    return [out.detach(), rows.grad, *(weight.grad for weight in weights)]


def sorted_again(compute: room.RowCompute):
    def call(rows: torch.Tensor, counts: SlotCounts, weights: list[torch.Tensor]) -> torch.Tensor:
        with room._reading(compute._experts, compute._names, weights):
            return compute._sorted_again(rows, counts)

    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_grouped_mm_gives_the_bits_of_the_modules_own_forward_and_sorts_nothing(
    family: str, dtype: torch.dtype
) -> None:
    compute, weights = compute_of(family, "grouped_mm", dtype)
    first = run(compute, weights, dtype)  # looks whether it may
    with Calls() as calls:
        found = run(compute, weights, dtype)
    with Calls() as own_calls:
        own_results = run(sorted_again(compute), weights, dtype)
    assert "sort" in own_calls.names
    assert not {"sort", "argsort"} & set(calls.names)
    for one, again, own in zip(first, found, own_results, strict=True):
        assert torch.equal(one, own)
        assert torch.equal(again, own)
        assert own.abs().max() > 0


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_implementations_are_the_modules_own_forward(implementation: str) -> None:
    compute, weights = compute_of("olmoe", implementation)
    for found, own in zip(
        run(compute, weights, torch.float32), run(sorted_again(compute), weights, torch.float32), strict=True
    ):
        assert torch.equal(found, own)


@pytest.mark.parametrize("fault", ["another result", "another signature"])
def test_a_library_that_does_something_else_is_left_to_do_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, weights = compute_of("olmoe", "grouped_mm")
    ours = room._grouped_mm

    def changed(*args):
        if fault == "another signature":
            raise TypeError("unexpected keyword argument")
        return ours(*args) * (1 + 1e-6)

    monkeypatch.setattr(room, "_grouped_mm", changed)
    own = run(sorted_again(compute), weights, torch.float32)
    for _ in range(2):
        for one, other in zip(run(compute, weights, torch.float32), own, strict=True):
            assert torch.equal(one, other)


def test_slots_of_rows_and_counts_are_told_from_offsets() -> None:
    counts = SlotCounts.of([2, 0, 3], torch.device("cpu"))
    assert counts.offsets_S.tolist() == [2, 2, 5]
    assert counts.counts_S.tolist() == [2, 0, 3]
    assert counts.slot_of_rows(5).tolist() == [0, 0, 2, 2, 2]
    assert counts.slot_of_rows(7).tolist() == [0, 0, 2, 2, 2, 2, 2]
    assert SlotCounts(counts.offsets_S, None).known() == [2, 0, 3]
