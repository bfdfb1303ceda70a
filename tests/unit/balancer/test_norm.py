"""The squared norm of an expert does not depend on where its gradient is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eplb_runtime.balancer.gradients import norm
from eplb_runtime.balancer.gradients.norm import RangesOfSlots, squares_of_slots

LENGTH, BLOCK = 1000, 64
CUTS = (0, 1, 63, 64, 65, 500, 704, 999, LENGTH)


def squares(monkeypatch: pytest.MonkeyPatch, gradients: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """By two ranks, one after the other: they say what they would add, and then get the sum."""
    ranges = tuple(((0, cut), (cut, LENGTH)) for cut in cuts)
    said: list[Tensor] = []

    def of_rank(place: int, reduce: Any) -> list[Tensor]:
        monkeypatch.setattr(norm.dist, "all_reduce", reduce)
        kept = [one[first:end] for one, (first, end) in zip(gradients, [r[place] for r in ranges], strict=True)]
        layers = [RangesOfSlots([one if one.numel() else None for one in kept], ranges)]
        return squares_of_slots(layers, place, None, torch.device("cpu"))  # type: ignore[arg-type]

    for place in range(2):
        of_rank(place, lambda sums, group: said.append(sums.clone()))
    (found,), (other,) = (of_rank(place, lambda sums, group: sums.copy_(said[0] + said[1])) for place in range(2))
    assert torch.equal(found, other)
    return found


@pytest.mark.parametrize("chunk", [norm._CHUNK, 2 * BLOCK])
def test_no_cut_changes_a_bit(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(norm, "BLOCK", BLOCK)
    monkeypatch.setattr(norm, "_CHUNK", chunk)
    scale = torch.logspace(-6, 3, LENGTH)
    gradient = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0)) * scale
    found = squares(monkeypatch, gradient.expand(len(CUTS), LENGTH), CUTS)
    assert len(set(found.tolist())) == 1
    assert float(found[0]) == pytest.approx(float(gradient.double().square().sum()), rel=1e-12)


def test_a_gradient_of_another_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [RangesOfSlots([torch.ones(3)], (((0, 4), (4, 8)),))]
    with pytest.raises(RuntimeError, match="3 elements, and 4 of its expert are stepped here"):
        squares_of_slots(layers, 0, None, torch.device("cpu"))  # type: ignore[arg-type]
