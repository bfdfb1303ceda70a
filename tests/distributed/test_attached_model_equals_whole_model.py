"""An attached model computes what the same model computes whole, in one process: output and every gradient."""

from __future__ import annotations

import pytest
import torch
from moe_models import FAMILIES, batch_of, make_model
from ranks import run_ranks
from support import training

import eplb_runtime as eplb

RANKS = 2
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-3}
"""Largest difference over largest value of a tensor: the order of sums differs from one process to several."""
CASES = {
    **{family: (family, torch.float64, "eager") for family in FAMILIES},
    **{way: ("qwen3_moe", torch.float32, way) for way in ("eager", "batched_mm", "grouped_mm")},
}
"""The library's grouped_mm, its default, has no float64."""


def whole_model(
    family: str, dtype: torch.dtype, implementation: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits per rank's batch, and gradients of the mean of the ranks' losses."""
    model = make_model(family).to(dtype)
    model.set_experts_implementation(implementation)
    logits = []
    for rank in range(RANKS):
        ids = batch_of(rank, 0)
        out = model(input_ids=ids, labels=ids)
        (out.loss / RANKS).backward()
        logits.append(out.logits.detach())
    return logits, {name: p.grad for name, p in model.named_parameters()}


def attached_model(rank: int, family: str, dtype: torch.dtype, implementation: str) -> tuple:
    model = make_model(family).to(dtype)
    model.set_experts_implementation(implementation)
    # Momentum's buffer after the first step is the gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    balancer = training.attach(model, optimizer, policy="static")
    ids = batch_of(rank, 0)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    optimizer.step()
    state = eplb.logical_state_dict(model, optimizer)
    balancer.close()
    suffix = ".momentum_buffer"
    gradients = {
        key.removeprefix("optimizer.").removesuffix(suffix): value for key, value in state.items() if suffix in key
    }
    return out.logits.detach(), gradients


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.abs().max() > 0, "nothing to compare"
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def all_attached(rank: int) -> dict[str, tuple]:
    return {name: attached_model(rank, *case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def attached() -> list[dict[str, tuple]]:
    return run_ranks(RANKS, all_attached)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_are_those_of_the_whole_model(attached: list[dict[str, tuple]], name: str) -> None:
    logits, gradients = whole_model(*CASES[name])
    tolerance = TOLERANCE[CASES[name][1]]
    for found, expected in zip(attached, logits, strict=True):
        assert relative_difference(found[name][0], expected) <= tolerance
        assert found[name][1].keys() == gradients.keys()
        for tensor, gradient in gradients.items():
            assert relative_difference(found[name][1][tensor], gradient) <= tolerance, tensor
