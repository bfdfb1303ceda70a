"""Megatron-Core in float16, whose loss scale overflows and makes it skip steps while every home moves after each: 2
ranks that hold half of the experts each, its own schedule, DistributedDataParallel, grad scaler and optimizers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron_jobs as jobs
import pytest
import torch
from megatron_jobs import SmallJob, assert_moved_without_a_change, both
from ranks import run_ranks

pytestmark = jobs.long_megatron
STEPS = 4
HALF = {
    "bf16": False,
    "fp16": True,
    "params_dtype": torch.float16,
    "pipeline_dtype": torch.float16,
    "moe_router_topk": 3,
    "stepped": {
        "fp16": True,
        "params_dtype": torch.float16,
        "initial_loss_scale": 2.0**18,
        "loss_scale_window": 2,
        "hysteresis": 1,
    },
}
ALONE = "optimizer of float16"
CASES: dict[str, dict[str, Any]] = {
    "distributed, gathers overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    ALONE: {"distributed": False},
}


class HalfJob(SmallJob):
    """Sees the loss scale after each step, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**HALF, **options)
        self.config.grad_scale_func = self.optimizer.scale_loss

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        seen = []
        for step in steps:
            (of_step,) = super().train(range(step, step + 1))
            seen.append((*of_step, float(self.optimizer.get_loss_scale())))
        return seen


def everything(rank: int) -> dict[str, Any]:
    jobs.prepare_small()
    results: dict[str, Any] = {case: both(partial(HalfJob, **options), steps=STEPS) for case, options in CASES.items()}
    results["alone"] = HalfJob(**CASES[ALONE]).train(range(STEPS))
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_steps_are_skipped_while_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert assert_moved_without_a_change(results, case) >= {"weight", "param", "exp_avg", "exp_avg_sq"}
    for of_rank in results:
        skipped = [norm is None for *_, norm, _ in of_rank[case]["moving"]["seen"]]
        assert 0 < sum(skipped) <= STEPS - 2
        assert of_rank[case]["moving"]["moved"] == STEPS * 2 * jobs.EXPERTS


def test_steps_skipped_and_the_loss_scale_are_those_of_megatron_alone(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        for alone, moving in zip(of_rank["alone"], of_rank[ALONE]["moving"]["seen"], strict=True):
            assert (alone[-2] is None, alone[-1]) == (moving[-2] is None, moving[-1])
