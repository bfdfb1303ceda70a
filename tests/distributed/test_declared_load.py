"""A load that is declared before it comes is planned for, once, whoever of the ranks declares it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training

from eplb_runtime.events import RebalanceAborted, RebalancePlanned
from eplb_runtime.load.declared import DeclaredLoadError

RANKS, LAYERS, EXPERTS = 2, 2, 8
SKEWED = np.array([[100.0, 100, 100, 100, 1, 1, 1, 1], [1, 100, 1, 100, 1, 1, 1, 1]])
"""Layer 0: all heavy experts on rank 0; layer 1: two of them there."""


class Job:
    def __init__(self, rank: int, **settings: Any) -> None:
        self.rank, self.steps = rank, 0
        self.model = make_model("olmoe", experts=EXPERTS, layers=LAYERS)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.balancer = training.attach(self.model, self.optimizer, **{"interval": 2, "gate": "always", **settings})
        self.model.train()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            training.step(self.model, self.optimizer, batch_of(self.rank, self.steps))
            self.steps += 1

    def heavy_on_rank_0(self) -> list[int]:
        home_rank = self.balancer.placement.home_rank
        return [int((home_rank[layer, SKEWED[layer] == 100] == 0).sum()) for layer in range(LAYERS)]


def chosen_by_tokens() -> np.ndarray:
    """int64 ``[N, L, 1]``: one choice of each token, -1 where a layer has fewer tokens than another."""
    rows = [np.repeat(np.arange(EXPERTS), row.astype(int)) for row in SKEWED]
    ids = np.full((max(map(len, rows)), LAYERS, 1), -1)
    for layer, row in enumerate(rows):
        ids[: len(row), layer, 0] = row
    return ids


def declare_in_many_ways(rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = {"before": None, "placements": []}
    for declared in (
        SKEWED,  # each rank the whole: only proportions matter
        SKEWED if rank == 0 else None,
        torch.from_numpy(SKEWED)[None] if rank == 1 else None,
        np.where(np.arange(EXPERTS) % RANKS == rank, SKEWED, 0.0),  # each rank what its own batches will choose
        chosen_by_tokens() if rank == 0 else np.full((5, LAYERS, 1), -1),  # rank 1 has padding alone
    ):
        job = Job(rank)
        if declared is not None:
            job.balancer.declare(declared)
        seen["before"] = job.heavy_on_rank_0()
        seen["moved"] = job.balancer.rebalance()
        seen["placements"].append((job.heavy_on_rank_0(), job.balancer.placement.digest()))
        job.balancer.close()
    with pytest.raises(RuntimeError, match="closed"):
        job.balancer.declare(SKEWED)
    padded = Job(rank, interval=None, lag=1)
    padded.balancer.declare(np.full((5, LAYERS, 1), -1))
    seen["padding"] = padded.balancer.rebalance()
    seen["padding said"] = [event.cause for event in padded.balancer.events if isinstance(event, RebalanceAborted)]
    padded.balancer.close()
    waits = Job(rank, replica_slots=1)
    waits.balancer.declare(SKEWED)
    seen["replicas"] = waits.balancer.rebalance() and bool((waits.balancer.placement.replicas_LRK >= 0).any())
    waits.balancer.close()
    static = Job(rank, policy="static")
    with pytest.raises(RuntimeError, match="never moves"):
        static.balancer.declare(SKEWED)
    static.balancer.close()
    return seen


def test_any_rank_may_declare_and_all_go_by_it() -> None:
    for seen in run_ranks(RANKS, declare_in_many_ways):
        assert seen["before"] == [4, 2] and seen["moved"]
        assert seen["replicas"]
        assert {tuple(heavy) for heavy, _ in seen["placements"]} == {(2, 1)}
        assert len({digest for _, digest in seen["placements"]}) == 1
        assert not seen["padding"] and seen["padding said"] == ["the ranks declared no token: all of it is padding"]


def guard_that_finds(job: Job, finding: str) -> list[str]:
    """What is reported of it from here on."""
    guard, reported = job.balancer.guard, []
    guard.sample = lambda: True  # type: ignore[assignment, return-value]
    guard.compare = lambda sample, group: finding  # type: ignore[method-assign]
    guard.report = reported.append  # type: ignore[method-assign, assignment]
    return reported


def declare_for_one_decision(rank: int) -> dict[str, Any]:
    job = Job(rank)
    job.train(1)
    job.balancer.declare(SKEWED)
    job.train(2)
    declared = job.heavy_on_rank_0()
    job.train(4)
    told = [event.imbalance_before for event in job.balancer.events if isinstance(event, RebalancePlanned)]
    reported = guard_that_finds(job, "something is wrong")
    job.balancer.declare(np.broadcast_to(SKEWED, (1 + rank, LAYERS, EXPERTS)))
    job.train(3)
    dropped = [event.cause for event in job.balancer.events if isinstance(event, RebalanceAborted)]
    job.balancer.close()
    return {"declared": declared, "told": told, "dropped": dropped, "reported": reported}


def test_it_counts_for_the_next_decision_alone_and_needs_as_many_windows_on_each_rank() -> None:
    for seen in run_ranks(RANKS, declare_for_one_decision):
        assert seen["declared"] == [2, 1]
        first, *later = seen["told"]
        assert first > 1.4 and later
        assert min(later) > 1.001, "what was declared is balanced by now, what is counted is not"
        assert seen["dropped"] == ["ranks declared loads of 1 and of 2 micro-batches: declare as many on each"]
        assert seen["reported"] == ["something is wrong"], "what the guard finds is said though the decision failed"


def keys_of_the_store(rank: int, forgets: bool) -> tuple[list[bool], list[int], list[int]]:
    """Which declarations moved experts; and keys in the launcher's store after each, and after each step with one."""
    store = dist.distributed_c10d._get_default_store()
    job = Job(rank, interval=1, lag=0)
    own = job.balancer.runtime.groups.store
    if not forgets:
        own.forget = lambda number: None

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
    return moved, called, stepped


def test_decisions_and_migrations_leave_no_keys_in_the_launchers_store() -> None:
    for moved, called, stepped in run_ranks(RANKS, keys_of_the_store, True):
        assert sum(moved) >= 3
        assert max(called[1:]) - min(called[1:]) <= 3, "those of the last decision and its migration alone"
        assert max(stepped[1:]) - min(stepped[1:]) <= 3
    for _, called, stepped in run_ranks(RANKS, keys_of_the_store, False):
        assert called[-1] - called[1] >= 6 and stepped[-1] - stepped[1] >= 6, "control: they would"


def refuse(rank: int) -> list[str]:
    job = Job(rank)
    said = []
    for bad in (SKEWED[:1], SKEWED[:, :4], -SKEWED, SKEWED * np.nan, SKEWED * 0, "tokens", [[1.0], [2.0, 3.0]]):
        with pytest.raises(DeclaredLoadError) as refusal:
            job.balancer.declare(bad)
        said.append(str(refusal.value))
    job.balancer.close()
    return said


def test_what_is_no_load_is_refused_in_one_line() -> None:
    for said in run_ranks(RANKS, refuse):
        assert all("\n" not in line and ("give" in line) for line in said)
        assert "[2, 8]" in said[0] and "(1, 8)" in said[0]
