"""What carries copies changes no bit: training whose copies are refreshed by copy engines (a double of torch's
symmetric memory; gradients come home by it, too) is training in which torch.distributed does it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import symmetric_memory_double as double
import test_fully_shard_copies as fully_shard
import torch
from moe_models import batch_of, make_model
from ranks import rows_of, run_ranks

import eplb_runtime as eplb
from eplb_runtime.config import ConfigError
from eplb_runtime.distributed import node_memory
from eplb_runtime.distributed.node_memory import NodeMemory
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted
from eplb_runtime.hosts.attaching import attach, replicas
from eplb_runtime.hosts.attaching.description import AttachError
from eplb_runtime.replicas import tree

EXPERTS = 16
CARRIED = {"bytes": 0}
"""To or from copies of this rank, not by torch."""


def use_the_doubles() -> None:
    attach.measure = lambda topology, *_: topology  # plans go by it, and no two measurements are the same
    replicas.why_not = lambda device: ""
    replicas.NodeMemory = partial(NodeMemory, package=double)
    of_peer = NodeMemory.of_peer

    def counted(self: NodeMemory, peer: int, own: torch.Tensor) -> torch.Tensor:
        CARRIED["bytes"] += own.nbytes
        return of_peer(self, peer, own)

    NodeMemory.of_peer = counted


@dataclass(frozen=True)
class Job:
    name: str
    replica_slots: int = 2
    steps: int = 6
    overlap: bool = False
    ep_size: int = 4
    ranks_per_node: int = 4
    each: int = 8
    eventful: bool = False
    dtype: torch.dtype = torch.float32
    close_at: int | None = None


def train(rank: int, job: Job, way: str) -> dict:
    os.environ["LOCAL_WORLD_SIZE"] = str(job.ranks_per_node)
    tree.NODES_EACH = tree.RANKS_EACH = job.each
    model = make_model("gpt_oss", experts=EXPERTS, top_k=2).to(job.dtype)
    if job.dtype == torch.float64:
        model.set_experts_implementation("eager")
    turn_to(model, 4.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    config = eplb.BalancerConfig(
        interval=2,
        gate="always",
        replica_slots=job.replica_slots,
        overlap=job.overlap,
        copies_by=way,
        dense_gradients="allreduce",
        dispatch=eplb.DispatchConfig(split_least_tokens=0 if job.replica_slots else 64),
    )
    sets = [list(range(first, first + job.ep_size)) for first in range(0, 4, job.ep_size)]
    group = [torch.distributed.new_group(ranks) for ranks in sets][rank // job.ep_size]
    balancer = eplb.attach(model, optimizer, config=config, ep_group=group)
    model.train()
    losses, placements = [], set()
    for step in range(job.steps):
        if step == job.steps // 2:
            turn_to(model, -4.0)
        if step == job.close_at:
            loss_of(model, rank, 100).backward()
            balancer.close()
        losses += (eventful_step if job.eventful else plain_step)(model, optimizer, balancer, rank, step)
        placements.add(balancer.placement.digest())
    copied = int((balancer.placement.copy_count > 1).sum())
    state = eplb.logical_state_dict(model, optimizer)
    aborted = [event.cause for event in balancer.events.of_type(RebalanceAborted)]
    commits = len(balancer.events.of_type(RebalanceCommitted))
    balancer.close()
    return {
        "losses": losses,
        "placements": placements,
        "copied": copied,
        "state": state,
        "aborted": aborted,
        "commits": commits,
    }


def turn_to(model: torch.nn.Module, bias: float) -> None:
    """A router that is biased to few experts, at one end or the other."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias.copy_(torch.linspace(bias, -bias / 4, EXPERTS))


def loss_of(model: torch.nn.Module, rank: int, number: int) -> torch.Tensor:
    ids = batch_of(rank, number, batch=2, length=8)
    return model(input_ids=ids, labels=ids).loss


