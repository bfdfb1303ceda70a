"""An attached model computes what the same model computes whole, in one process: output and every gradient."""

from __future__ import annotations

import pytest
import torch
from moe_models import FAMILIES, batch_of, make_model
from ranks import rows_of, run_ranks

import eplb_runtime as eplb

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-3}
"""Largest difference over largest value of a tensor: the order of sums differs from one process to several."""


def whole_model(
    family: str, dtype: torch.dtype, implementation: str, world_size: int
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits per rank's batch, and gradients of the mean of the ranks' losses."""
    model = make_model(family).to(dtype)
    model.set_experts_implementation(implementation)
    logits = []
    for rank in range(world_size):
        ids = batch_of(rank, 0)
        out = model(input_ids=ids, labels=ids)
        (out.loss / world_size).backward()
        logits.append(out.logits.detach())
    return logits, {name: p.grad for name, p in model.named_parameters()}


def attached_model(rank: int, family: str, dtype: torch.dtype, implementation: str) -> tuple:
    model = make_model(family).to(dtype)
    model.set_experts_implementation(implementation)
    # Momentum's buffer after the first step is the gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    balancer = eplb.attach(model, optimizer, config=eplb.BalancerConfig(dense_gradients="allreduce", policy="static"))
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


def assert_same(results: list[tuple], logits: list, gradients: dict, dtype: torch.dtype) -> None:
    for rank, (rank_logits, rank_gradients) in enumerate(results):
        assert relative_difference(rank_logits, logits[rank]) <= TOLERANCE[dtype]
        assert rank_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            difference = relative_difference(rank_gradients[name], gradient)
            assert difference <= TOLERANCE[dtype], f"{name}: {difference}"


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.abs().max() > 0, "nothing to compare"
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("world_size", rows_of([2, 4], 2))
@pytest.mark.parametrize("dtype", rows_of([torch.float64, torch.float32], torch.float64), ids=["fp64", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_gradients_are_those_of_the_whole_model(family: str, dtype: torch.dtype, world_size: int) -> None:
    # The library's grouped_mm, its default, has no float64.
    implementation = "eager" if dtype == torch.float64 else "grouped_mm"
    logits, gradients = whole_model(family, dtype, implementation, world_size)
    assert_same(run_ranks(world_size, attached_model, family, dtype, implementation), logits, gradients, dtype)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_every_experts_implementation_of_the_library_is_kept(implementation: str) -> None:
    logits, gradients = whole_model("qwen3_moe", torch.float32, implementation, 2)
    results = run_ranks(2, attached_model, "qwen3_moe", torch.float32, implementation)
    assert_same(results, logits, gradients, torch.float32)
