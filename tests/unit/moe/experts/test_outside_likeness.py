"""A tensor is taken for a copy of experts by many of its elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from eplb_runtime.moe.experts.outside import Outside

EXPERTS = nn.Linear(8, 8)  # the model around the experts; what it holds says nothing


def found_with(kept: torch.Tensor, experts: nn.Parameter) -> str:
    """What is found while ``kept`` is held here."""
    holder = {"kept": kept}
    outside = Outside({"down": experts}, [EXPERTS], lambda: [experts])
    said = outside.found(copies_only=True)
    assert holder
    return said


def test_a_tensor_that_goes_with_an_expert_in_few_elements_is_no_copy() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = nn.Parameter(torch.randn(2, 64, 64, generator=generator))
    by_chance = torch.randn(64, 64, generator=generator)
    by_chance.view(-1)[::64] = experts.detach()[1].view(-1)[::64]
    assert not found_with(by_chance, experts)
    old = experts.detach()[1] + 0.8 * torch.randn(64, 64, generator=generator)
    assert "holds 1 tensors as large as experts, one of shape [64, 64] as down" in found_with(old, experts)


def looks(update: Callable[[dict[str, Any]], None]) -> list[bool]:
    """Whether experts stay, at looks between which the user has updated what has the shape of experts, and is no copy;
    the first time it may be passing."""
    generator = torch.Generator().manual_seed(0)
    experts, kept = nn.Parameter(torch.randn(2, 64, 64, generator=generator)), {"down": torch.zeros(2, 64, 64)}
    outside = Outside({"down": experts}, [EXPERTS], lambda: [experts])
    found = []
    for _ in range(3):
        update(kept)
        found.append("holds 1 tensors as large as experts" in outside.found())
    return found


def test_an_average_of_gradients_that_is_another_tensor_each_time_is_found_by_its_place() -> None:
    def update(kept: dict[str, Any]) -> None:
        kept["down"] = 0.9 * kept["down"] + torch.ones(2, 64, 64)

    assert looks(update) == [False, True, True]


def test_control_what_is_there_at_one_look_alone_is_passing() -> None:
    number = [0]

    def update(kept: dict[str, Any]) -> None:
        number[0] += 1
        kept["down"] = torch.ones(2, 64, 64) if number[0] % 2 else None

    assert looks(update) == [False] * 3
