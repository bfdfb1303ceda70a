"""Dispatch, transport and whole training jobs on the device: one rank, two ranks that share a GPU, two GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from device import DEVICE, NCCL, device_of, no_host_sync, use, why_not
from moe_models import batch_of, make_model
from ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.distributed.process_groups import backend_for
from eplb_runtime.distributed.transports.base import Message
from eplb_runtime.distributed.transports.torch_p2p import TorchPointToPoint
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted
from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext
from eplb_runtime.moe.experts.compute import weigh_gradients
from eplb_runtime.moe.routing.splitter import RowCounts

pytestmark = pytest.mark.gpu
EXPERTS, LAYERS = 8, 2


def ranks_on_gpu(world_size: int, function: Callable[..., object], *args: object, backend: str = NCCL) -> list:
    return run_ranks(world_size, function, *args, backend=backend, start_method="spawn")


# -- one rank ----------------------------------------------------------------------------------------------------------


def dispatch_with_known_counts(rank: int) -> None:
    use(DEVICE)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 64, generator=generator).to(DEVICE).requires_grad_()
    slots = torch.randint(0, EXPERTS, (40, 3), generator=generator)
    weight = torch.rand(40, 3, generator=generator).to(DEVICE).requires_grad_()
    sent = np.bincount(slots.reshape(-1).numpy(), minlength=EXPERTS)
    counts, slots = RowCounts(sent, sent.reshape(1, EXPERTS)), slots.to(DEVICE)
    dispatcher = AllToAll(DispatchContext.of(dist.group.WORLD, EXPERTS))
    dispatcher.plan(slots, counts)  # tables that stay are brought to the device once
    with no_host_sync():
        arrived = dispatcher.dispatch(hidden, weight, dispatcher.plan(slots, counts))
        slot_of_rows = arrived.counts_S.slot_of_rows(len(arrived.rows_MD))
        out = weigh_gradients(arrived.rows_MD * slot_of_rows.unsqueeze(1), arrived.weights_M)
        dispatcher.combine(out, arrived).sum().backward()


def test_dispatch_with_known_counts_never_waits_for_the_device() -> None:
    ranks_on_gpu(1, dispatch_with_known_counts)


def train_alone(rank: int, attached: bool, move_at: tuple[int, ...], steps: int) -> dict:
    """One rank; ``move_at``: steps before which all its experts change their slots."""
    use(DEVICE)
    model = make_model("olmoe", experts=EXPERTS, layers=LAYERS).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    balancer = eplb.attach(model, optimizer, config=eplb.BalancerConfig(policy="static")) if attached else None
    losses = []
    for step in range(steps):
        if balancer is not None and step in move_at:
            old = balancer.placement
            map_ = np.roll(old.physical_to_logical, 1 + step, axis=1)
            balancer.rebalancer._migrate(eplb.Placement(map_, EXPERTS, 1, map_.argsort(axis=1), old.epoch + 1))
            assert balancer.placement.epoch == old.epoch + 1
        ids = batch_of(rank, step).to(DEVICE)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if balancer is not None:
            balancer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = eplb.logical_state_dict(model, optimizer)
    if balancer is not None:
        balancer.close()
    return {"losses": losses, "state": {name: tensor.cpu() for name, tensor in state.items()}}


def different(one: dict, other: dict) -> list[str]:
    assert one["state"].keys() == other["state"].keys()
    found = [name for name in one["state"] if not torch.equal(one["state"][name], other["state"][name])]
    return found + (["losses"] if one["losses"] != other["losses"] else [])


def test_moving_experts_between_slots_changes_no_bit() -> None:
    (fixed,) = ranks_on_gpu(1, train_alone, True, (), 12)
    (again,) = ranks_on_gpu(1, train_alone, True, (), 12)
    assert different(fixed, again) == [], "training on this GPU does not repeat itself even without migration"
    (moved,) = ranks_on_gpu(1, train_alone, True, (2, 5, 6, 9), 12)
    assert different(fixed, moved) == []


# -- two ranks ---------------------------------------------------------------------------------------------------------


def train(rank: int, policy: str, replica_slots: int, beside: str = "") -> dict:
    """Two dozen steps of which each third has other tokens.

    Args:
        beside: transport of experts that move beside training; empty: they move between steps.
    """
    device = device_of(rank)
    use(device)
    model = make_model("olmoe", experts=EXPERTS, layers=LAYERS, top_k=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    config = eplb.BalancerConfig(
        interval=4,
        policy=policy,
        gate="always",
        dense_gradients="allreduce",
        replica_slots=replica_slots,
        overlap=bool(beside),
        migration=eplb.MigrationConfig(transport=beside) if beside else eplb.MigrationConfig(),
    )
    balancer = eplb.attach(model, optimizer, config=config)
    losses = []
    for step in range(24):
        ids = (batch_of(rank, step) % 12 + 12 * ((step // 8) % 7)).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        balancer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = eplb.logical_state_dict(model, optimizer)
    balancer.close()
    return {
        "losses": losses,
        "state": {name: tensor.cpu() for name, tensor in state.items()},
        "migrations": len(balancer.events.of_type(RebalanceCommitted)),
        "aborted": [event.cause for event in balancer.events.of_type(RebalanceAborted)],
    }


def carry(rank: int, sizes: list[int]) -> bool:
    """Bytes both ways through the transport that the balancer would choose; whether they arrived as they left."""
    device = device_of(rank)
    use(device)
    group = dist.new_group([0, 1], backend=backend_for(device))
    transport = TorchPointToPoint(group, backend_for(device), device, 30.0)
    transport.warm_up(time.monotonic() + 30)

    def message(sender: int, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sender * 1000 + size)
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)

    sends, receives = [], []
    for size in sizes:
        out = transport.empty(size)
        out.copy_(message(rank, size))
        sends.append(Message(1 - rank, out))
        receives.append(Message(1 - rank, transport.empty(size)))
    transport.post(sends, receives).wait(time.monotonic() + 30)
    return all(torch.equal(r.data.cpu(), message(1 - rank, s)) for r, s in zip(receives, sizes, strict=True))


@cache
def two_nccl_ranks_refused() -> str:
    """Why NCCL refuses two ranks on the one GPU that there is; empty: it does not. What else it says is a failure."""
    if torch.cuda.device_count() > 1:
        return ""
    try:
        ranks_on_gpu(2, carry, [16])
    except AssertionError as error:
        if "Duplicate GPU" not in str(error):
            raise
        return f"one GPU, and NCCL {torch.cuda.nccl.version()} takes one rank on it"
    return ""


def require_two_nccl_ranks() -> None:
    if why := two_nccl_ranks_refused():
        pytest.skip(why)


def gloo_all_to_all(rank: int) -> str:
    use(DEVICE)
    sent = torch.full((4,), rank + 1, device=DEVICE)
    arrived = torch.empty_like(sent)
    try:
        dist.all_to_all_single(arrived, sent)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if arrived.tolist() == [1, 1, 2, 2] else f"wrong bytes: {arrived.tolist()}"


@pytest.fixture(params=["gloo", NCCL], ids=["gloo", "nccl"])
def backend(request: pytest.FixtureRequest) -> str:
    """Backends that carry a GPU's tensors between two ranks here."""
    if request.param == NCCL:
        require_two_nccl_ranks()
    return request.param


