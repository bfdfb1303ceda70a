"""Megatron-Core's own optimizers with state in host memory (``optimizer_cpu_offload``): 2 ranks, EP 2, its own model,
schedule, DistributedDataParallel and HybridDeviceOptimizer, with every home moved after each step.

On a CPU that class finds nothing to copy into host memory. So tensors are said to be on a device (`FakeDevice`) where
it asks; its own code then makes the copies, their optimizers and what goes to and fro.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import FOLDER, load_example
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError
from eplb_runtime.planner.shuffle import plan_shuffle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
STEPS, MICRO_BATCHES, LENGTH, EXPERTS, LAYERS, VOCABULARY = 3, 2, 16, 8, 2, 64
AWARE = {"use_precision_aware_optimizer": True}
CASES: dict[str, dict[str, Any]] = {
    "masters, all on the device": {"fraction": 0.0},
    "masters, half in host memory": {"fraction": 0.5},
    "masters, all in host memory": {"fraction": 1.0, "overlap": True},
    "precision-aware, all on the device": {"fraction": 0.0, **AWARE},
    "precision-aware, half in host memory": {"fraction": 0.5, "overlap": True, **AWARE},
    "precision-aware, all in host memory": {"fraction": 1.0, "overlap": True, **AWARE},
    "precision-aware, all in host memory, weights freed between steps": {"fraction": 1.0, "frees": True, **AWARE},
    "float32, not distributed, all on the device": {"fraction": 0.0, "bf16": False, "distributed": False},
    "float32, not distributed, half in host memory": {
        "fraction": 0.5,
        "bf16": False,
        "distributed": False,
        "overlap": True,
    },
    "float32, not distributed, all in host memory": {"fraction": 1.0, "bf16": False, "distributed": False},
}
"""Settings of OptimizerConfig; `overlap` is overlap_cpu_optimizer_d2h_h2d, `distributed` use_distributed_optimizer."""
MASTERS, AWARE_HALF = "masters, half in host memory", "precision-aware, half in host memory"
FLOAT32 = "float32, not distributed, half in host memory"
SAVED = (AWARE_HALF, "precision-aware, all in host memory")
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
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    load_example("megatron_gpt")
    from megatron.core import parallel_state
    from megatron.core.optimizer import optimizer_config

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, **parallel)
    optimizer_config.is_te_min_version = lambda *_: True  # it compares the version of a TransformerEngine that is none
    FakeDevice().install()


class Job:
    """What Megatron's training loop makes of a case."""

    def __init__(
        self,
        *,
        fraction: float,
        overlap: bool = False,
        bf16: bool = True,
        distributed: bool = True,
        frees: bool = False,
        model: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        bare = load_example("megatron_gpt").model_of(
            bf16=bf16, moe_router_topk=3, calculate_per_token_loss=False, **(model or {})
        )
        config = bare.config
        config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        self._frees = frees
        self.model = DistributedDataParallel(config, ddp, bare)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=0.1,
            bf16=bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=fraction,
            overlap_cpu_optimizer_d2h_h2d=overlap,
            pin_cpu_grads=False,
            **options,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        """Losses and the gradient norm of each step, by Megatron's own schedule."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        seen = []
        for step in steps:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches_of(step),
                model=[self.model],
                num_microbatches=MICRO_BATCHES,
                seq_length=LENGTH,
                micro_batch_size=2,
                forward_only=False,
            )
            _, norm, _ = self.optimizer.step()
            seen.append((*(loss.item() for loss in losses), norm))
            if self._frees:
                self._free_and_load()
        return seen

    def _free_and_load(self) -> None:
        """Do what verl does to weights and gradients around a rollout, and to this optimizer's state after it."""
        for buffer in [*self.model.buffers, *self.model.expert_parallel_buffers]:
            weights = buffer.param_data.clone()
            for data in (buffer.param_data, buffer.grad_data):
                size = data.untyped_storage().size()
                data.untyped_storage().resize_(0)
                data.untyped_storage().resize_(size)
            buffer.param_data.copy_(weights)
            buffer.grad_data.zero_()
        for leaf in self.optimizer.chained_optimizers:
            leaf.optimizer._move_new_state_to_right_device()

    def leaf_of(self, parameter: Tensor) -> Any:
        for leaf in self.optimizer.chained_optimizers:
            if not leaf.is_stub_optimizer and any(parameter is one for one in held(leaf)):
                return leaf
        raise KeyError

    def kept(self, parameter: Tensor) -> dict[str, Tensor]:
        """All tensors that Megatron's objects have of a parameter, by what they are."""
        leaf = self.leaf_of(parameter)
        given = parameter
        if hasattr(leaf, "model_param_group_index_map"):
            group, place = leaf.model_param_group_index_map[parameter]
            given = leaf.optimizer.param_groups[group]["params"][place]
        hybrid = leaf.optimizer
        inner = hybrid.param_to_inner_param[given]
        stepping = next(
            one for one in hybrid.sub_optimizers for g in one.param_groups if any(inner is p for p in g["params"])
        )
        state = {key: value for key, value in stepping.state[inner].items() if key != "master_param"}
        assert {"exp_avg", "exp_avg_sq", "step"} == set(state)
        return {"weight": parameter, "given": given, "inner": inner, **state}

    def tensors(self, placement: eplb.Placement | None) -> dict[Any, Tensor]:
        """All that this rank trains, experts by layer and logical number."""
        first = dist.get_rank() * EXPERTS // 2
        found: dict[Any, Tensor] = {}
        for row, module in enumerate(layers_of(self.model)):
            for slot, expert in enumerate(module.experts.local_experts, start=first):
                number = slot if placement is None else int(placement.physical_to_logical[row, slot])
                for name, parameter in expert.named_parameters():
                    found |= {(row, number, name, what): value for what, value in self.kept(parameter).items()}
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if ".experts." not in name and torch.is_tensor(tensor):
                found[("dense", name)] = tensor
        return {key: tensor.detach().clone().flatten() for key, tensor in found.items()}

    def in_host_memory(self) -> tuple[int, int]:
        """Number of this rank's expert parameters whose inner tensor is in host memory, and of all."""
        kept = [self.kept(p) for module in layers_of(self.model) for p in module.experts.parameters()]
        return sum(not one["inner"].is_cuda for one in kept), len(kept)


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == "MoELayer"]


