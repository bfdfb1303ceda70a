"""Megatron-Core's own optimizers with state in host memory (``optimizer_cpu_offload``): 2 ranks, EP 2, its own model,
schedule, DistributedDataParallel and HybridDeviceOptimizer, with every home moved after each step.

On a CPU that class finds nothing to copy into host memory. So tensors are said to be on a device (`FakeDevice`) where
it asks; its own code then makes the copies, their optimizers and what goes to and fro.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import megatron_jobs as jobs
import pytest
import torch
import torch.distributed as dist
from megatron_jobs import (
    assert_moved_without_a_change,
    assert_read_back,
    read_back,
    save_into,
    trained,
)
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb

pytestmark = jobs.long_megatron
LAYERS = 2
MASTERS, AWARE_HALF = "masters, half in host memory", "precision-aware, half in host memory"
FLOAT32 = "float32, not distributed, half in host memory"
CASES: dict[str, dict[str, Any]] = {
    MASTERS: {"fraction": 0.5},
    "masters, all in host memory": {"fraction": 1.0, "overlap": True},
    "precision-aware, all on the device": {"fraction": 0.0, "aware": True},
    AWARE_HALF: {"fraction": 0.5, "overlap": True, "aware": True},
    "precision-aware, all in host memory, weights freed between steps": {
        "fraction": 1.0,
        "aware": True,
        "frees": True,
    },
    FLOAT32: {"fraction": 0.5, "bf16": False, "distributed": False, "overlap": True},
}
SAVED = AWARE_HALF
"""Without the precision-aware optimizer 0.16.1 saves that state and cannot load it (KeyError), also without us."""


class FakeDevice:
    """Tensors that HybridDeviceOptimizer is given are on a device for it, and so is what it makes of them there."""

    def install(self) -> None:
        import megatron_cpu
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

        megatron_cpu.NoStream.wait = lambda *_: None
        divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

        def divided(optimizer: Any, fraction: float) -> Any:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.on_device = True
            return divide(optimizer, fraction)

        HybridDeviceOptimizer._get_sub_optimizer_param_groups = divided
        torch.Tensor.is_cuda = property(lambda tensor: getattr(tensor, "on_device", False))
        for name in ("detach", "clone", "float"):
            setattr(torch.Tensor, name, self._staying(getattr(torch.Tensor, name)))
        torch.Tensor.cpu = lambda tensor: torch.empty_like(tensor).copy_(tensor)
        torch.Tensor.pin_memory = lambda tensor, *_: tensor
        own = torch.Tensor.to
        torch.Tensor.to = lambda tensor, *a, **k: tensor if a == ("cuda",) else own(tensor, *a, **k)

    @staticmethod
    def _staying(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = own(tensor, *args, **kwargs)
            caller = sys._getframe(1).f_globals["__name__"]
            if getattr(tensor, "on_device", False) and caller.endswith("hybrid_optimizer"):
                result.on_device = True
            return result

        return made


def prepare(**parallel: int) -> None:
    jobs.prepare(**parallel)
    from megatron.core.optimizer import optimizer_config

    optimizer_config.is_te_min_version = lambda *_: True  # it compares the version of a TransformerEngine that is none
    FakeDevice().install()


class OffloadedJob(jobs.Job):
    """Its optimizers are Megatron's HybridDeviceOptimizer.

    Args:
        overlap: ``overlap_cpu_optimizer_d2h_h2d``.
        aware: ``use_precision_aware_optimizer``.
        frees: weights and gradients after each step.
    """

    def __init__(
        self, *, fraction: float, overlap: bool = False, aware: bool = False, frees: bool = False, **options: Any
    ) -> None:
        self._frees = frees
        stepped = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": fraction,
            "overlap_cpu_optimizer_d2h_h2d": overlap,
            "pin_cpu_grads": False,
            "use_precision_aware_optimizer": aware,
        }
        super().__init__(**{"num_layers": LAYERS, "moe_router_topk": 3, "stepped": stepped, **options})

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        seen = []
        for step in steps:
            seen += super().train(range(step, step + 1))
            if self._frees:
                self._free_and_load()
        return seen

    def _free_and_load(self) -> None:
        """Do what verl does to weights and gradients around a rollout, and to this optimizer's state after it."""
        (model,) = self.models
        for buffer in [*model.buffers, *model.expert_parallel_buffers]:
            weights = buffer.param_data.clone()
            for data in (buffer.param_data, buffer.grad_data):
                size = data.untyped_storage().size()
                data.untyped_storage().resize_(0)
                data.untyped_storage().resize_(size)
            buffer.param_data.copy_(weights)
            buffer.grad_data.zero_()
        for leaf in self.optimizer.chained_optimizers:
            leaf.optimizer._move_new_state_to_right_device()

    def state_of(self, leaf: Any, parameter: Tensor) -> dict[str, Tensor]:
        """All tensors that Megatron's objects have of a parameter besides, by what they are."""
        given, hybrid = self.given_of(leaf, parameter), leaf.optimizer
        inner = hybrid.param_to_inner_param[given]
        stepping = next(
            one for one in hybrid.sub_optimizers for g in one.param_groups if any(inner is p for p in g["params"])
        )
        state = {key: value for key, value in stepping.state[inner].items() if key != "master_param"}
        assert {"exp_avg", "exp_avg_sq", "step"} == set(state)
        return {"given": given, "inner": inner, **state}

    @staticmethod
    def given_of(leaf: Any, parameter: Tensor) -> Tensor:
        """What the optimizer is given to step in the parameter's place."""
        if not hasattr(leaf, "model_param_group_index_map"):
            return parameter
        group, place = leaf.model_param_group_index_map[parameter]
        given: Tensor = leaf.optimizer.param_groups[group]["params"][place]
        return given

    def squares_of_experts(self) -> float:
        """Train a step; the sum of squares of the experts' gradients in it, over all ranks and before clipping."""
        norm, leaf_of, sums = self.optimizer.get_grad_norm, self.leaf_of(), []

        def noting() -> float:
            given = [self.given_of(leaf_of[id(parameter)], parameter) for _, parameter in self.experts(None)]
            sums.append(sum(one.decoupled_grad.double().square().sum() for one in given))
            of_all: float = norm()
            return of_all

        self.optimizer.get_grad_norm = noting
        self.train(range(1))
        dist.all_reduce(sums[0])
        return float(sums[0])

    def in_host_memory(self) -> tuple[int, int]:
        """Number of the expert parameters that this rank steps whose inner tensor is in host memory, and of all."""
        leaf_of = self.leaf_of()
        inner = [
            self.state_of(leaf_of[id(parameter)], parameter)["inner"]
            for _, parameter in self.experts(None)
            if id(parameter) in leaf_of
        ]
        return sum(not tensor.is_cuda for tensor in inner), len(inner)


