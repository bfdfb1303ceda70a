"""Megatron-Core in float16, whose loss scale overflows and makes it skip steps while every home moves after each: 2
ranks that hold half of the experts each, its own schedule, DistributedDataParallel, grad scaler and optimizers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import test_megatron_parallelisms as parallelisms
import torch
from megatron_jobs import EXPERTS, attached, differing, forget_state, whole
from ranks import run_ranks
from test_megatron_parallelisms import LAYERS, SmallJob

import eplb_runtime as eplb

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
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
CASES: dict[str, dict[str, Any]] = {
    "distributed, gathers overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "optimizer of float16": {"distributed": False},
}
CONTROL = "optimizer of float16"


class HalfJob(SmallJob):
    def __init__(self, **options: Any) -> None:
        super().__init__(**HALF, **options)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.scales: list[float] = []

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        seen = []
        for step in steps:
            seen += super().train(range(step, step + 1))
            self.scales.append(float(self.optimizer.get_loss_scale()))
        return seen


def trained(case: str, move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None) -> dict[str, Any]:
    job = HalfJob(**CASES[case])
    balancer = attached(job, move)
    spoil(balancer)
    result = {
        "seen": job.train(range(STEPS)),
        "tensors": job.tensors(balancer.placement),
        "moved": [event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")],
        "scales": job.scales,
    }
    balancer.close()
    return result


def everything(rank: int) -> dict[str, Any]:
    parallelisms.prepare()
    results: dict[str, Any] = {
        case: {"static": trained(case, move=False), "moving": trained(case, move=True)} for case in CASES
    }
    results["control"] = trained(CONTROL, move=True, spoil=forget_state)
    job = HalfJob(**CASES[CONTROL])
    results["alone"] = {"seen": job.train(range(STEPS)), "scales": job.scales}
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_steps_are_skipped_while_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    static = whole([of_rank[case]["static"] for of_rank in results])
    for of_rank in results:
        skipped = [seen[-1] is None for seen in of_rank[case]["moving"]["seen"]]
        assert 0 < sum(skipped) <= STEPS - 2
        assert of_rank[case]["moving"]["seen"] == of_rank[case]["static"]["seen"]
        assert of_rank[case]["moving"]["scales"] == of_rank[case]["static"]["scales"]
        assert of_rank[case]["moving"]["moved"] == [LAYERS * EXPERTS] * STEPS
    experts = [key for key in static if key[0] != "dense"]
    print(f"{case}: {len(experts)} expert tensors, {len(static)} in all; skipped {skipped}")
    assert {key[3] for key in experts} >= {"weight", "param", "exp_avg", "exp_avg_sq"}
    assert differing(static, whole([of_rank[case]["moving"] for of_rank in results])) == []


def test_control_state_that_stays_shows(results: list[dict[str, Any]]) -> None:
    static = whole([of_rank[CONTROL]["static"] for of_rank in results])
    assert differing(static, whole([of_rank["control"] for of_rank in results])) != []


def test_the_loss_scale_is_that_of_megatron_alone(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["alone"]["scales"] == of_rank[CONTROL]["moving"]["scales"]
        for alone, moving in zip(of_rank["alone"]["seen"], of_rank[CONTROL]["moving"]["seen"], strict=True):
            assert (alone[-1] is None) == (moving[-1] is None)
