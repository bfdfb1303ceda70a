"""A model's forwards, as the balancer is told of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eplb_runtime.hosts.attaching.forwards import Forwards


class Model(torch.nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        if tensor[0] < 0:
            raise ValueError("a layer fails")
        return tensor * 2


def test_a_forward_that_fails_has_ended_when_the_next_begins() -> None:
    told: list[object] = []
    balancer = SimpleNamespace(_before_forward=lambda: told.append("begins"), _after_forward=told.append)
    model = Model()
    Forwards(balancer, SimpleNamespace(model=model), frozenset({1}))  # type: ignore[arg-type]
    model(torch.ones(1))
    with pytest.raises(ValueError, match="a layer fails"):
        model(-torch.ones(1))
    model(torch.ones(1))
    assert told == ["begins", {1}] * 3
