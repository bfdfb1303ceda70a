"""A tensor is taken for a copy of experts by many of its elements."""

from __future__ import annotations

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
