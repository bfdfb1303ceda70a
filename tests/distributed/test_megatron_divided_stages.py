"""Megatron-Core's distributed optimizer over several ranks that hold the same experts, in pipeline stages, with every
home moved after each step: 8 ranks, PP 2 x EP 2 x EDP 2."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import test_megatron_divided as divided
import test_megatron_stages as stages
import torch.distributed as dist
from examples import FOLDER, load_example
from ranks import run_ranks

import eplb_runtime as eplb

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
CASE: dict[str, Any] = {
    "num_moe_experts": stages.EXPERTS,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 40,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MOVED = 3 * 4 * stages.EXPERTS


class Job(stages.Job):
    """What Megatron's ``get_model`` and its training loop make of the case."""

    def ranges(self, placement: eplb.Placement) -> dict[str, dict[Any, Any]]:
        from megatron.core import parallel_state

        leaves = [
            leaf
            for leaf in self.optimizer.chained_optimizers
            if all(group["is_expert_parallel"] for group in leaf.optimizer.param_groups)
        ]
        first = parallel_state.get_expert_model_parallel_rank() * stages.EXPERTS // 2
        return divided.tensors_of(self.layers(), self.dense(), leaves, first, placement)


def trained(move: bool) -> dict[str, Any]:
    job = Job(**CASE)
    balancer = stages.attached(job, move)
    result = {
        "seen": job.train(range(stages.STEPS)),
        "tensors": job.ranges(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
        "same ranks": balancer._runtime.job.edp_ranks,
    }
    balancer.close()
    return result


def everything(rank: int, _: str = "") -> dict[str, Any]:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    load_example("megatron_gpt")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    return {"static": trained(move=False), "moving": trained(move=True), "world": dist.get_world_size()}


def test_divided_experts_of_stages_move_and_no_bit_changes() -> None:
    results = run_ranks(8, everything)
    static = divided.whole([of_rank["static"] for of_rank in results])
    moving = divided.whole([of_rank["moving"] for of_rank in results])
    for of_rank in results:
        assert of_rank["moving"]["seen"] == of_rank["static"]["seen"]
        assert len(of_rank["moving"]["same ranks"]) == 2
    experts = [key for key in static if key[0] != "dense"]
    print(f"{len(experts)} expert tensors, {len(static)} in all, {results[0]['moving']['moved']} moves")
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(4) for expert in range(stages.EXPERTS)}
    assert len(experts) == 4 * stages.EXPERTS * 2 * 5
    assert results[0]["static"]["moved"] == 0 < results[0]["moving"]["moved"] <= MOVED
    assert divided.differing(static, moving) == []
