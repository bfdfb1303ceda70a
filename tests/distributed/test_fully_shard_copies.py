"""Copies of experts that FSDP2 slices over EDP: training with them is training in one process without us."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from support.shuffle import plan_by, plan_shuffle
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.events import RebalanceCommitted
from eplb_runtime.hosts.attaching.description import AttachError

EXPERTS, RANKS, STEPS, CLIP = 8, 4, 5, 0.5


def nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Job:
    """EP 2 x EDP 2: ranks 0 and 1 are one EP group, 2 and 3 the other; ranks 0 and 2 hold the same experts.

    Args:
        holds: who is told that a micro-batch is not the last: FSDP, the balancer.
        options: of ``fully_shard``.
        change: done to the model before anything else.
        between: done before each step.
        close_early: end balancing between the last backward pass and the optimizer's step.
    """

    replica_slots: int = 1
    copies_by: str = "torch"
    micro_batches: int = 1
    holds: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    change: Callable[[nn.Module], None] = nothing
    between: Callable[[nn.Module, torch.optim.Optimizer, int, int], None] = nothing
    close_early: bool = False


def whole_model(job: Job) -> nn.Module:
    model = make_model("gpt_oss", experts=EXPERTS, top_k=4).to(torch.float64)
    model.set_experts_implementation("eager")
    model.train()
    job.change(model)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)


@cache
def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")), init_device_mesh("cpu", (RANKS,))


def build(job: Job) -> tuple[nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    mesh, everyone = meshes()
    ep_group = mesh["ep"].get_group()
    config = eplb.BalancerConfig(
        interval=2,
        gate="always",
        replica_slots=job.replica_slots,
        copies_by=job.copies_by,
        migration=eplb.MigrationConfig(lag=0),
    )
    model, options = whole_model(job), dict(job.options)
    eplb.shard_experts(model, config=config, ep_group=ep_group)
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["edp"], shard_placement_fn=lambda p: Shard(1), **options)
        fully_shard(layer, mesh=everyone, **options)
    fully_shard(model, mesh=everyone, **options)
    optimizer = optimizer_of(model)
    balancer = eplb.attach(model, optimizer, config=config, ep_group=ep_group)
    plan_by(balancer, plan_shuffle)
    return model, optimizer, balancer


def loss_of(model: nn.Module, rank: int, step: int, part: int = 0, parts: int = 1) -> Tensor:
    """A few experts are wanted by most tokens, and others from step to step."""
    ids = batch_of(rank, step * parts + part) % 12 + 12 * (step % 7)
    loss: Tensor = model(input_ids=ids, labels=ids).loss / parts
    return loss


def train(rank: int, job: Job) -> dict[str, Any]:
    model, optimizer, balancer = build(job)
    losses, norms = [], []
    for step in range(STEPS):
        job.between(model, optimizer, rank, step)
        losses.append(0.0)
        copies = int((balancer.placement.copy_count > 1).sum())
        for part in range(job.micro_batches):
            last = part == job.micro_batches - 1
            if "fsdp" in job.holds:
                model.set_requires_gradient_sync(last)
            with balancer.no_sync() if "balancer" in job.holds and not last else contextlib.nullcontext():
                loss = loss_of(model, rank, step, part, job.micro_batches)
                loss.backward()
            losses[-1] += loss.item()
        if job.close_early and step == STEPS - 1:
            balancer.close()
        norms.append(balancer.clip_grad_norm_(CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    result = {
        "losses": losses,
        "norms": norms,
        "state": eplb.logical_state_dict(model, optimizer),
        "committed": len(balancer.events.of_type(RebalanceCommitted)),
        "copies": copies,
    }
    balancer.close()
    return result


def alone(job: Job) -> dict[str, Any]:
    """One process, without us, on all ranks' batches."""
    model = whole_model(job)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append([0.0] * RANKS)
        for rank in range(RANKS):
            for part in range(job.micro_batches):
                loss = loss_of(model, rank, step, part, job.micro_batches)
                (loss / RANKS).backward()
                losses[-1][rank] += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": dict(model.named_parameters())}


