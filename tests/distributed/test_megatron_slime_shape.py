"""The most common shape of slime's recipes in small, end to end: 8 ranks, PP 2 x EP 2 x EDP 2, Megatron-Core's own
schedule, DistributedDataParallel, precision-aware HybridDeviceOptimizer and checkpoint, with every home moved after
each step.

What is on a device is made up, as in `test_megatron_offload`; TransformerEngine's fused permutations have a stand-in,
`fused_permutation_double`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import fused_permutation_double
import megatron_jobs as jobs
import pytest
import test_megatron_divided as divided
import test_megatron_offload as offload
import torch
from megatron_jobs import (
    assert_moved_without_a_change,
    assert_read_back,
    both,
    read_back,
    save_into,
    trained,
)
from ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.balancer.gradients import norm_of_ranges

pytestmark = jobs.long_megatron
STEPS, LAYERS, EXPERTS = 3, 2, 16
RECIPE: dict[str, Any] = {
    "num_layers": LAYERS,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 40,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_dtype": "fp32",
    "moe_permute_fusion": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "grad_reduce_in_fp32": True,
    "fraction": 1.0,
    "overlap": True,
    "aware": True,
}
"""As `scripts/run-*.sh` of slime have it; its moments are float32 by default."""
ON_DEVICE: dict[str, Any] = {
    "num_layers": LAYERS,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 40,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""A job of this layout without fused permutations, whose masters are not in host memory."""


class Job(divided.DividedJob, offload.OffloadedJob):
    """Parts of experts' state in the host memory of ranks that hold the same experts."""


def prepare() -> None:
    offload.prepare(pipeline_model_parallel_size=2)
    torch.cuda.is_current_stream_capturing = lambda: False  # asked of parameters that are said to be on a device
    import megatron_cpu

    torch.arange = megatron_cpu._on_cpu(torch.arange)
    fused_permutation_double.use()
    norm_of_ranges.BLOCK = divided.BLOCK


def of_the_recipe(job: Job, balancer: eplb.Balancer) -> dict[str, Any]:
    moments = [value for (*_, what), (_, value) in job.tensors(None)["ranges"].items() if what == "exp_avg"]
    return {
        "same ranks": balancer._runtime.job.edp_ranks,
        "in host memory": job.in_host_memory(),
        "dtypes of moments": {moment.dtype for moment in moments},
    }


def everything(rank: int, folder: str) -> dict[str, Any]:
    prepare()
    make = partial(Job, **RECIPE)
    return {
        "recipe": {
            "static": trained(make, move=False, steps=STEPS, also=of_the_recipe),
            "moving": trained(make, move=True, steps=STEPS, also=save_into(folder)),
        },
        "checkpoint": read_back(folder, make),
        "on the device": both(partial(divided.DividedJob, **ON_DEVICE)),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(8, everything, str(tmp_path_factory.mktemp("slime")))


def test_experts_move_after_each_step_and_no_bit_changes(results: list[dict[str, Any]]) -> None:
    kinds = assert_moved_without_a_change(results, "recipe", divided.whole)
    assert kinds == {"weight", "given", "inner", "exp_avg", "exp_avg_sq", "step"}


def test_without_offload_no_bit_changes_either(results: list[dict[str, Any]]) -> None:
    kinds = assert_moved_without_a_change(results, "on the device", divided.whole)
    assert kinds == {"weight", "param", "exp_avg", "exp_avg_sq", "step"}


def test_the_job_is_that_of_the_recipe(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        found = of_rank["recipe"]["static"]
        there, of_all = found["in host memory"]
        assert 0 < there == of_all
        assert found["dtypes of moments"] == {torch.float32}
        assert len(found["same ranks"]) == 2


def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]]) -> None:
    assert_read_back(results, "recipe", "checkpoint", divided.whole)
