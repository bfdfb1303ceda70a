"""Every group is met by all its ranks before some of them talk alone on it: else NCCL waits for ever.

Two ranks cannot show it, since each is everybody's peer: here three ranks have a copy between two of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from support.job import Job, Run
from support.ranks import run_ranks
from support.recording import first_calls_not_made_by_all, record
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


SGD = partial(torch.optim.SGD, lr=0.1)
JOB = Job(experts=EXPERTS, optimizer=SGD, settings={"interval": 2, "lag": 1})


def calls_of(rank: int) -> list:
    calls, job = record(), Run(rank, replace(JOB, clip=1.0))
    job.attach(replica_slots=1, initial_placement=one_copy())
    for _ in connecting_anew_after_the_first(job.balancer, 6):
        job.step()
    assert job.balancer.events.of_type(RebalanceCommitted) and not job.balancer.events.of_type(RebalanceAborted)
    job.balancer.close()
    return calls


def test_the_first_call_on_every_group_is_made_by_all_its_ranks() -> None:
    calls = run_ranks(RANKS, calls_of)
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
    job = Run(rank, JOB)
    eplb.attach(Run(rank, JOB).model, ranks=Ranks(job=(0, 1))).close()
    job.attach(ranks=Ranks(job=(0, 1)))
    for _ in connecting_anew_after_the_first(job.balancer, 5):
        job.step()
    assert len(job.balancer.events.of_type(RebalanceCommitted)) >= 2
    job.balancer.close()
    return job.losses


def test_a_job_may_be_a_part_of_the_world_and_connect_again() -> None:
    *part, outsider = run_ranks(3, part_of_the_world)
    assert outsider is None
    for one, other in zip(part, run_ranks(2, part_of_the_world), strict=True):
        # How many steps it takes until the ranks have connected is a matter of luck.
        assert all(a == b for a, b in zip(one, other, strict=False))