def test_training_is_bit_identical_with_and_without_migration(backend: str) -> None:
    if backend == "gloo":
        refused = ranks_on_gpu(2, gloo_all_to_all, backend="gloo")[0]
        if refused:
            pytest.skip(f"gloo does not dispatch tokens of a GPU: {refused}")
    fixed = ranks_on_gpu(2, train, "static", 0, backend=backend)
    again = ranks_on_gpu(2, train, "static", 0, backend=backend)
    moved = ranks_on_gpu(2, train, "incremental", 0, backend=backend)
    for rank in range(2):
        assert different(fixed[rank], again[rank]) == [], "training does not repeat itself even without migration"
        assert moved[rank]["aborted"] == []
        assert moved[rank]["migrations"] >= 2
        assert different(fixed[rank], moved[rank]) == []


@pytest.mark.parametrize("transport", ["torch", "cuda_ipc", "nvshmem"])
def test_experts_that_move_beside_training_change_no_bit(transport: str) -> None:
    if why := why_not(transport):
        pytest.skip(why)
    require_two_nccl_ranks()
    fixed = ranks_on_gpu(2, train, "static", 0)
    moved = ranks_on_gpu(2, train, "incremental", 0, transport)
    for one, other in zip(fixed, moved, strict=True):
        assert other["aborted"] == [] and other["migrations"] >= 1
        assert different(one, other) == []


def test_replica_slots_train_over_nccl() -> None:
    require_two_nccl_ranks()
    fixed, copied = (ranks_on_gpu(2, train, "incremental", slots) for slots in (0, 1))
    for rank in range(2):
        assert copied[rank]["aborted"] == []
        assert copied[rank]["losses"] == pytest.approx(fixed[rank]["losses"], rel=0.05)
