"""Megatron-Core's own context parallelism, tensor and sequence parallelism, activation recompute and expert bias, with
every home moved after each step: 2 ranks that hold half of the experts each.

On a CPU, by the answers of ``launch/examples/megatron_cpu.py`` to what Megatron asks of CUDA. Its attention that knows
context parallelism is TransformerEngine's; `megatron_jobs.gathered_attention` is in its place here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron_jobs as jobs
import pytest
import torch
from megatron_jobs import LENGTH, MICRO_BATCHES, STEPS, SmallJob, assert_moved_without_a_change, both, whole
from ranks import run_ranks

pytestmark = jobs.long_megatron
LAYERS, UPDATE = 2, 1 / 16
CASES: dict[str, dict[str, Any]] = {
    "context parallelism": {"context_parallel_size": 2},
    "tensor and sequence parallelism": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
    },
    "full recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective recompute": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "moe"],
        "distributed": False,
    },
    "expert bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": UPDATE,
    },
}
"""Settings of Megatron's TransformerConfig, and `Job`'s own."""


def everything(rank: int, cases: list[str]) -> dict[str, Any]:
    jobs.prepare_small()
    results: dict[str, Any] = {}
    for case in cases:
        make = partial(SmallJob, moe_router_topk=3, **CASES[case])
        results[case] = both(make)
        results[case]["alone"] = make().train(range(STEPS)) if "parallelism" in case else None
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything, list(CASES))


@pytest.mark.parametrize("case", CASES)
def test_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert assert_moved_without_a_change(results, case) >= {"weight", "param", "exp_avg", "exp_avg_sq"}
    assert_counted(results, case)


def assert_counted(results: list[dict[str, Any]], case: str) -> None:
    tokens = MICRO_BATCHES * 2 * LENGTH // (2 if "parallelism" in case else 1)  # which 2 ranks share then
    jobs.assert_counted(results, case, 3 * tokens)


@pytest.mark.parametrize("case", [case for case in CASES if "parallelism" in case])
def test_losses_and_norms_are_those_of_megatron_alone(results: list[dict[str, Any]], case: str) -> None:
    for of_rank in results:
        alone, moving = of_rank[case]["alone"], of_rank[case]["moving"]["seen"]
        assert moving[0] == pytest.approx(alone[0], rel=1e-5)
        for of_alone, of_moving in zip(alone[1:], moving[1:], strict=True):  # after steps in bfloat16
            assert of_moving == pytest.approx(of_alone, rel=1e-2)


def test_the_bias_of_experts_follows_the_load_of_all_steps(results: list[dict[str, Any]]) -> None:
    moving = [of_rank["expert bias"]["moving"] for of_rank in results]
    load_SLE = sum(torch.tensor(of_rank["counted"]) for of_rank in moving)
    wanted_LE = UPDATE * (load_SLE.float().mean(dim=-1, keepdim=True) - load_SLE).sign().sum(dim=0)
    biases = {key[2]: tensor for key, tensor in whole(moving).items() if key[0] == "dense" and "expert_bias" in key[2]}
    assert len(biases) == LAYERS and wanted_LE.count_nonzero() > 0
    for name, wanted in zip(sorted(biases), wanted_LE, strict=True):
        assert torch.equal(biases[name], wanted), name
