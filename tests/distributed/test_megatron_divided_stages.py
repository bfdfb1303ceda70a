"""Megatron-Core's distributed optimizer over several ranks that hold the same experts, in pipeline stages, with every
home moved after each step: 8 ranks, PP 2 x EP 2 x EDP 2."""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron_jobs as jobs
from megatron_jobs import EXPERTS, STEPS, assert_moved_without_a_change, trained
from ranks import run_ranks
from test_megatron_divided import DividedJob, whole

import eplb_runtime as eplb

pytestmark = jobs.needs_megatron
LAYERS = 2
CASE: dict[str, Any] = {
    "num_layers": LAYERS,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 40,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def everything(rank: int) -> dict[str, Any]:
    jobs.prepare(pipeline_model_parallel_size=2)
    make = partial(DividedJob, **CASE)
    return {"case": {"static": trained(make, move=False), "moving": trained(make, move=True, also=same_ranks)}}


def same_ranks(_: DividedJob, balancer: eplb.Balancer) -> dict[str, Any]:
    return {"same ranks": balancer._runtime.job.edp_ranks}


def test_divided_experts_of_stages_move_and_no_bit_changes() -> None:
    results = run_ranks(8, everything)
    kinds = assert_moved_without_a_change(results, "case", whole)
    assert kinds == {"weight", "param", "exp_avg", "exp_avg_sq", "step"}
    for of_rank in results:
        assert of_rank["case"]["moving"]["moved"] <= STEPS * LAYERS * EXPERTS
        assert len(of_rank["case"]["moving"]["same ranks"]) == 2
