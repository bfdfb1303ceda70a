"""Megatron-Core's Muon, plain and layer-wise, with every home moved after each step: its own model, schedule,
DistributedDataParallel and optimizers, 2 ranks that hold half of the experts each (EDP 2: 4 ranks)."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_megatron_parallelisms as parallelisms
import test_megatron_stages as stages
import torch.distributed as dist
from newer_megatron import MUON, MUON_VERSION, NEWER, WHY_NOT, on_newer
from ranks import run_ranks
from test_megatron_parallelisms import LAYERS, SmallJob
from test_megatron_stages import EXPERTS, STEPS, Job, attached, differing, forget_state, whole
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError

pytestmark = [
    pytest.mark.skipif(not NEWER.is_dir(), reason=WHY_NOT),
    pytest.mark.skipif(
        not (MUON.is_dir() or importlib.util.find_spec("emerging_optimizers"))
        or not importlib.util.find_spec("triton"),
        reason=f"no emerging-optimizers {MUON_VERSION} in {MUON}: launch/test.sh fetches it; or no triton",
    ),
]
OF_DEEPSEEK = {
    "muon_nesterov": True,
    "muon_scale_mode": "unit_rms_norm",
    "muon_fp32_matmul_prec": "highest",
    "muon_extra_scale_factor": 0.2,
}
CASES: dict[str, dict[str, Any]] = {
    "muon": {"stepped": {"optimizer": "muon", **OF_DEEPSEEK}},
    "muon, float32, products in bfloat16": {"stepped": {"optimizer": "muon"}, "bf16": False},
    "dist_muon": {"stepped": {"optimizer": "dist_muon", "muon_nesterov": True}},
    "layer-wise, gathers overlapped": {
        "stepped": {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True},
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "layer-wise, laid out as Megatron-LM does": {
        "stepped": {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True},
        "laid_out": True,
    },
}


def gathers_of_any_sizes() -> None:
    """Let torch gather tensors of several sizes over gloo, as NCCL does and Megatron's layer-wise optimizer asks."""
    own = dist.all_gather

    def all_gather(of_all: list[Tensor], mine: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({tensor.numel() for tensor in of_all}) == 1:
            return own(of_all, mine, group=group, async_op=async_op)
        for number, tensor in enumerate(of_all):
            if number == dist.get_rank(group):
                tensor.copy_(mine)
            dist.broadcast(tensor, dist.get_process_group_ranks(group)[number], group=group)
        return types.SimpleNamespace(wait=lambda: None) if async_op else None

    dist.all_gather = all_gather


class WithMuon:
    """Makes a job one with Muon.

    Args:
        laid_out: as Megatron-LM's `wrap_model_chunks_with_ddp` does it by default: matrices are whole in the shards of
            buffers, and a distributed optimizer steps what is no matrix.
    """

    optimizer: Any

    def __init__(self, laid_out: bool = False, **options: Any) -> None:
        import megatron.core.distributed as distributed

        own = distributed.DistributedDataParallel
        if laid_out:
            distributed.DistributedDataParallel = with_a_layout
        try:
            super().__init__(distributed=False, moe_router_topk=3, **options)
        finally:
            distributed.DistributedDataParallel = own

    def tensors(self, placement: eplb.Placement | None) -> dict[Any, Tensor]:
        own = self.optimizer
        self.optimizer = types.SimpleNamespace(chained_optimizers=leaves_of(own))
        try:
            tensors: dict[Any, Tensor] = super().tensors(placement)  # type: ignore[misc]
            return tensors
        finally:
            self.optimizer = own


class MuonJob(WithMuon, SmallJob):
    """Without pipeline stages."""


def with_a_layout(config: Any, ddp: Any, module: Any, **options: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import distributed_data_parallel
    from megatron.core.optimizer import layer_wise_optimizer as layer_wise

    ddp.use_distributed_optimizer = True
    ranks = parallel_state.get_data_parallel_world_size()
    layer_wise.tag_params_for_buffer_routing([module])
    layout = layer_wise.LayerWiseDistributedOptimizer.compute_full_param_layout(
        list(module.parameters()), ddp.bucket_size, ranks, ddp, expert_data_parallel_world_size=1
    )
    return distributed_data_parallel.DistributedDataParallel(config, ddp, module, full_param_layout=layout, **options)


def leaves_of(optimizer: Any) -> list[Any]:
    inside = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if inside is None else [leaf for one in inside for leaf in leaves_of(one)]


def trained(case: str, move: bool, spoil: Callable[[Job, eplb.Balancer], None] = lambda *_: None) -> dict[str, Any]:
    job = MuonJob(**CASES[case])
    balancer = attached(job, move)
    spoil(job, balancer)
    result = {
        "seen": job.train(range(STEPS)),
        "tensors": job.tensors(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
        "placement": balancer.placement.physical_to_logical.tolist(),
        "kinds": sorted({type(leaf.optimizer).__name__ for leaf in leaves_of(job.optimizer)}),
    }
    balancer.close()
    return result


def leave_state(job: Job, balancer: eplb.Balancer) -> None:
    forget_state(balancer)


def clip_by_the_order_of_slots(job: Job, balancer: eplb.Balancer) -> None:
    """Megatron's own norm."""
    del job.optimizer.get_grad_norm


def said(**options: Any) -> str:
    with pytest.raises(AttachError) as error:
        attached(MuonJob(**options), move=False)
    return str(error.value)


def on_two_ranks(rank: int, folder: str) -> dict[str, Any]:
    parallelisms.prepare()
    gathers_of_any_sizes()
    results: dict[str, Any] = {"rank": rank}
    for case in CASES:
        results[case] = {
            "static": trained(case, move=False),
            "moving": trained(case, move=True),
            "control": trained(case, move=True, spoil=leave_state),
        }
    results["norm"] = trained("dist_muon", move=True, spoil=clip_by_the_order_of_slots)
    for case in ("muon", "dist_muon"):
        make = partial(MuonJob, **CASES[case])
        results[f"{case}, checkpoint"] = stages.saved_and_read_back(Path(folder) / case, make)
    results["said"] = said(stepped={"optimizer": "adaptive_muon"})
    results["said of float32"] = said(stepped={"optimizer": "dist_muon"}, bf16=False)
    return results


def on_four_ranks(rank: int) -> dict[str, Any]:
    """Two ranks hold the same experts."""
    parallelisms.prepare()
    gathers_of_any_sizes()
    return {
        "muon": {
            "static": trained("muon", move=False),
            "moving": trained("muon", move=True),
            "control": trained("muon", move=True, spoil=leave_state),
        },
        "said": said(**CASES["dist_muon"]),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("muon")
    for case in ("muon", "dist_muon"):
        (folder / case).mkdir()
    return run_ranks(2, on_newer, on_two_ranks, str(folder))


@pytest.mark.parametrize("case", CASES)
def test_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert_moved_without_a_change(results, case)


def assert_moved_without_a_change(results: list[dict[str, Any]], case: str) -> None:
    static = whole([of_rank[case]["static"] for of_rank in results])
    for of_rank in results:
        assert of_rank[case]["moving"]["seen"] == of_rank[case]["static"]["seen"]
        assert all(row != sorted(row) for row in of_rank[case]["moving"]["placement"])
        assert "TensorParallelMuon" in of_rank[case]["moving"]["kinds"]
    moved = results[0][case]["moving"]["moved"]
    assert results[0][case]["static"]["moved"] == 0 < moved
    experts = [key for key in static if key[0] != "dense"]
    print(f"{case}: {len(experts)} expert tensors, {len(static)} in all, {moved} moves")
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
    assert {key[3] for key in experts} == {"weight", "param", "momentum_buffer"}
    assert differing(static, whole([of_rank[case]["moving"] for of_rank in results])) == []
    assert differing(static, whole([of_rank[case]["control"] for of_rank in results])) != [], "state that stays shows"


@pytest.mark.parametrize("case", ["muon", "dist_muon"])
def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]], case: str) -> None:
    saved, before, read = (
        whole([of_rank[f"{case}, checkpoint"][when] for of_rank in results]) for when in ("saved", "before", "read")
    )
    assert all(row != sorted(row) for row in results[0][f"{case}, checkpoint"]["placement"])
    assert differing(before, saved) != []
    assert differing(read, saved) == []


def test_other_muons_are_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "optimizer=TensorParallelAdaptiveMuon" in of_rank["said"]


def test_layer_wise_float32_which_megatron_cannot_step_is_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "bf16=False: Megatron's layer-wise optimizer itself steps bf16 alone" in of_rank["said of float32"]


def test_control_a_norm_in_the_order_of_slots_shows(results: list[dict[str, Any]]) -> None:
    assert results[0]["norm"]["seen"] != results[0]["dist_muon"]["static"]["seen"]


def test_with_ranks_that_hold_the_same_experts_plain_muon_is_exact_and_layer_wise_is_refused() -> None:
    results = run_ranks(4, on_newer, on_four_ranks)
    assert_moved_without_a_change(results, "muon")
    for of_rank in results:
        assert "optimizer=dist_muon" in of_rank["said"] and "use_layer_wise" in of_rank["said"]