def plain_step(model, optimizer, balancer, rank: int, step: int) -> list[float]:
    loss = loss_of(model, rank, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item()]


def eventful_step(model, optimizer, balancer, rank: int, step: int) -> list[float]:
    """What a loop does besides: it accumulates, evaluates, writes weights, leaves steps out, is interrupted."""
    losses = []
    for part in range(3):
        with balancer.no_sync() if part == step % 2 else nullcontext():
            loss = loss_of(model, rank, 3 * step + part)
            loss.backward()
        losses.append(loss)
    if step % 4 == 1:  # a scaler that found an overflow
        optimizer.zero_grad()
        return [loss.item() for loss in losses]
    if step % 4 == 2:
        with interrupted_between_layers(model), pytest.raises(KeyError, match="interrupted"):
            loss_of(model, rank, step).backward()
        optimizer.zero_grad()
        loss_of(model, rank, 3 * step).backward()
    balancer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)
        balancer.weights_changed()
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(model, rank, 50 + step))
    model.train()
    return [loss.item() for loss in losses]


@contextmanager
def interrupted_between_layers(model: torch.nn.Module) -> Iterator[None]:
    """The last layer's gradients of copies are on their way, and the backward pass goes no further."""

    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyError("interrupted")

    def hook(module, given, out) -> None:
        (out[0] if isinstance(out, tuple) else out).register_hook(interrupt)

    handle = model.model.layers[0].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def train_both_ways(rank: int, jobs: list[Job]) -> list[dict]:
    """Of each job, what copy engines have in common with torch."""
    use_the_doubles()
    found = []
    for job in jobs:
        by_torch = train(rank, job, "torch")
        CARRIED["bytes"] = 0
        found.append({**differences(by_torch, train(rank, job, "copy_engine")), "bytes": CARRIED["bytes"]})
    return found


def differences(one: dict, other: dict) -> dict:
    assert one["state"].keys() == other["state"].keys()
    pairs = [(value, other["state"][name]) for name, value in one["state"].items()]
    pairs.append((torch.tensor(one["losses"]), torch.tensor(other["losses"])))
    return {
        "equal": all(torch.equal(x, y) for x, y in pairs),
        "difference": max(((x - y).abs().max() / x.abs().max().clamp(min=1e-30)).item() for x, y in pairs),
        "placements": (len(one["placements"]), one["placements"] == other["placements"]),
        "copied": other["copied"],
        "aborted": [*one["aborted"], *other["aborted"]],
        "commits": other["commits"],
    }


JOBS = [
    Job("all sorts of steps on two nodes", ranks_per_node=2, eventful=True, steps=5),
    Job("copies that hang on copies", each=1, steps=5),
    Job("two EP groups", ep_size=2, replica_slots=1),
    Job("migration beside training", overlap=True, dtype=torch.float64, steps=10),
    Job("closed in the middle", close_at=4),
]


@pytest.mark.parametrize("job", rows_of(JOBS, JOBS[0]), ids=lambda job: job.name)
def test_training_is_as_it_is_by_torch_to_the_bit(job: Job) -> None:
    of_ranks = [found for (found,) in run_ranks(4, train_both_ways, [job])]
    for found in of_ranks:
        assert found["aborted"] == []
        if job.overlap:  # layers are committed when they have come, which is not at the same step of each run
            assert found["difference"] < 1e-11 and found["commits"] > 0
        else:
            assert found["equal"] and found["placements"][1]
            assert found["placements"][0] > 1, "links changed"
        assert (found["copied"] > 0) == (job.close_at is None)
    assert sum(found["bytes"] for found in of_ranks) > 0


def train_slices(rank: int) -> tuple[bool, int]:
    use_the_doubles()
    one, other = (fully_shard.train(rank, fully_shard.Job(copies_by=way)) for way in ("torch", "copy_engine"))
    same = all(torch.equal(value, other["state"][name]) for name, value in one["state"].items())
    return same and one["losses"] == other["losses"], other["committed"]


