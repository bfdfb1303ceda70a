"""Every group is met by all its ranks before some of them talk alone on it: else NCCL waits for ever.

Two ranks cannot show it, since each is everybody's peer: here three ranks have a copy between two of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from recording import first_calls_not_made_by_all, record
from support import training
from support.shuffle import plan_by, plan_shuffle

import eplb_runtime as eplb
from eplb_runtime.distributed.process_groups import ProcessGroups
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.events import BalancingResumed, RebalanceAborted, RebalanceCommitted

EXPERTS, RANKS = 6, 3


def one_copy() -> eplb.Placement:
    """Expert 0 lives on rank 0 and is copied to rank 1; rank 2 has nothing to do with copies."""
    plain = eplb.Placement.initial(2, EXPERTS, RANKS, 1)
    map_ = np.array(plain.physical_to_logical)
    map_[:, plain.slots_per_rank + plain.homes_per_rank] = 0
    return eplb.Placement(map_, EXPERTS, RANKS, plain.home)


def connecting_anew_after_the_first(balancer: eplb.Balancer, steps: int) -> Iterator[int]:
    """Steps: one, then some until the ranks have made their connections anew, then as many more as asked for."""
    yield 0
    balancer.rebalancer._pause("a test wants it")
    plan_by(balancer, plan_shuffle)
    step, resumed = 1, balancer.events.of_type(BalancingResumed)
    while not resumed:
        yield step
        step, resumed = step + 1, balancer.events.of_type(BalancingResumed)
    yield from range(step, resumed[0].step + steps)


def train(rank: int) -> dict:
    calls = record()
    model = make_model("olmoe", experts=EXPERTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = training.attach(
        model, optimizer, interval=2, replica_slots=1, initial_placement=one_copy(), policy="static", lag=1
    )
    model.train()
    for step in connecting_anew_after_the_first(balancer, 6):
        ids = batch_of(rank, step)
        model(input_ids=ids, labels=ids).loss.backward()
        balancer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    events = balancer.events
    result = {
        "calls": calls,
        "committed": len(events.of_type(RebalanceCommitted)),
        "aborted": [event.cause for event in events.of_type(RebalanceAborted)],
    }
    balancer.close()
    return result


def test_the_first_call_on_every_group_is_made_by_all_its_ranks() -> None:
    results = run_ranks(RANKS, train)
    calls = [result["calls"] for result in results]
    for result in results:
        assert (result["committed"] > 0, result["aborted"]) == (True, [])
    groups = {call.group: range(RANKS) for rank in range(RANKS) for call in calls[rank]}
    assert first_calls_not_made_by_all(calls, groups) == []
    # It is a case that could go wrong: rank 2 alone never sends or receives on the group of copies at first.
    alone = [[c.operation for c in calls[rank] if c.purpose == "replicas"] for rank in range(RANKS)]
    assert "batch_isend_irecv" in alone[0] and "batch_isend_irecv" in alone[1]
    migrations = {call.group for call in calls[0] if call.purpose == "migration"}
    assert len(migrations) >= 2, "one before and one after the ranks made their connections anew"


def rebuild_often(rank: int) -> list[tuple[int, int]]:
    groups = ProcessGroups(Ranks(), [1], torch.device("cpu"), 20.0)
    counts = []
    for attempt in range(1, 7):
        groups.give_back(*groups.take_over(groups.make_again(attempt, 20.0)))
        dist.barrier(group=groups.control)
        counts.append((len(list(Path("/proc/self/task").iterdir())), len(os.listdir("/proc/self/fd"))))
        dist.barrier(group=groups.control)
    groups.close()
    counts.append((threading.active_count(), 0))
    return counts


def test_connections_made_anew_leave_nothing_behind() -> None:
    for counts in run_ranks(RANKS, rebuild_often):
        assert counts[5] == counts[0], f"threads and descriptors after each: {counts}"


def part_of_the_world(rank: int) -> dict | None:
    if rank == 2:
        return None
    model = make_model("olmoe", experts=EXPERTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    eplb.attach(make_model("olmoe", experts=EXPERTS), ranks=Ranks(job=(0, 1))).close()
    balancer = training.attach(model, optimizer, ranks=Ranks(job=(0, 1)), interval=2, policy="static", lag=1)
    model.train()
    losses = [
        training.step(model, optimizer, batch_of(rank, step % 4))
        for step in connecting_anew_after_the_first(balancer, 5)
    ]
    result = {"losses": losses, "committed": len(balancer.events.of_type(RebalanceCommitted))}
    balancer.close()
    return result


def whole_world(rank: int) -> dict:
    result = part_of_the_world(rank)
    assert result is not None
    return result


def test_a_job_may_be_a_part_of_the_world_and_connect_again() -> None:
    *part, outsider = run_ranks(3, part_of_the_world)
    assert outsider is None
    whole = run_ranks(2, whole_world)
    assert all(result["committed"] >= 2 for result in [*part, *whole])
    for one, other in zip(part, whole, strict=True):
        # How many steps it takes until the ranks have connected is a matter of luck.
        assert all(a == b for a, b in zip(one["losses"], other["losses"], strict=False))
