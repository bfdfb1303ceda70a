"""Every group is met by all its ranks before some of them talk alone on it: else NCCL waits for ever.

Two ranks cannot show it, since each is everybody's peer: here three ranks have a copy between two of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from recording import first_calls_not_made_by_all, record
from support import training
from support.shuffle import plan_by, plan_shuffle

import eplb_runtime as eplb
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


def train(rank: int) -> list:
    calls, settings = record(), {"replica_slots": 1, "initial_placement": one_copy()}
    model = make_model("olmoe", experts=EXPERTS).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = training.attach(model, optimizer, interval=2, policy="static", lag=1, **settings)
    for step in connecting_anew_after_the_first(balancer, 6):
        ids = batch_of(rank, step)
        model(input_ids=ids, labels=ids).loss.backward()
        balancer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert balancer.events.of_type(RebalanceCommitted) and not balancer.events.of_type(RebalanceAborted)
    balancer.close()
    return calls


def test_the_first_call_on_every_group_is_made_by_all_its_ranks() -> None:
    calls = run_ranks(RANKS, train)
    groups = {call.group: range(RANKS) for rank in range(RANKS) for call in calls[rank]}
    assert first_calls_not_made_by_all(calls, groups) == []
    # It is a case that could go wrong: rank 2 alone never sends or receives on the group of copies at first.
    alone = [[c.operation for c in calls[rank] if c.purpose == "replicas"] for rank in range(RANKS)]
    assert "batch_isend_irecv" in alone[0] and "batch_isend_irecv" in alone[1]
    migrations = {call.group for call in calls[0] if call.purpose == "migration"}
    assert len(migrations) >= 2, "one before and one after the ranks made their connections anew"


def part_of_the_world(rank: int) -> list[float] | None:
    if rank == 2:
        return None
    model = make_model("olmoe", experts=EXPERTS).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    eplb.attach(make_model("olmoe", experts=EXPERTS), ranks=Ranks(job=(0, 1))).close()
    balancer = training.attach(model, optimizer, ranks=Ranks(job=(0, 1)), interval=2, policy="static", lag=1)
    losses = [
        training.step(model, optimizer, batch_of(rank, step % 4))
        for step in connecting_anew_after_the_first(balancer, 5)
    ]
    assert len(balancer.events.of_type(RebalanceCommitted)) >= 2
    balancer.close()
    return losses


def test_a_job_may_be_a_part_of_the_world_and_connect_again() -> None:
    *part, outsider = run_ranks(3, part_of_the_world)
    assert outsider is None
    for one, other in zip(part, run_ranks(2, part_of_the_world), strict=True):
        # How many steps it takes until the ranks have connected is a matter of luck.
        assert all(a == b for a, b in zip(one, other, strict=False))
