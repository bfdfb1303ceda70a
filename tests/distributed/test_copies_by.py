"""What carries copies changes no bit: training whose copies are refreshed by copy engines (a double of torch's
symmetric memory; gradients come home by it, too) is training in which torch.distributed does it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import symmetric_memory_double as double
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training

import eplb_runtime as eplb
from eplb_runtime.distributed import node_memory
from eplb_runtime.distributed.node_memory import NodeMemory
from eplb_runtime.events import RebalanceAborted
from eplb_runtime.hosts.attaching import attach, replicas
from eplb_runtime.hosts.attaching.description import AttachError

EXPERTS, STEPS = 16, 5
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


def train(rank: int, way: str) -> dict:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    model = make_model("gpt_oss", experts=EXPERTS, top_k=2)
    turn_to(model, 4.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    balancer = training.attach(model, optimizer, interval=2, gate="always", replica_slots=2, copies_by=way)
    model.train()
    losses, placements = [], set()
    for step in range(STEPS):
        if step == STEPS // 2:
            turn_to(model, -4.0)
        losses += eventful_step(model, optimizer, balancer, rank, step)
        placements.add(balancer.placement.digest())
    result = {
        "losses": losses,
        "placements": placements,
        "copied": int((balancer.placement.copy_count > 1).sum()),
        "state": eplb.logical_state_dict(model, optimizer),
        "aborted": [event.cause for event in balancer.events.of_type(RebalanceAborted)],
    }
    balancer.close()
    return result


def turn_to(model: torch.nn.Module, bias: float) -> None:
    """A router that is biased to few experts, at one end or the other."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias.copy_(torch.linspace(bias, -bias / 4, EXPERTS))


def loss_of(model: torch.nn.Module, rank: int, number: int) -> torch.Tensor:
    ids = batch_of(rank, number, batch=2, length=8)
    return model(input_ids=ids, labels=ids).loss


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


def train_both_ways(rank: int) -> dict:
    """What copy engines have in common with torch."""
    use_the_doubles()
    one = train(rank, "torch")
    CARRIED["bytes"] = 0
    other = train(rank, "copy_engine")
    assert one["state"].keys() == other["state"].keys()
    equal = all(torch.equal(value, other["state"][name]) for name, value in one["state"].items())
    return {
        "equal": equal and one["losses"] == other["losses"],
        "placements": (len(one["placements"]), one["placements"] == other["placements"]),
        "copied": other["copied"],
        "aborted": [*one["aborted"], *other["aborted"]],
        "bytes": CARRIED["bytes"],
    }


def test_training_is_as_it_is_by_torch_to_the_bit() -> None:
    """All sorts of steps, on two nodes."""
    of_ranks = run_ranks(4, train_both_ways)
    for found in of_ranks:
        assert found["aborted"] == [] and found["equal"] and found["placements"][1]
        assert found["placements"][0] > 1, "links changed"
        assert found["copied"] > 0
    assert sum(found["bytes"] for found in of_ranks) > 0


def lose_a_signal(rank: int, folder: str) -> None:
    """Leaves what it heard and ends, as a rank with an error does: the other may be in a collective by then."""
    use_the_doubles()
    replicas.NodeMemory = lambda node, device, _: NodeMemory(node, device, 2.0, package=double)
    model = make_model("gpt_oss", experts=8, top_k=2)
    balancer = training.attach(
        model,
        torch.optim.AdamW(model.parameters()),
        replica_slots=1,
        copies_by="copy_engine",
        initial_placement=copied_both_ways(),
    )
    model.train()
    if rank == 1:
        double.LOST.extend((0, channel) for channel in range(64))
    try:
        for step in range(3):
            loss_of(model, rank, step).backward()
            balancer.runtime.maps.replicas.refresh()
            balancer.runtime.maps.replicas.wait_all()
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
    try:
        training.attach(model, torch.optim.AdamW(model.parameters()), replica_slots=1, copies_by="copy_engine").close()
    except AttachError as error:
        return str(error)
    return ""


def test_where_a_way_cannot_be_had_every_rank_says_why_in_a_line() -> None:
    for said in run_ranks(2, refusals):
        for line, why in zip(said, (*WHYS, ""), strict=True):
            assert why in line and "\n" not in line
            assert ("copies_by='copy_engine': " in line) == bool(why)
