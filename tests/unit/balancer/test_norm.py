"""The squared norm of an expert does not depend on where its gradient is cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from eplb_runtime.balancer.gradients import norm
from eplb_runtime.balancer.gradients.norm import RangesOfSlots, squares_of_slots

LENGTH = 1000
CUTS = (0, 1, 63, 64, 65, 500, 704, 999, LENGTH)
CPU = torch.device("cpu")


def squares(monkeypatch: pytest.MonkeyPatch, gradients: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """By two ranks on threads, of which each has one side of each cut."""
    ranges = tuple(((0, cut), (cut, LENGTH)) for cut in cuts)
    here, given = Barrier(2), dict[int, Tensor]()

    def reduce(values: Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None) -> None:
        given[id(values)] = values.clone()
        here.wait(60)
        both = torch.stack(list(given.values()))
        here.wait(60)
        given.clear()
        values.copy_(both.sum(0) if op is torch.distributed.ReduceOp.SUM else both.amax(0))
        here.wait(60)

    def of_rank(place: int) -> Tensor:
        kept = [one[slice(*own[place])] for one, own in zip(gradients, ranges, strict=True)]
        layers = [RangesOfSlots([one if one.numel() else None for one in kept], ranges)]
        return squares_of_slots(layers, place, None, CPU)[0]  # type: ignore[arg-type]

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    with ThreadPoolExecutor(2) as ranks:
        found, other = ranks.map(of_rank, range(2))
    torch.testing.assert_close(found, other, rtol=0, atol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("chunk", [norm._CHUNK, 128])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_no_cut_changes_a_bit(monkeypatch: pytest.MonkeyPatch, chunk: int, size: float) -> None:
    monkeypatch.setattr(norm, "_CHUNK", chunk)
    gradient = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, LENGTH) * size
    found = squares(monkeypatch, gradient.expand(len(CUTS), LENGTH), CUTS)
    assert len(set(found.tolist())) == 1
    assert float(found[0]) == pytest.approx(float(gradient.double().square().sum()), rel=1e-12, abs=0)


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_what_is_not_finite_stays(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    gradient = torch.zeros(LENGTH)
    gradient[640] = value
    found = squares(monkeypatch, gradient.expand(len(CUTS), LENGTH), CUTS)
    torch.testing.assert_close(found, torch.full_like(found, value), rtol=0, atol=0, equal_nan=True)


def test_a_gradient_of_another_length_is_refused() -> None:
    layers = [RangesOfSlots([torch.ones(3)], (((0, 4), (4, 8)),))]
    with pytest.raises(RuntimeError, match="3 elements, and 4 of its expert are stepped here"):
        squares_of_slots(layers, 0, None, CPU)  # type: ignore[arg-type]
