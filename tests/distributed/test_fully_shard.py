"""FSDP2 over EDP, where each EDP rank has a slice of every expert: what is refused. Against one process, and with
replicas: `test_loops`; moved slice by slice: `test_bits`; saved and loaded: `test_checkpoint`."""

from collections.abc import Callable
from typing import Any

import torch
from support import training
from support.loops import Layout, Spread
from support.moe_models import make_model
from support.ranks import run_ranks
from support.seen import assert_refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks

SLICED = Layout(2, 2, slots=1, family="gpt_oss", sliced=True)


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [layer.mlp.experts for layer in model.model.layers]


def attached(placement: Shard | None, mesh: str = "edp", spread: bool = True, divided: bool = False, **settings: Any):
    """A call that attaches a model sharded in another way."""
    meshes, _ = training.meshes(2, 2)
    ep_group, model = meshes["ep"].get_group(), make_model("olmoe")
    if spread:
        eplb.shard_experts(model, ep_group=ep_group)
    for experts in experts_of(model) if placement is not None else ():
        fully_shard(experts, mesh=meshes[mesh], shard_placement_fn=lambda _: placement)
    if divided:
        experts_of(model)[0].set_gradient_divide_factor(1.0)
    fully_shard(model)
    settings = {"dense_gradients": "host", **settings}
    return lambda: training.attach(model, torch.optim.AdamW(model.parameters()), ep_group=ep_group, **settings)


def ask_for_what_does_not_work(rank: int) -> None:
    ep_group, twice = training.meshes(2, 2)[0]["ep"].get_group(), make_model("olmoe")
    eplb.shard_experts(twice, ep_group=ep_group)
    cases = {
        "not along dimension 1: call eplb_runtime.shard_experts(model) first": attached(Shard(0)),
        "hold the same experts: call eplb_runtime.shard_experts(model) first": attached(Shard(1), mesh="ep"),
        "then fully_shard on the experts module itself": attached(None),
        "is a DTensor of all experts: call eplb_runtime.shard_experts(model) first": attached(Shard(1), spread=False),
        "set_gradient_divide_factor was called": attached(Shard(1), divided=True),
        "leave dense_gradients='host'": attached(Shard(1), dense_gradients="allreduce"),
        "leave overlap=False": attached(Shard(1), overlap=True),
        "shard_experts is called once": lambda: eplb.shard_experts(twice, ep_group=ep_group),
        "give both the same config and ep_group": lambda: eplb.attach(twice),
    }
    assert_refused(cases)


def test_other_ways_to_shard_are_refused_with_the_way_that_works() -> None:
    run_ranks(4, ask_for_what_does_not_work)


def one_tensor_left_out(job: Spread) -> None:
    mesh, _ = training.meshes(2, 2)
    model = make_model("olmoe")
    eplb.shard_experts(model, ep_group=mesh["ep"].get_group())
    for experts in experts_of(model):
        left_out = {experts.down_proj}
        fully_shard(experts, mesh=mesh["edp"], shard_placement_fn=lambda p: Shard(1), ignored_params=left_out)
    eplb.attach(model, torch.optim.AdamW(model.parameters()), ep_group=mesh["ep"].get_group())


def stages(job: Spread) -> None:
    mesh, _ = training.meshes(2, 2)
    model = make_model("olmoe", layers=1)
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("others", "edp"))["edp"]
    eplb.shard_experts(model, ep_group=mesh["ep"].get_group())
    fully_shard(experts_of(model)[0], mesh=alone, shard_placement_fn=lambda p: Shard(1))
    ranks = Ranks(ep=tuple(mesh["ep"].mesh.tolist()), stages=(mesh.get_local_rank("edp"),))
    eplb.attach(model, torch.optim.AdamW(model.parameters()), ranks=ranks, config=eplb.BalancerConfig(replica_slots=1))


def a_hook(job: Spread) -> None:
    hook = experts_of(job.model)[0].gate_up_proj.register_post_accumulate_grad_hook(print)
    try:
        job.forward()
    finally:
        hook.remove()


MISTAKES: dict[str, Callable[[Spread], object]] = {
    "give it all expert parameters of all MoE layers, or none": one_tensor_left_out,
    "in pipeline stages": stages,
    "gathered for one layer at a time": lambda job: job.balancer.at_once(job.forward, job.forward),
    "has gradient hooks": a_hook,
    "where experts have gradients": lambda job: job.run("q M"),
    "with fully_shard balancer.reduce_gradients() adds them": lambda job: job.run("B d S"),
}
"""What is said -> what was done, where replicas of slices are."""


def make_mistakes(rank: int) -> None:
    job = Spread(rank, SLICED)
    assert_refused({words: lambda mistake=mistake: mistake(job) for words, mistake in MISTAKES.items()})


def test_what_would_go_wrong_with_replicas_of_slices_is_refused_on_every_rank() -> None:
    run_ranks(4, make_mistakes)