def held(leaf: Any) -> list[Tensor]:
    if hasattr(leaf, "model_param_group_index_map"):
        return list(leaf.model_param_group_index_map)
    return [parameter for group in leaf.optimizer.param_groups for parameter in group["params"]]


def batches_of(step: int) -> Iterator[Tensor]:
    for number in range(MICRO_BATCHES):
        seed = 1009 * step + 31 * number + dist.get_rank()
        drawn = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(seed))
        yield (VOCABULARY * drawn**3).long()  # small numbers come often


def forward_step(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    ids = next(batches)
    positions = torch.arange(LENGTH).expand_as(ids)
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    output = model(input_ids=ids, position_ids=positions, attention_mask=causal, labels=ids)

    def loss_of(output: Tensor) -> tuple[Tensor, Tensor]:
        loss = output.float().mean()
        return loss, loss.detach()

    return output, loss_of


def attached(job: Job, move: bool) -> eplb.Balancer:
    config = eplb.BalancerConfig(
        interval=1, gate="always", policy="incremental" if move else "static", migration=eplb.MigrationConfig(lag=0)
    )
    balancer = eplb.attach([job.model], job.optimizer, config=config)
    if move:
        balancer._wait_until_compiled()
        balancer._plan_with(plan_shuffle)
    return balancer


def trained(case: str, move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None) -> dict[str, Any]:
    job = Job(**CASES[case])
    balancer = attached(job, move)
    spoil(balancer)
    result = {
        "seen": job.train(range(STEPS)),
        "tensors": job.tensors(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
        "in host memory": job.in_host_memory(),
    }
    balancer.close()
    return result


def only_main_moves(found: Any) -> Any:
    """What stands on the device in the place of what the next step reads."""
    main = found.copies.get("param")
    return replace(found, state={**found.state, "param": main[0]} if main else found.state, copies={})


def only_inner_moves(found: Any) -> Any:
    return replace(found, copies={})


def finding(change: Callable[[Any], Any]) -> Callable[[eplb.Balancer], None]:
    def spoil(balancer: eplb.Balancer) -> None:
        from eplb_runtime.hosts.megatron import optimizers

        own = optimizers._offloaded
        optimizers._offloaded = lambda leaf, parameter: change(own(leaf, parameter))
        balancer._end_with(Undo(lambda: setattr(optimizers, "_offloaded", own)))

    return spoil


class Undo:
    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


def leave_out_of_norm(balancer: eplb.Balancer) -> None:
    """Gradients are looked for where torch's optimizers have them."""
    (optimizer,) = balancer._runtime.registry._optimizers
    optimizer._gradient_of = lambda parameter: None


def forget_state(balancer: eplb.Balancer) -> None:
    """Weights move, and what their optimizer keeps stays."""
    balancer._runtime.registry._optimizers.clear()


CONTROLS: dict[str, tuple[str, Callable[[eplb.Balancer], None]]] = {
    "only the main moved": (MASTERS, finding(only_main_moves)),
    "only the copy moved": (MASTERS, finding(only_inner_moves)),
    "only weights moved, their copies not": (FLOAT32, finding(only_inner_moves)),
    "state stays": (AWARE_HALF, forget_state),
}


def refused() -> str:
    job = Job(fraction=1.0, distributed=False)
    with pytest.raises(AttachError) as error:
        attached(job, move=False)
    return str(error.value)


def saved_and_read_back(folder: Path, case: str) -> dict[str, Any]:
    """Saved by Megatron after moves, and read by Megatron alone into a job that has trained something else."""
    from megatron.core import dist_checkpointing

    def state_of(job: Job, loading: bool) -> dict[str, Any]:
        metadata = {"singleton_local_shards": False, "distrib_optim_sharding_type": "fully_reshardable"}
        of_model = job.model.module.sharded_state_dict(metadata=metadata)
        return {
            "model": of_model,
            "optimizer": job.optimizer.sharded_state_dict(of_model, is_loading=loading, metadata=metadata),
        }

    job = Job(**CASES[case])
    balancer = attached(job, move=True)
    job.train(range(STEPS))
    folder.mkdir(exist_ok=True)
    dist.barrier()
    save(state_of(job, loading=False), folder)
    saved = job.tensors(balancer.placement)
    moved = balancer.placement.physical_to_logical.tolist()
    balancer.close()
    job = Job(**CASES[case])
    job.train(range(STEPS, STEPS + 1))  # Megatron loads what has stepped; all of it is overwritten
    before = job.tensors(None)
    with torch.serialization.safe_globals([torch.optim.AdamW]):  # its groups name the classes of the optimizers inside
        state = dist_checkpointing.load(state_of(job, loading=True), str(folder))
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    return {
        "saved": {"tensors": saved},
        "before": {"tensors": before},
        "read": {"tensors": job.tensors(None)},
        "placement": moved,
    }


def save(state: dict[str, Any], folder: Path) -> None:
    """Megatron writes by processes of its own, which ranks of these tests may not start otherwise."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    dist_checkpointing.save(state, str(folder))
    if filesystem_async._results_queue is not None:
        filesystem_async._results_queue._manager.shutdown()
        filesystem_async._results_queue = None


def everything(rank: int, folder: str) -> dict[str, Any]:
    prepare()
    results: dict[str, Any] = {}
    for case in CASES:
        results[case] = {"static": trained(case, move=False), "moving": trained(case, move=True)}
    for name, (case, spoil) in CONTROLS.items():
        results[name] = trained(case, move=True, spoil=spoil)
    results["alone"] = Job(**CASES[AWARE_HALF]).train(range(STEPS))
    results["left out of the norm"] = trained(AWARE_HALF, move=False, spoil=leave_out_of_norm)["seen"]
    results["refused"] = refused()
    for case in SAVED:
        results[f"{case}, saved"] = saved_and_read_back(Path(folder) / case[-20:], case)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, everything, str(tmp_path_factory.mktemp("megatron offload")))


def whole(of_ranks: list[dict[str, Any]]) -> dict[Any, Tensor]:
    """All tensors of the job. Those that several ranks have must be the same on them."""
    found: dict[Any, Tensor] = {}
    for of_rank in of_ranks:
        for key, tensor in of_rank["tensors"].items():
            assert torch.equal(found.setdefault(key, tensor), tensor), key
    return found


def differing(some: dict[Any, Tensor], others: dict[Any, Tensor]) -> list[Any]:
    assert some.keys() == others.keys()
    return [key for key in some if not torch.equal(some[key], others[key])]


@pytest.mark.parametrize("case", CASES)
def test_experts_with_state_in_host_memory_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    static = whole([of_rank[case]["static"] for of_rank in results])
    moving = whole([of_rank[case]["moving"] for of_rank in results])
    for of_rank in results:
        assert of_rank[case]["moving"]["seen"] == of_rank[case]["static"]["seen"]
    moved = results[0][case]["moving"]["moved"]
    assert results[0][case]["static"]["moved"] == 0 < moved
    experts = [key for key in static if key[0] != "dense"]
    print(f"{case}: {len(experts)} expert tensors, {len(static)} in all, {moved} moves")
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
    assert len(experts) == LAYERS * EXPERTS * 2 * 6
    assert differing(static, moving) == []


@pytest.mark.parametrize("case", CASES)
def test_the_share_in_host_memory_is_the_one_asked_for(results: list[dict[str, Any]], case: str) -> None:
    for of_rank in results:
        there, of_all = of_rank[case]["moving"]["in host memory"]
        fraction = CASES[case]["fraction"]
        assert there == of_all * fraction if fraction in (0.0, 1.0) else 0 < there < of_all


@pytest.mark.parametrize("control", CONTROLS)
def test_control_what_is_left_behind_shows(results: list[dict[str, Any]], control: str) -> None:
    static = whole([of_rank[CONTROLS[control][0]]["static"] for of_rank in results])
    assert differing(static, whole([of_rank[control] for of_rank in results])) != []


def test_gradients_of_a_dtype_of_their_own_are_in_the_norm(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        alone, ours, without = (
            [seen[-1] for seen in of_steps]
            for of_steps in (of_rank["alone"], of_rank[AWARE_HALF]["moving"]["seen"], of_rank["left out of the norm"])
        )
        assert ours == pytest.approx(alone, rel=1e-2)  # Megatron without TransformerEngine adds squares in bf16
        assert abs(without[0] - alone[0]) > 5 * abs(ours[0] - alone[0])


def test_without_the_distributed_optimizer_bf16_is_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "set use_distributed_optimizer=True" in of_rank["refused"]


@pytest.mark.parametrize("case", SAVED)
def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]], case: str) -> None:
    saved, before, read = (
        whole([of_rank[f"{case}, saved"][when] for of_rank in results]) for when in ("saved", "before", "read")
    )
    placement = results[0][f"{case}, saved"]["placement"]
    assert all(row != sorted(row) for row in placement)
    assert differing(before, saved) != []
    assert differing(read, saved) == []
