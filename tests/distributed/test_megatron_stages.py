"""Megatron-Core's own pipeline schedules, stages, DistributedDataParallel, optimizers and checkpoints, with experts
that move after each step: 4 ranks, 2 pipeline stages x 2 expert-parallel ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron_jobs as jobs
import pytest
from megatron_jobs import (
    INTERLEAVED,
    assert_moved_without_a_change,
    assert_read_back,
    differing,
    read_back,
    save_into,
    trained,
    whole,
)
from ranks import run_ranks

pytestmark = jobs.long_megatron
INTERLEAVED_CASE = "interleaved"
OF_FLOAT16 = "float16, a chunk without an MoE layer"
SMALL = {"num_layers": 2}
CASES: dict[str, dict[str, Any]] = {
    "1F1B": {**SMALL, "clip_grad": 0.0},
    INTERLEAVED_CASE: {**INTERLEAVED, "moe_router_topk": 3},
    "a stage without an MoE layer": {**SMALL, "moe_layer_freq": [0, 1], "share": True},
    "stages of several sizes": {
        "num_layers": 3,
        "num_layers_in_first_pipeline_stage": 2,
        "moe_layer_freq": [0, 1, 1],
        "distributed": False,
        "bf16": False,
    },
    OF_FLOAT16: {**INTERLEAVED, "moe_layer_freq": [0, 1, 1, 1], "distributed": False},
    "gradients and weights travel beside": {
        **INTERLEAVED,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "align": True,
    },
    "a layer that predicts a second token": {**SMALL, "mtp_num_layers": 1, "overlap_grad_reduce": True},
}


def forget_stage(job: jobs.Job) -> None:
    for model in job.models:
        for part in model.modules():
            vars(part).pop("vp_stage", None)


REFUSED: dict[str, Any] = {
    "virtual stages": forget_stage,
    "not supported yet": lambda job: setattr(job.config, "fp4", "nvfp4"),
}


def everything(rank: int, folder: str) -> dict[str, Any]:
    jobs.prepare(pipeline_model_parallel_size=2)
    results: dict[str, Any] = {}
    for case, options in CASES.items():
        make = partial(jobs.Job, **options)
        # With the distributed optimizer 0.16.1 loads only what TransformerEngine's or Apex's Adam keeps, also alone.
        also = save_into(folder) if case == OF_FLOAT16 else jobs.nothing
        results[case] = {"static": trained(make, move=False), "moving": trained(make, move=True, also=also)}
    job = jobs.Job(**CASES["1F1B"])
    results["alone"] = {"seen": job.train(range(jobs.STEPS)), "tensors": job.tensors(None)}
    results["checkpoint"] = read_back(folder, partial(jobs.Job, **CASES[OF_FLOAT16]))
    make = partial(jobs.Job, **INTERLEAVED)
    results["refused"] = {what: jobs.refusal(make, change) for what, change in REFUSED.items()}
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, everything, str(tmp_path_factory.mktemp("megatron stages")))


@pytest.mark.parametrize("case", CASES)
def test_experts_of_stages_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert assert_moved_without_a_change(results, case) >= {"weight", "param", "exp_avg", "exp_avg_sq"}


def test_without_clipping_megatron_alone_trains_the_same(results: list[dict[str, Any]]) -> None:
    alone = whole([of_rank["alone"] for of_rank in results])
    assert differing(alone, whole([of_rank["1F1B"]["moving"] for of_rank in results])) == []


def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]]) -> None:
    assert_read_back(results, saved=OF_FLOAT16, read="checkpoint")


def test_what_megatron_cannot_follow_is_refused_on_all_stages(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert all(what in line for what, line in of_rank["refused"].items())
