"""Activation checkpointing repeats forwards: each goes the way of the first, with nothing exchanged for it again."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from support.job import Job, Run, changing
from support.ranks import run_ranks
from support.training import undone

import eplb_runtime as eplb
from eplb_runtime.load.counter import in_recompute
from eplb_runtime.moe.dispatch.recompute import RecomputeCache
from eplb_runtime.moe.layer import ExpertParallelLayer

LAYERS = 2
FORWARD = 3
"""All-to-alls that a layer's forward needs when it knows what goes where: rows, router weights, results."""
FIND_OUT = 2
"""To know it: counts, and which row each choice means."""
BACKWARD = 3
"""The same backwards."""


def nothing() -> None:
    pass


def work_everything_out_anew() -> None:
    RecomputeCache.repeated = lambda self, ids: None


def route_otherwise_in_recompute() -> None:
    call = ExpertParallelLayer.__call__

    def fickle(self, hidden, ids, weights):
        return call(self, hidden, ids.flip(1) if in_recompute() else ids, weights)

    ExpertParallelLayer.__call__ = fickle


def counted(rank: int, job: Job, damage: Callable[[], None] = nothing) -> dict[str, Any]:
    run, calls, counts, call = Run(rank, job).attach(), [], [], dist.all_to_all_single

    def recorded(*args: object, **options: object) -> object:
        calls.append(1)
        return call(*args, **options)

    with undone(dist, RecomputeCache, ExpertParallelLayer):
        damage()
        dist.all_to_all_single = recorded
        for _ in range(job.steps):
            loss = run.forward()
            counts.append(len(calls))
            run.backward(loss)
            counts.append(len(calls))
            run.update()
            run.losses.append(loss.item())
    copies = int((run.balancer.placement.copy_count > 1).sum())
    return {"bits": run.end().bits, "copies": copies, "forward": counts[0], "backward": counts[1] - counts[0]}


job = partial(Job, layers=LAYERS, planner=eplb.plan, batches=changing)
COPIES = {"replica_slots": 1}
JOBS = {
    "plain": job(),
    "each layer": job(recompute="layers"),
    "whole model": job(recompute="model"),
    "nested": job(recompute="nested"),
    "reentrant": job(recompute="reentrant"),
    "two at once": job(at_once=2),
    "two at once, each layer": job(recompute="layers", at_once=2),
    "copies": job(settings=COPIES),
    "copies, each layer": job(recompute="layers", settings=COPIES),
    "copies, worked out anew": job(recompute="layers", settings=COPIES),
}


def train_all(rank: int) -> dict[str, dict]:
    damage = {"copies, worked out anew": work_everything_out_anew}
    return {name: counted(rank, job, damage.get(name, nothing)) for name, job in JOBS.items()}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, dict]]:
    return run_ranks(2, train_all)


def test_a_repeated_forward_exchanges_no_counts(trained: list[dict[str, dict]]) -> None:
    for of_rank in trained:
        assert of_rank["plain"]["forward"] == LAYERS * (FIND_OUT + FORWARD)
        assert of_rank["plain"]["backward"] == LAYERS * BACKWARD, "only gradients travel"
        for kind, times in {"each layer": 1, "whole model": 1, "nested": 2}.items():
            repeated = of_rank[kind]["backward"] - LAYERS * BACKWARD
            assert repeated % FORWARD == 0, "rows, weights and results, but no counts"
            assert LAYERS * FORWARD <= repeated <= times * LAYERS * FORWARD
        # Of two forwards before one backward the first's comes last, when it is alone; it was not when it began.
        assert of_rank["two at once, each layer"]["backward"] == 2 * LAYERS * (BACKWARD + FIND_OUT + FORWARD)


@pytest.mark.parametrize("name", JOBS)
def test_no_bit_changes_and_copies_are_split_as_they_were(trained: list[dict[str, dict]], name: str) -> None:
    plain = next(way for way in ("two at once", "copies", "plain") if name.startswith(way) or way == "plain")
    for of_rank in trained:
        assert of_rank[name]["bits"] == of_rank[plain]["bits"]
        assert bool(of_rank[name]["copies"]) == (plain == "copies")


def test_a_router_that_does_not_repeat_itself_is_an_error() -> None:
    with pytest.raises(AssertionError, match="RecomputeError: activation recompute chose other experts"):
        run_ranks(2, counted, JOBS["each layer"], route_otherwise_in_recompute)
