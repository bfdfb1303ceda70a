"""Megatron-Core as it is meant to run: on GPUs, with its distributed optimizer; one rank a GPU, two that share one."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from device import on_gpu, ranks_on_gpu
from support.examples import FOLDER, load_example
from support.shuffle import plan_by, plan_shuffle, wait_until_compiled

import eplb_runtime as eplb

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
    ),
]


def trained(rank: int, move: bool, top_k: int) -> tuple[list[Any], int]:
    on_gpu(rank)
    sys.path.insert(0, str(FOLDER))
    ours = load_example("megatron_gpt")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(0)
    model, optimizer = ours.wrapped(ours.model_of(moe_router_topk=top_k).cuda(), overlap=True)
    policy = "incremental" if move else "static"
    balancer = eplb.attach(
        [model],
        optimizer,
        config=eplb.BalancerConfig(interval=1, gate="always", policy=policy, migration=eplb.MigrationConfig(lag=0)),
    )
    if move:
        wait_until_compiled(balancer)
        plan_by(balancer, plan_shuffle)
    seen = ours.train(model, optimizer, range(4))
    moved = sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))
    balancer.close()
    torch.cuda.synchronize()
    return seen, moved


@pytest.mark.parametrize("top_k", [2, 3])
def test_moving_experts_changes_no_bit(top_k: int) -> None:
    static, moving = (ranks_on_gpu(2, trained, move, top_k) for move in (False, True))
    for (losses, none), (same, moved) in zip(static, moving, strict=True):
        assert none == 0 < moved and losses == same
