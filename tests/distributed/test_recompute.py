"""Activation checkpointing repeats forwards: each goes the way of the first, with nothing exchanged for it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import digests
from support.shuffle import wait_until_compiled
from support.training import undone
from torch.utils.checkpoint import checkpoint

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


@dataclass(frozen=True)
class Job:
    """``kind``: how forwards are repeated; ``at_once``: batches whose losses are added up before one backward."""

    kind: str = "no"
    at_once: int = 1
    replica_slots: int = 0
    damage: Callable[[], None] = nothing


def train(rank: int, job: Job) -> dict:
    model = make_model("olmoe", experts=8, layers=LAYERS)
    if job.kind in ("each layer", "nested", "each layer, reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": job.kind == "each layer, reentrant"})
    if job.kind == "each layer, reentrant":
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    balancer = training.attach(model, optimizer, interval=1, gate="always", lag=0, replica_slots=job.replica_slots)
    wait_until_compiled(balancer)
    model.train()
    calls, call = [], dist.all_to_all_single

    def recorded(*args: object, **options: object) -> object:
        calls.append(1)
        return call(*args, **options)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    losses, counts = [], []
    with undone(dist, RecomputeCache, ExpertParallelLayer):
        job.damage()
        dist.all_to_all_single = recorded
        for step in range(3):
            whole = 0.0
            for part in range(job.at_once):
                ids = batch_of(rank, job.at_once * step + part) % 12
                nested = job.kind in ("whole model", "nested")
                whole = whole + (checkpoint(loss_of, ids, use_reentrant=False) if nested else loss_of(ids))
            counts.append(len(calls))
            whole.backward()
            counts.append(len(calls))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(whole.item())
    bits = {"losses": losses, **digests(eplb.logical_state_dict(model, optimizer))}
    copies = int((balancer.placement.copy_count > 1).sum())
    balancer.close()
    return {"bits": bits, "copies": copies, "forward": counts[0], "backward": counts[1] - counts[0]}


JOBS = {
    "plain": Job(),
    "each layer": Job("each layer"),
    "whole model": Job("whole model"),
    "nested": Job("nested"),
    "reentrant": Job("each layer, reentrant"),
    "two at once": Job(at_once=2),
    "two at once, each layer": Job("each layer", at_once=2),
    "copies": Job(replica_slots=1),
    "copies, each layer": Job("each layer", replica_slots=1),
    "copies, worked out anew": Job("each layer", replica_slots=1, damage=work_everything_out_anew),
}


def train_all(rank: int) -> dict[str, dict]:
    return {name: train(rank, job) for name, job in JOBS.items()}


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
        run_ranks(2, train, Job("each layer", damage=route_otherwise_in_recompute))
