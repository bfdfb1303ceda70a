"""FSDP2 over EDP: each EDP rank has a slice of every expert, and experts move slice by slice. Against one process, and
with replicas: `test_loops`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from flat_settings import config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from support.loops import Layout, Spread
from support.seen import digests, said_by
from support.shuffle import plan_by, plan_shuffle
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted
from eplb_runtime.hosts import AttachError

EXPERTS, STEPS, AFTER = 8, 4, 2


@dataclass(frozen=True)
class Job:
    policy: str = "incremental"
    sharded: bool = True
    seed: int = 0


@cache
def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")), init_device_mesh("cpu", (4,))


def build(job: Job) -> tuple[nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    """EP 2 x EDP 2: ranks 0 and 1 are one EP group, 2 and 3 the other; ranks 0 and 2 hold the same experts."""
    mesh, everyone = meshes()
    ep_group = mesh["ep"].get_group()
    config = eplb.BalancerConfig(
        interval=2,
        migration=eplb.MigrationConfig(lag=0),
        policy=job.policy,
        gate="always",
        dense_gradients="host" if job.sharded else "allreduce",
    )
    model = make_model("gpt_oss", experts=EXPERTS, top_k=4, seed=job.seed)
    if job.sharded:
        eplb.shard_experts(model, config=config, ep_group=ep_group)
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, mesh=mesh["edp"], shard_placement_fn=lambda parameter: Shard(1))
            fully_shard(layer, mesh=everyone)
        fully_shard(model, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    balancer = eplb.attach(model, optimizer, config=config, ep_group=ep_group)
    if job.policy != "static":
        plan_by(balancer, plan_shuffle)
    return model, optimizer, balancer


def run_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, balancer: eplb.Balancer, rank: int, steps: range
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    model.train()
    for step in steps:
        ids = batch_of(rank, step) % 12 + 12 * ((step // 4) % 7)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norms.append(balancer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def train(rank: int, job: Job, folder: str = "") -> dict:
    model, optimizer, balancer = build(job)
    losses, norms = run_steps(model, optimizer, balancer, rank, range(STEPS))
    if folder:
        eplb.checkpoint.save(folder, model, optimizer)
    experts, state = model.model.layers[0].mlp.experts, eplb.logical_state_dict(model, optimizer)
    result = {
        "losses": losses,
        "norms": norms,
        "state": digests(state),
        "here": tuple(experts.gate_up_proj.to_local().shape) if job.sharded else tuple(experts.gate_up_proj.shape),
        "committed": len(balancer.events.of_type(RebalanceCommitted)),
        "aborted": [event.cause for event in balancer.events.of_type(RebalanceAborted)],
    }
    if folder:
        result["after"] = run_steps(model, optimizer, balancer, rank, range(STEPS, STEPS + AFTER))
    balancer.close()
    return result


def differences(one: list[dict], other: list[dict]) -> list[str]:
    found = []
    for a, b in zip(one, other, strict=True):
        found += [key for key in ("losses", "norms") if a[key] != b[key]]
        assert a["state"].keys() == b["state"].keys()
        found += [name for name in a["state"] if a["state"][name] != b["state"][name]]
    return found


def train_all(rank: int, folder: str) -> dict[str, dict]:
    """Whole experts and slices save what `test_a_checkpoint_goes...` loads."""
    return {
        "static": train(rank, Job(policy="static")),
        "sliced": train(rank, Job(), f"{folder}/sliced"),
        "whole": train(rank, Job(sharded=False), f"{folder}/whole"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("fully shard"))


@pytest.fixture(scope="module")
def trained(folder: str) -> dict[str, list[dict]]:
    ranks = run_ranks(4, train_all, folder)
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


def test_each_rank_has_its_slice_and_migration_changes_no_bit(trained: dict[str, list[dict]]) -> None:
    static, moving = trained["static"], trained["sliced"]
    assert moving[0]["committed"] >= 2 and moving[0]["aborted"] == []
    assert moving[0]["here"] == (EXPERTS // 2, 16, 64)
    assert differences(static, moving) == []
    assert differences(moving[:1] * 4, [{**moving[0], "state": result["state"]} for result in moving]) == []


def load_and_go_on(rank: int, sharded: bool, folder: str) -> dict:
    model, optimizer, balancer = build(Job(sharded=sharded, seed=1))
    eplb.checkpoint.load(folder, model, optimizer)
    state = digests(eplb.logical_state_dict(model, optimizer))
    after = run_steps(model, optimizer, balancer, rank, range(STEPS, STEPS + AFTER))
    balancer.close()
    return {"state": state, "after": after, "losses": [], "norms": []}


WAYS = [("sliced", "sliced"), ("sliced", "whole"), ("whole", "sliced")]
"""How a checkpoint was saved, and how it is loaded."""


def load_all(rank: int, folder: str) -> dict[tuple[str, str], dict]:
    return {(saved, loaded): load_and_go_on(rank, loaded == "sliced", f"{folder}/{saved}") for saved, loaded in WAYS}


def test_a_checkpoint_goes_from_slices_to_slices_and_to_whole_experts_and_back(
    trained: dict[str, list[dict]], folder: str
) -> None:
    loaded = run_ranks(4, load_all, folder)
    for saved_as, loaded_as in WAYS:
        for a, of_rank in zip(trained[saved_as], loaded, strict=True):
            b = of_rank[saved_as, loaded_as]
            assert differences([{**a, "losses": [], "norms": []}], [b]) == []
            if saved_as == loaded_as:
                assert a["after"] == b["after"]


def ask_for_what_does_not_work(rank: int) -> list[str]:
    mesh, _ = meshes()
    ep_group, said = mesh["ep"].get_group(), []

    def refused(
        placement: Shard | None, mesh_of: str = "edp", spread: bool = True, divided: bool = False, **options: object
    ) -> None:
        model = make_model("olmoe", experts=EXPERTS)
        if spread:
            eplb.shard_experts(model, ep_group=ep_group)
        for layer in model.model.layers:
            if placement is not None:
                fully_shard(
                    layer.mlp.experts, mesh=mesh[mesh_of], shard_placement_fn=lambda parameter, at=placement: at
                )
        if divided:
            model.model.layers[0].mlp.experts.set_gradient_divide_factor(1.0)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(AttachError) as error:
            eplb.attach(model, optimizer, config=config_from_settings(options), ep_group=ep_group)
        said.append(str(error.value))

    refused(Shard(0))
    refused(Shard(1), mesh_of="ep")
    refused(None)
    refused(Shard(1), spread=False)
    refused(Shard(1), divided=True)
    refused(Shard(1), dense_gradients="allreduce")
    refused(Shard(1), overlap=True)
    twice = make_model("olmoe", experts=EXPERTS)
    eplb.shard_experts(twice, ep_group=ep_group)
    for again in (lambda: eplb.shard_experts(twice, ep_group=ep_group), lambda: eplb.attach(twice)):
        with pytest.raises(AttachError) as error:
            again()
        said.append(str(error.value))
    return said


def test_other_ways_to_shard_are_refused_with_the_way_that_works() -> None:
    expected = [
        "not along dimension 1: call fully_shard on the experts module itself",
        "hold the same experts: call fully_shard on the experts module itself",
        "call fully_shard on the experts module itself",
        "call eplb_runtime.shard_experts(model) first",
        "set_gradient_divide_factor was called",
        "leave dense_gradients='host'",
        "leave overlap=False",
        "shard_experts is called once",
        "give both the same config and ep_group",
    ]
    for said in run_ranks(4, ask_for_what_does_not_work):
        assert not any("\n" in line for line in said)
        for line, wanted in zip(said, expected, strict=True):
            assert wanted in line


SLICED = Layout(2, 2, slots=1, family="gpt_oss", sliced=True)


def one_tensor_left_out(job: Spread) -> None:
    mesh, _ = meshes()
    model = make_model("olmoe", experts=EXPERTS)
    eplb.shard_experts(model, ep_group=mesh["ep"].get_group())
    for layer in model.model.layers:
        experts = layer.mlp.experts
        left_out = {experts.down_proj}
        fully_shard(experts, mesh=mesh["edp"], shard_placement_fn=lambda p: Shard(1), ignored_params=left_out)
    eplb.attach(model, torch.optim.AdamW(model.parameters()), ep_group=mesh["ep"].get_group())


def stages(job: Spread) -> None:
    mesh, _ = meshes()
    model = make_model("olmoe", experts=EXPERTS, layers=1)
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("others", "edp"))["edp"]
    eplb.shard_experts(model, ep_group=mesh["ep"].get_group())
    fully_shard(model.model.layers[0].mlp.experts, mesh=alone, shard_placement_fn=lambda p: Shard(1))
    ranks = Ranks(ep=tuple(mesh["ep"].mesh.tolist()), stages=(mesh.get_local_rank("edp"),))
    eplb.attach(model, torch.optim.AdamW(model.parameters()), ranks=ranks, config=eplb.BalancerConfig(replica_slots=1))


def two_at_once(job: Spread) -> None:
    job.balancer.at_once(job.forward, job.forward)


def a_hook(job: Spread) -> None:
    hook = job.model.model.layers[0].mlp.experts.gate_up_proj.register_post_accumulate_grad_hook(print)
    try:
        job.forward()
    finally:
        hook.remove()


MISTAKES: dict[str, Callable[[Spread], object]] = {
    "give it all expert parameters of all MoE layers, or none": one_tensor_left_out,
    "in pipeline stages": stages,
    "gathered for one layer at a time": two_at_once,
    "has gradient hooks": a_hook,
    "where experts have gradients": lambda job: job.run("q M"),
    "with fully_shard they do until balancer.reduce_gradients()": lambda job: job.run("B d S"),
}
"""What is said -> what was done, where replicas of slices are."""


def make_mistakes(rank: int) -> list[str]:
    job = Spread(rank, SLICED)
    return [said_by(lambda mistake=mistake: mistake(job)) for mistake in MISTAKES.values()]


def test_what_would_go_wrong_with_replicas_of_slices_is_refused_on_every_rank() -> None:
    for lines in run_ranks(4, make_mistakes):
        for said, line in zip(MISTAKES, lines, strict=True):
            assert said in line and "\n" not in line