def in_host_memory(job: OffloadedJob, *_: Any) -> dict[str, Any]:
    return {"in host memory": job.in_host_memory()}


def leave_out_of_norm(balancer: eplb.Balancer) -> None:
    """Gradients are looked for where torch's optimizers have them."""
    (optimizer,) = balancer._runtime.registry._optimizers
    optimizer._gradient_of = lambda parameter: None


def everything(rank: int, folder: str) -> dict[str, Any]:
    prepare()
    make = {case: partial(OffloadedJob, **options) for case, options in CASES.items()}
    results: dict[str, Any] = {}
    for case in CASES:
        results[case] = {
            "static": trained(make[case], move=False, also=in_host_memory),
            "moving": trained(make[case], move=True, also=save_into(folder) if case == SAVED else jobs.nothing),
        }
    results["squares of experts"] = make[AWARE_HALF]().squares_of_experts()
    results["left out of the norm"] = trained(make[AWARE_HALF], move=False, spoil=leave_out_of_norm)["seen"]
    results["refused"] = jobs.refusal(partial(OffloadedJob, fraction=1.0, distributed=False))
    results["checkpoint"] = read_back(folder, make[SAVED])
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, everything, str(tmp_path_factory.mktemp("megatron offload")))


@pytest.mark.parametrize("case", CASES)
def test_experts_with_state_in_host_memory_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    kinds = assert_moved_without_a_change(results, case)
    assert kinds == {"weight", "given", "inner", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("case", CASES)
def test_the_share_in_host_memory_is_the_one_asked_for(results: list[dict[str, Any]], case: str) -> None:
    for of_rank in results:
        there, of_all = of_rank[case]["static"]["in host memory"]
        fraction = CASES[case]["fraction"]
        assert there == of_all * fraction if fraction in (0.0, 1.0) else 0 < there < of_all


def test_gradients_of_a_dtype_of_their_own_are_in_the_norm(results: list[dict[str, Any]]) -> None:
    """Megatron without TransformerEngine adds squares of others in bf16, the same with experts as without."""
    for of_rank in results:
        ours, without = of_rank[AWARE_HALF]["moving"]["seen"][0][-1], of_rank["left out of the norm"][0][-1]
        assert ours**2 - without**2 == pytest.approx(of_rank["squares of experts"], rel=1e-4)
        assert of_rank["squares of experts"] > 0


def test_without_the_distributed_optimizer_bf16_is_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "set use_distributed_optimizer=True" in of_rank["refused"]


def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]]) -> None:
    assert_read_back(results, SAVED, "checkpoint")