def distance(rank: int, ours: dict[str, Any], whole: dict[str, Any]) -> float:
    """The largest relative difference of losses, gradient norms and weights."""
    found = [abs(a - b[rank]) / b[rank] for a, b in zip(ours["losses"], whole["losses"], strict=True)]
    found += [abs(a - b) / b for a, b in zip(ours["norms"], whole["norms"], strict=True)]
    for name, weight in whole["weights"].items():
        found.append(float((ours["state"][f"model.{name}"] - weight).abs().max() / weight.abs().max()))
    return max(found)


def recompute(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def freeze(model: nn.Module) -> None:
    """So that nothing ahead of the first experts is trained, nor one of their tensors."""
    for name, parameter in model.named_parameters():
        if (name.startswith("model.layers.0.") and "experts" not in name) or "embed" in name or "down_proj" in name:
            parameter.requires_grad_(False)


def discard(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """A micro-batch whose gradients are cleared: to None, and to zero; held back, and not."""
    balancer = model._eplb_runtime_balancer
    with balancer.no_sync() if step % 2 else contextlib.nullcontext():
        loss_of(model, rank, 50 + step).backward()
    optimizer.zero_grad(set_to_none=step < 2)


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """FSDP leaves whole weights in the modules, until there is a backward pass: then all is saved, or experts move."""
    model.eval()
    with torch.inference_mode() if step else torch.no_grad():
        loss_of(model, rank, 50 + step)
    model.train()
    if step == 2:
        eplb.logical_state_dict(model, optimizer)
    if step == 3:
        initial = eplb.Placement.initial(2, EXPERTS, 2, 2)
        model._eplb_runtime_balancer.load_state_dict({"step": step, "placement": initial.to_json()})


def take_state_anew(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Weights and state go out and come back, midway."""
    if step != 3:
        return
    state = eplb.logical_state_dict(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    eplb.load_logical_state_dict(model, optimizer, state)


HALF = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
"""Of float64: half as many bits."""
UNCUT = (("reshard_after_forward", False),)
TWO = Job(micro_batches=2)
RIGHT = {
    "kept": Job(between=discard, close_early=True),
    "two slots": replace(TWO, replica_slots=2, holds=("fsdp",), options=UNCUT, between=evaluate),
    "held back by both": replace(TWO, holds=("fsdp", "balancer"), change=freeze),
    "recomputed": replace(TWO, holds=("balancer",), change=recompute, between=take_state_anew),
}
HALVES = {"half precision": Job(options=(("mp_policy", HALF),))}
JOBS = {**RIGHT, **HALVES}


def reference_of(job: Job) -> Job:
    """What makes a difference in one process: recompute makes none."""
    return Job(micro_batches=job.micro_batches, change=freeze if job.change is freeze else nothing)


def in_one_process(rank: int) -> dict[Job, dict[str, Any]]:
    """What jobs are compared with; each rank trains some of them."""
    wanted = list(dict.fromkeys(map(reference_of, JOBS.values())))
    mine = {job: alone(job) for job in wanted[rank::RANKS]}
    of_ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(of_ranks, mine)
    return {job: whole for of_rank in of_ranks for job, whole in of_rank.items()}


def train_all(rank: int) -> dict[str, Any]:
    references = in_one_process(rank)
    found: dict[str, Any] = {}
    for name, job in JOBS.items():
        ours = train(rank, job)
        distant = distance(rank, ours, references[reference_of(job)])
        found[name] = {"distance": distant, "committed": ours["committed"], "copies": ours["copies"]}
    found["refused"] = {name: refused(mistake) for name, mistake in MISTAKES.items()}
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(RANKS, train_all)


@pytest.mark.parametrize("name", RIGHT)
def test_training_with_sliced_copies_is_training_in_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert found[name]["committed"] >= 2 and found[name]["copies"] >= 4
        assert found[name]["distance"] < 1e-11


def test_copies_are_computed_in_the_precision_that_fsdp_computes_in(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert 1e-9 < found["half precision"]["distance"] < 5e-4  # a CPU's own rounding of bfloat16


# -- refused -----------------------------------------------------------------------------------------------------------


def one_tensor_left_out() -> None:
    mesh, _ = meshes()
    model = make_model("olmoe", experts=EXPERTS)
    eplb.shard_experts(model, ep_group=mesh["ep"].get_group())
    for layer in model.model.layers:
        experts = layer.mlp.experts
        left_out = {experts.down_proj}
        fully_shard(experts, mesh=mesh["edp"], shard_placement_fn=lambda p: Shard(1), ignored_params=left_out)
    eplb.attach(model, optimizer_of(model), ep_group=mesh["ep"].get_group())


def stages() -> None:
    mesh, _ = meshes()
    stage = mesh.get_local_rank("edp")
    model = make_model("olmoe", experts=EXPERTS, layers=1)
    ep_group = mesh["ep"].get_group()
    alone = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("others", "edp"))["edp"]
    eplb.shard_experts(model, ep_group=ep_group)
    fully_shard(model.model.layers[0].mlp.experts, mesh=alone, shard_placement_fn=lambda p: Shard(1))
    ranks = Ranks(ep=tuple(mesh["ep"].mesh.tolist()), stages=(stage,))
    eplb.attach(model, optimizer_of(model), ranks=ranks, config=eplb.BalancerConfig(replica_slots=1))


@cache
def trained() -> tuple[nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    """One model for several mistakes; it has copies."""
    model, optimizer, balancer = build(Job(change=freeze))
    for step in range(2):
        loss_of(model, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert balancer.placement.copy_count.max() > 1
    return model, optimizer, balancer


def two_at_once() -> None:
    trained()[2].at_once(nothing, nothing)


def a_hook() -> None:
    model, _, _ = trained()
    hook = model.model.layers[0].mlp.experts.gate_up_proj.register_post_accumulate_grad_hook(nothing)
    try:
        loss_of(model, 0, 0)
    finally:
        hook.remove()


def moved_within_a_step() -> None:
    """FSDP holds the homes' gradients back, where no parameter shows them."""
    model, _, balancer = trained()
    model.set_requires_gradient_sync(False)
    loss_of(model, 0, 0).backward()
    model.set_requires_gradient_sync(True)
    assert all(parameter.grad is None for parameter in model.model.layers[0].mlp.experts.parameters())
    balancer.rebalance()


def divided_otherwise() -> None:
    model, _, balancer = build(Job())
    model.model.layers[1].mlp.experts.set_gradient_divide_factor(4.0)
    try:
        loss_of(model, 0, 0)
    finally:
        balancer.close()


def gradients_rewritten() -> None:
    model, optimizer, _ = trained()
    loss_of(model, 0, 0).backward()
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            parameter.grad.mul_(0.5)
    optimizer.step()


MISTAKES: dict[str, Callable[[], None]] = {
    "give it all expert parameters of all MoE layers, or none": one_tensor_left_out,
    "in pipeline stages": stages,
    "gathered for one layer at a time": two_at_once,
    "has gradient hooks": a_hook,
    "where experts have gradients": moved_within_a_step,
    "set_gradient_divide_factor was called on model.layers.1.mlp.experts after attach": divided_otherwise,
    "beside fully_shard they do until balancer.reduce_gradients()": gradients_rewritten,
}
"""What is said -> what was done."""


def refused(mistake: Callable[[], None]) -> str:
    try:
        mistake()
    except (AttachError, RuntimeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("said", MISTAKES)
def test_what_would_go_wrong_is_refused_on_every_rank(ranks: list[dict[str, Any]], said: str) -> None:
    for found in ranks:
        assert said in found["refused"][said]
        assert "\n" not in found["refused"][said]