@pytest.mark.long
def test_so_it_is_where_fsdp_slices_experts() -> None:
    assert all(equal and committed > 0 for equal, committed in run_ranks(4, train_slices))


def lose_a_signal(rank: int, folder: str) -> None:
    """Leaves what it heard and ends, as a rank with an error does: the other may be in a collective by then."""
    use_the_doubles()
    replicas.NodeMemory = lambda node, device, _: NodeMemory(node, device, 2.0, package=double)
    model = make_model("gpt_oss", experts=8, top_k=2)
    config = eplb.BalancerConfig(
        replica_slots=1, copies_by="copy_engine", initial_placement=copied_both_ways(), dense_gradients="allreduce"
    )
    balancer = eplb.attach(model, torch.optim.AdamW(model.parameters()), config=config)
    model.train()
    if rank == 1:
        double.LOST.extend((0, channel) for channel in range(64))
    try:
        for step in range(3):
            loss_of(model, rank, step).backward()
            balancer._runtime.maps.replicas.refresh()
            balancer._runtime.maps.replicas.wait_all()
    except RuntimeError as error:
        (Path(folder) / f"{rank}.said").write_text(str(error))
    os._exit(1)


def copied_both_ways() -> eplb.Placement:
    placement = eplb.Placement.initial(2, 8, 2, 1)
    slots = placement.physical_to_logical.copy()
    slots[:, [4, 9]] = [5, 1]
    return eplb.Placement(slots, 8, 2, placement.home)


def test_a_signal_that_does_not_come_is_an_error_and_no_wait_for_ever(tmp_path: Path) -> None:
    run_ranks(2, lose_a_signal, str(tmp_path), expect_exit=(0, 1))
    said = [file.read_text() for file in tmp_path.glob("*.said")]
    assert len(said) == 2 and any("trapped" in of_rank for of_rank in said)


WHYS = ("not on cpu", "room for 2", "different sizes", "different ones", "node of its own", "does not arrive")


def refusals(rank: int) -> list[str]:
    """What attach says on a rank, of one obstacle after another; the last has none."""
    said = [attach_and_say()]
    use_the_doubles()
    for name, value in (("PAD_BYTES", 16), ("PAD_BYTES", 2048 + 1024 * rank)):
        before = getattr(double, name)
        setattr(double, name, value)
        said.append(attach_and_say())
        setattr(double, name, before)
    node = node_memory.node_of_this_rank
    node_memory.node_of_this_rank = lambda: f"node of {rank}"
    said.append(attach_and_say())
    node_memory.node_of_this_rank = node
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    said.append(attach_and_say())
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    copied = double.SymmetricMemory.get_remote_tensor
    double.SymmetricMemory.get_remote_tensor = lambda *given: copied(*given).clone()
    said.append(attach_and_say())
    double.SymmetricMemory.get_remote_tensor = copied
    said.append(attach_and_say())
    return said


def attach_and_say() -> str:
    model = make_model("gpt_oss", experts=8, top_k=2)
    config = eplb.BalancerConfig(replica_slots=1, copies_by="copy_engine", dense_gradients="allreduce")
    try:
        eplb.attach(model, torch.optim.AdamW(model.parameters()), config=config).close()
    except AttachError as error:
        return str(error)
    return ""


def test_where_a_way_cannot_be_had_every_rank_says_why_in_a_line() -> None:
    for said in run_ranks(2, refusals):
        for line, why in zip(said, (*WHYS, ""), strict=True):
            assert why in line and "\n" not in line
            assert ("copies_by='copy_engine': " in line) == bool(why)


def test_a_way_that_is_unknown_or_has_nothing_to_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="copies_by='nccl' is unknown; choose one of: torch, copy_engine"):
        eplb.BalancerConfig(replica_slots=1, copies_by="nccl")
    with pytest.raises(ConfigError, match="copies_by='copy_engine' without replica slots"):
        eplb.BalancerConfig(copies_by="copy_engine")
