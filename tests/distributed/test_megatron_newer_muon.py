"""Megatron-Core's Muon, plain and layer-wise, with every home moved after each step: its own model, schedule,
DistributedDataParallel and optimizers, 2 ranks that hold half of the experts each."""

from __future__ import annotations

import importlib.util
import types
from functools import partial
from typing import Any

import megatron_jobs as jobs
import pytest
import torch.distributed as dist
from megatron_jobs import (
    SmallJob,
    assert_moved_without_a_change,
    assert_read_back,
    leaves_of,
    nothing,
    read_back,
    save_into,
    trained,
)
from newer_megatron import MUON, MUON_VERSION, NEWER, WHY_NOT, on_newer
from ranks import run_ranks
from torch import Tensor

pytestmark = [
    pytest.mark.long,
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
LAYER_WISE = "dist_muon"
CASES: dict[str, dict[str, Any]] = {
    "muon": {"stepped": {"optimizer": "muon", **OF_DEEPSEEK}},
    "muon, float32, products in bfloat16": {"stepped": {"optimizer": "muon"}, "bf16": False},
    LAYER_WISE: {"stepped": {"optimizer": "dist_muon", "muon_nesterov": True}},
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

    def __init__(self, laid_out: bool = False, **options: Any) -> None:
        import megatron.core.distributed as distributed

        own = distributed.DistributedDataParallel
        if laid_out:
            distributed.DistributedDataParallel = with_a_layout
        try:
            super().__init__(distributed=False, moe_router_topk=3, **options)
        finally:
            distributed.DistributedDataParallel = own


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


def kinds_of(job: MuonJob, *_: Any) -> dict[str, Any]:
    return {"kinds": {type(leaf.optimizer).__name__ for leaf in leaves_of(job.optimizer)}}


def said(**options: Any) -> str:
    return jobs.refusal(partial(MuonJob, **options))


def on_two_ranks(rank: int, folder: str) -> dict[str, Any]:
    jobs.prepare_small()
    gathers_of_any_sizes()
    results: dict[str, Any] = {}
    for case, options in CASES.items():
        make = partial(MuonJob, **options)
        results[case] = {
            "static": trained(make, move=False, also=kinds_of),
            "moving": trained(make, move=True, also=save_into(folder) if case == LAYER_WISE else nothing),
        }
    layer_wise = partial(MuonJob, **CASES[LAYER_WISE])
    results["checkpoint"] = read_back(folder, layer_wise)
    results["said"] = said(stepped={"optimizer": "adaptive_muon"})
    results["said of float32"] = said(stepped={"optimizer": "dist_muon"}, bf16=False)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, on_newer, on_two_ranks, str(tmp_path_factory.mktemp("muon")))


@pytest.mark.parametrize("case", CASES)
def test_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert assert_moved_without_a_change(results, case) == {"weight", "param", "momentum_buffer"}
    assert all("TensorParallelMuon" in of_rank[case]["static"]["kinds"] for of_rank in results)


def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]]) -> None:
    assert_read_back(results, LAYER_WISE, "checkpoint")


def test_other_muons_are_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "optimizer=TensorParallelAdaptiveMuon" in of_rank["said"]


def test_layer_wise_float32_which_megatron_cannot_step_is_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "bf16=False: Megatron's layer-wise optimizer itself steps bf16 alone" in of_rank["said of float32"]
