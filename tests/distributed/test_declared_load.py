"""A load that is declared before it comes is planned for, once, whoever of the ranks declares it."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.job import Job, Run
from support.ranks import run_ranks
from support.seen import assert_refused

import eplb_runtime as eplb
from eplb_runtime.events import RebalanceAborted, RebalancePlanned

RANKS, LAYERS, EXPERTS = 2, 2, 8
SKEWED = np.array([[100.0, 100, 100, 100, 1, 1, 1, 1], [1, 100, 1, 100, 1, 1, 1, 1]])
"""Layer 0: all heavy experts on rank 0; layer 1: two of them there."""


def started(rank: int, **settings: Any) -> Run:
    return Run(rank, Job(planner=eplb.plan, settings={"interval": 2, "lag": 1, **settings})).attach()


def heavy_on_rank_0(job: Run) -> list[int]:
    home_rank = job.balancer.placement.home_rank
    return [int((home_rank[layer, SKEWED[layer] == 100] == 0).sum()) for layer in range(LAYERS)]


PADDING = np.full((5, LAYERS, 1), -1)


def chosen_by_tokens() -> np.ndarray:
    """int64 ``[N, L, 1]``: one choice of each token, -1 where a layer has fewer tokens than another."""
    rows = [np.repeat(np.arange(EXPERTS), row.astype(int)) for row in SKEWED]
    ids = np.full((max(map(len, rows)), LAYERS, 1), -1)
    for layer, row in enumerate(rows):
        ids[: len(row), layer, 0] = row
    return ids


def declare_in_many_ways(rank: int) -> list[tuple[list[int], str]]:
    """Where heavy experts are then, and the placement."""
    placements = []
    for declared in (
        SKEWED,  # each rank the whole: only proportions matter
        torch.from_numpy(SKEWED)[None] if rank == 1 else None,
        np.where(np.arange(EXPERTS) % RANKS == rank, SKEWED, 0.0),  # each rank what its own batches will choose
        chosen_by_tokens() if rank == 0 else PADDING,
    ):
        job = started(rank)
        if declared is not None:
            job.balancer.declare(declared)
        assert heavy_on_rank_0(job) == [4, 2] and job.balancer.rebalance()
        placements.append((heavy_on_rank_0(job), job.balancer.placement.digest()))
        job.balancer.close()
    with pytest.raises(RuntimeError, match="closed"):
        job.balancer.declare(SKEWED)
    padded = started(rank, interval=None, lag=1, replica_slots=1)
    padded.balancer.declare(PADDING)
    assert not padded.balancer.rebalance()
    (aborted,) = padded.balancer.events.of_type(RebalanceAborted)
    assert aborted.cause == "the ranks declared no token: all of it is padding"
    padded.balancer.declare(SKEWED)
    assert padded.balancer.rebalance() and (padded.balancer.placement.replicas_LRK >= 0).any()
    padded.balancer.close()
    static = started(rank, policy="static")
    with pytest.raises(RuntimeError, match="never moves"):
        static.balancer.declare(SKEWED)
    static.balancer.close()
    return placements


def test_any_rank_may_declare_and_all_go_by_it() -> None:
    for placements in run_ranks(RANKS, declare_in_many_ways):
        assert placements == [([2, 1], placements[0][1])] * 4


def declare_for_one_decision(rank: int) -> None:
    job, reported = started(rank), []
    job.train(1)
    job.balancer.declare(SKEWED)
    job.train(2)
    assert heavy_on_rank_0(job) == [2, 1]
    job.train(4)
    first, *later = (event.imbalance_before for event in job.balancer.events.of_type(RebalancePlanned))
    assert first > 1.4 and later
    assert min(later) > 1.001, "what was declared is balanced by now, what is counted is not"
    guard = job.balancer.guard
    guard.sample = lambda: True  # type: ignore[assignment, return-value]
    guard.compare = lambda sample, group: "something is wrong"  # type: ignore[method-assign]
    guard.report = reported.append  # type: ignore[method-assign, assignment]
    job.balancer.declare(np.broadcast_to(SKEWED, (1 + rank, LAYERS, EXPERTS)))
    job.train(3)
    (dropped,) = job.balancer.events.of_type(RebalanceAborted)
    assert dropped.cause == "ranks declared loads of 1 and of 2 micro-batches: declare as many on each"
    assert reported == ["something is wrong"], "what the guard finds is said though the decision failed"
    job.balancer.close()


@pytest.mark.long
def test_it_counts_for_the_next_decision_alone_and_needs_as_many_windows_on_each_rank() -> None:
    run_ranks(RANKS, declare_for_one_decision)


def keys_of_the_store(rank: int) -> None:
    """Those in the launcher's store after each declaration, and after each step with one."""
    store = dist.distributed_c10d._get_default_store()
    job = started(rank, interval=1, lag=0)
    own = job.balancer.runtime.groups.store

    def keys() -> int:
        own.word_of("asked after all before it")
        dist.barrier()
        number = store.num_keys()
        dist.barrier()
        return number

    job.train(3)
    moved, called, stepped = [], [], []
    for number in range(6):
        job.balancer.declare(np.roll(SKEWED, number, axis=1))
        moved.append(job.balancer.rebalance())
        called.append(keys())
    for _ in range(6):
        job.train(2)
        stepped.append(keys())
    job.balancer.close()
    assert sum(moved) >= 3
    assert all(max(numbers[1:]) - min(numbers[1:]) <= 3 for numbers in (called, stepped))


@pytest.mark.long
def test_decisions_and_migrations_leave_no_keys_in_the_launchers_store() -> None:
    """But those of the last decision and its migration."""
    run_ranks(RANKS, keys_of_the_store)


def refuse(rank: int) -> None:
    job = started(rank)
    short = partial(job.balancer.declare, SKEWED[:1])
    assert_refused({"[2, 8]": short, "(1, 8)": short, "give": short})
    for bad in (SKEWED[:, :4], -SKEWED, SKEWED * np.nan, SKEWED * 0, "tokens", [[1.0], [2.0, 3.0]]):
        assert_refused({"give": lambda bad=bad: job.balancer.declare(bad)})
    job.balancer.close()


def test_what_is_no_load_is_refused_in_one_line() -> None:
    run_ranks(RANKS, refuse)
