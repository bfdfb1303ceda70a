"""Torch's Muon on the experts of a Megatron-Core model, which are matrices of their own, with every home moved after
each step; AdamW steps what is no matrix. 2 ranks that hold half of the experts each.
"""

from __future__ import annotations

from typing import Any

import megatron_jobs as jobs
import pytest
import test_megatron as bare
import torch
from flat_settings import config_from_settings
from ranks import run_ranks
from support.shuffle import plan_by, plan_shuffle, wait_until_compiled

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError

pytestmark = jobs.long_megatron


class OneNorm(torch.optim.Muon):
    """Scales its step by a norm over all that it steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.grad /= norm
        super().step()


def made(move: bool, kind: type[torch.optim.Muon] = torch.optim.Muon) -> tuple[Any, list[Any], eplb.Balancer]:
    model = bare.example().model_of(bf16=False, moe_router_topk=3)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [kind(matrices, lr=1e-2, nesterov=True), torch.optim.AdamW(others, lr=1e-2)]
    settings = config_from_settings({**vars(bare.config(move)), "dense_gradients": "allreduce"})
    balancer = eplb.attach(model, optimizers, config=settings)
    if move:
        wait_until_compiled(balancer)
        plan_by(balancer, plan_shuffle)
    return model, optimizers, balancer


def everything(rank: int) -> dict[str, Any]:
    bare.example()
    with pytest.raises(AttachError) as error:
        made(False, OneNorm)
    return {
        "static": bare.trained_with(*made(False)),
        "moving": bare.trained_with(*made(True)),
        "said": str(error.value),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


def test_moving_experts_changes_no_bit(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        static, moving = of_rank["static"], of_rank["moving"]
        assert static[2] == 0 < moving[2] and moving[0] == static[0]
    static = bare.whole(results, "static")
    assert sum("momentum" in str(key) for key in static) == 2 * 2 * 8
    assert jobs.differing(static, bare.whole(results, "moving")) == []


def test_a_norm_over_all_experts_of_a_rank_is_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "OneNorm mixes the experts of a rank" in of_rank["said"]
