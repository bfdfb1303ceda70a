"""The most common shape of slime's recipes in small, end to end: 8 ranks, PP 2 x EP 2 x EDP 2, Megatron-Core's own
schedule, DistributedDataParallel, precision-aware HybridDeviceOptimizer and checkpoint, with every home moved after
each of 10 steps.

What is on a device is made up, as in `test_megatron_offload`; TransformerEngine's fused permutations have a stand-in,
`fused_permutation_double`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fused_permutation_double
import pytest
import test_megatron_divided as divided
import test_megatron_divided_offload as divided_offload
import test_megatron_offload as offload
import test_megatron_stages as stages
import torch
import torch.distributed as dist
from ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.balancer.gradients import norm_of_ranges

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
STEPS, MICRO_BATCHES, LAYERS, EXPERTS, TOP_K = 10, 2, 4, 16, 8
RECIPE: dict[str, Any] = {
    "num_layers": LAYERS,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "moe_ffn_hidden_size": 40,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_dtype": "fp32",
    "moe_permute_fusion": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "grad_reduce_in_fp32": True,
    "stepped": {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "pin_cpu_grads": False,
        "use_precision_aware_optimizer": True,
    },
}
"""As `scripts/run-*.sh` of slime have it; its moments are float32 by default."""


class Job(stages.Job):
    """What Megatron's ``get_model`` and its training loop make of the recipe."""

    leaf_of = offload.Job.leaf_of
    kept = offload.Job.kept

    def parts(self, placement: eplb.Placement | None) -> dict[str, dict[Any, Any]]:
        from megatron.core import parallel_state

        first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // 2
        leaf: Any = divided_offload.Leaf(self)  # type: ignore[arg-type]
        return divided.tensors_of(self.layers(), self.dense(), [leaf], first, placement)

    def in_host_memory(self) -> bool:
        kept = [self.kept(p) for layer in self.layers().values() for p in layer.experts.parameters() if self._has(p)]
        assert all(one["exp_avg"].dtype == torch.float32 for one in kept)
        return bool(kept) and not any(one["inner"].is_cuda for one in kept)

    def _has(self, parameter: torch.Tensor) -> bool:
        leaves = self.optimizer.chained_optimizers
        return any(parameter is one for leaf in leaves if not leaf.is_stub_optimizer for one in offload.held(leaf))


def prepare() -> None:
    offload.prepare(pipeline_model_parallel_size=2)
    import megatron_cpu

    torch.arange = megatron_cpu._on_cpu(torch.arange)
    torch.cuda.is_current_stream_capturing = lambda: False  # asked of parameters that are said to be on a device
    fused_permutation_double.use()
    norm_of_ranges.BLOCK = divided.BLOCK
    stages.MICRO_BATCHES, stages.EXPERTS = MICRO_BATCHES, EXPERTS


def trained(move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None) -> dict[str, Any]:
    job = Job(**RECIPE)
    balancer = stages.attached(job, move)
    spoil(balancer)
    result = {
        "seen": job.train(range(STEPS)),
        "tensors": job.parts(balancer.placement),
        "moved": [event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")],
        "placement": balancer.placement.physical_to_logical.tolist(),
        "same ranks": balancer._runtime.job.edp_ranks,
        "in host memory": job.in_host_memory(),
    }
    balancer.close()
    return result


def state_of(job: Job, loading: bool) -> dict[str, Any]:
    metadata = {"singleton_local_shards": False, "distrib_optim_sharding_type": "fully_reshardable"}
    (model,) = job.models
    of_model = model.module.sharded_state_dict(metadata=metadata)
    of_optimizer = job.optimizer.sharded_state_dict(of_model, is_loading=loading, metadata=metadata)
    return {"model": of_model, "optimizer": of_optimizer}


def saved_and_read_back(folder: Path) -> dict[str, Any]:
    """Saved by Megatron after moves, and read by Megatron alone into a job that has trained something else."""
    from megatron.core import dist_checkpointing

    job = Job(**RECIPE)
    balancer = stages.attached(job, move=True)
    job.train(range(2))
    stages.save(state_of(job, loading=False), folder)
    saved, moved = job.parts(balancer.placement), balancer.placement.physical_to_logical.tolist()
    balancer.close()
    job = Job(**RECIPE)
    job.train(range(STEPS, STEPS + 1))  # Megatron loads what has stepped; all of it is overwritten
    before = job.parts(None)
    with torch.serialization.safe_globals([torch.optim.AdamW]):  # its groups name the classes of the optimizers inside
        state = dist_checkpointing.load(state_of(job, loading=True), str(folder))
    job.models[0].load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    return {"saved": saved, "before": before, "read": job.parts(None), "placement": moved}


def everything(rank: int, folder: str) -> dict[str, Any]:
    prepare()
    return {
        "static": trained(move=False),
        "moving": trained(move=True),
        "control": trained(move=True, spoil=stages.forget_state),
        "checkpoint": saved_and_read_back(Path(folder)),
        "world": dist.get_world_size(),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(8, everything, str(tmp_path_factory.mktemp("slime")))


def test_experts_move_after_each_step_and_no_bit_changes(results: list[dict[str, Any]]) -> None:
    static = divided.whole([of_rank["static"] for of_rank in results])
    moving = divided.whole([of_rank["moving"] for of_rank in results])
    for of_rank in results:
        assert of_rank["moving"]["seen"] == of_rank["static"]["seen"]
        assert len(of_rank["moving"]["same ranks"]) == 2
        assert of_rank["moving"]["in host memory"]
    experts = [key for key in static if key[0] != "dense"]
    print(f"{len(experts)} expert tensors, {len(static)} in all, {sum(results[0]['moving']['moved'])} moves")
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
    assert {key[3] for key in experts} == {"weight", "given", "inner", "exp_avg", "exp_avg_sq", "step"}
    assert len(experts) == LAYERS * EXPERTS * 2 * 6
    assert sum(results[0]["static"]["moved"]) == 0
    assert results[0]["moving"]["moved"] == [LAYERS * EXPERTS] * STEPS
    assert divided.differing(static, moving) == []


def test_control_state_that_stays_shows(results: list[dict[str, Any]]) -> None:
    static = divided.whole([of_rank["static"] for of_rank in results])
    assert divided.differing(static, divided.whole([of_rank["control"] for of_rank in results])) != []
    last = [of_rank["control"]["seen"][-1] == of_rank["static"]["seen"][-1] for of_rank in results]
    assert not all(last)


def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]]) -> None:
    saved, before, read = (
        divided.whole([{"tensors": of_rank["checkpoint"][when]} for of_rank in results])
        for when in ("saved", "before", "read")
    )
    assert all(row != sorted(row) for row in results[0]["checkpoint"]["placement"])
    assert divided.differing(before, saved) != []
    assert divided.differing(read, saved) == []
