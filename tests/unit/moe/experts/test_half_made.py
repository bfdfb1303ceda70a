"""The search for what a loop keeps by row goes over objects whose constructors have raised."""

from __future__ import annotations

import torch
from torch import nn

from eplb_runtime.moe.experts.outside import Outside


def test_half_made_optimizers_and_modules_are_passed_over() -> None:
    experts = nn.Parameter(torch.randn(3, 7, 11))
    half = object.__new__(torch.optim.SGD), nn.Linear.__new__(nn.Linear)
    copy = experts.detach().clone()
    outside = Outside({"w": experts}, [], lambda: [experts])
    assert any(one is copy for one, _ in outside._strangers())
    assert all(not vars(one) for one in half)
