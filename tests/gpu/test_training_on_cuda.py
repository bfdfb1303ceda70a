"""Whole training jobs on the device: one rank, two ranks that may share a GPU, three."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from device import DEVICE, NCCL, different, no_host_sync, ranks_on_gpu, train, trained, use, why_not
from support.shuffle import plan_by, plan_shuffle

import eplb_runtime as eplb
from eplb_runtime.distributed.transports import symmetric
from eplb_runtime.events import BalancingResumed
from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext
from eplb_runtime.moe.experts.compute import weigh_gradients
from eplb_runtime.moe.routing.slots import RowCounts

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
EXPERTS = 8
MOVING = {"policy": "incremental"}


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
    dispatcher._deduplicates[dist.group.WORLD] = False  # as where each choice is a row: else counts are exchanged
    dispatcher.plan(slots, counts)  # tables that stay are brought to the device once
    with no_host_sync():
        arrived = dispatcher.dispatch(hidden, weight, dispatcher.plan(slots, counts))
        slot_of_rows = arrived.counts_S.slot_of_rows(len(arrived.rows_MD))
        out = weigh_gradients(arrived.rows_MD * slot_of_rows.unsqueeze(1), arrived.weights_M)
        dispatcher.combine(out, arrived).sum().backward()


def test_dispatch_with_known_counts_never_waits_for_the_device() -> None:
    ranks_on_gpu(1, dispatch_with_known_counts)


def move_at(steps: tuple[int, ...], balancer: eplb.Balancer, step: int) -> bool:
    """Ahead of these steps all experts change their slots."""
    if step in steps:
        old = balancer.placement
        map_ = np.roll(old.physical_to_logical, 1 + step, axis=1)
        balancer.place(eplb.Placement(map_, EXPERTS, 1, map_.argsort(axis=1), old.epoch + 1))
        assert balancer.placement.epoch == old.epoch + 1
    return step < 12


def test_moving_experts_between_slots_changes_no_bit() -> None:
    jobs = [({}, EXPERTS, partial(move_at, steps)) for steps in ((), (), (2, 5, 6, 9))]
    ((fixed, again, moved),) = ranks_on_gpu(1, trained, jobs)
    assert different(fixed, again) == [], "training on this GPU does not repeat itself even without migration"
    assert different(fixed, moved) == []


# -- two ranks ---------------------------------------------------------------------------------------------------------


def gloo_all_to_all(rank: int) -> str:
    use(DEVICE)
    sent = torch.full((4,), rank + 1, device=DEVICE)
    arrived = torch.empty_like(sent)
    try:
        dist.all_to_all_single(arrived, sent)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if arrived.tolist() == [1, 1, 2, 2] else f"wrong bytes: {arrived.tolist()}"


@pytest.mark.parametrize("backend", ["gloo", NCCL], ids=["gloo", "nccl"])
def test_training_is_bit_identical_with_and_without_migration(backend: str) -> None:
    if backend == "gloo" and (refused := ranks_on_gpu(2, gloo_all_to_all, backend="gloo")[0]):
        pytest.skip(f"gloo does not dispatch tokens of a GPU: {refused}")
    for fixed, again, moved in ranks_on_gpu(2, trained, [({},), ({},), (MOVING,)], backend=backend):
        assert different(fixed, again) == [], "training does not repeat itself even without migration"
        assert moved["aborted"] == [] and moved["committed"] >= 2
        assert different(fixed, moved) == []


@pytest.mark.parametrize("transport", ["torch", "cuda_ipc", "nvshmem"])
def test_experts_that_move_beside_training_change_no_bit(transport: str) -> None:
    if why := why_not(transport):
        pytest.skip(why)
    beside = {**MOVING, "overlap": True, "migration": eplb.MigrationConfig(transport=transport)}
    for fixed, moved in ranks_on_gpu(2, trained, [({},), (beside,)]):
        assert moved["aborted"] == [] and moved["committed"] >= 1
        assert different(fixed, moved) == []


def test_replica_slots_train_over_nccl() -> None:
    for fixed, copied in ranks_on_gpu(2, trained, [({**MOVING, "replica_slots": slots},) for slots in (0, 1)]):
        assert copied["aborted"] == []
        assert copied["losses"] == pytest.approx(fixed["losses"], rel=0.05)


def copied(ranks: int, slots: dict[int, int], experts: int = EXPERTS) -> eplb.Placement:
    """A replica slot a rank; these hold these experts."""
    plain = eplb.Placement.initial(2, experts, ranks, 1)
    map_ = np.array(plain.physical_to_logical)
    map_[:, list(slots)] = list(slots.values())
    return eplb.Placement(map_, experts, ranks, plain.home)


def refreshed(waits: bool, balancer: eplb.Balancer, step: int) -> bool:
    if step == 6 and not waits:
        replicas = balancer.runtime.maps.replicas
        torch.cuda.synchronize()
        dist.barrier()
        with no_host_sync():
            replicas.refresh()
            replicas.wait_all()
    return step < 6


def test_training_by_copy_engines_is_what_it_is_by_nccl_to_the_bit_and_no_host_waits() -> None:
    """Each rank has a copy of an expert of the other."""
    if lacks := symmetric.why_not(DEVICE):
        pytest.skip(lacks)
    usual: dict[str, Any] = {"replica_slots": 1, "initial_placement": copied(2, {4: 5, 9: 1})}
    ways = [
        ({**usual, "replica_transport": w}, EXPERTS, partial(refreshed, w == "torch")) for w in ("torch", "copy_engine")
    ]
    for one, other in ranks_on_gpu(2, trained, ways):
        assert different(one, other) == []


# -- three ranks: a first call that only some make would never end -----------------------------------------------------


def test_a_copy_between_two_of_three_ranks_does_not_hang() -> None:
    """Expert 0 lives on rank 0 and is copied to rank 1; rank 2 has nothing to do with copies."""
    settings = {"replica_slots": 1, "initial_placement": copied(3, {5: 0}, 6)}
    for result in ranks_on_gpu(3, train, settings, 6):
        assert result["aborted"] == []


def connected_anew(steps: int | None, balancer: eplb.Balancer, step: int) -> bool:
    """So many steps; or with connections made anew after the first one, until some steps after that."""
    if steps is not None:
        return step < steps
    if step == 1:
        balancer.rebalancer._pause("a test wants new connections")
        plan_by(balancer, plan_shuffle)
    resumed = balancer.events.of_type(BalancingResumed)
    return not resumed or step < resumed[0].step + 5


def test_experts_migrate_after_connections_were_made_anew() -> None:
    lag = {"interval": 2, "migration": eplb.MigrationConfig(lag=1)}
    moved = ranks_on_gpu(3, train, lag, 6, partial(connected_anew, None))
    fixed = ranks_on_gpu(3, train, lag, 6, partial(connected_anew, len(moved[0]["losses"])))
    for before, after in zip(fixed, moved, strict=True):
        assert (after["committed"] >= 2, after["aborted"]) == (True, [])
        assert different(before, after) == []
