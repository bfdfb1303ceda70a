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
from support.shuffle import wait_until_compiled
from support.training import undone
from torch.utils.checkpoint import checkpoint

import eplb_runtime as eplb
from eplb_runtime.load.counter import in_recompute
from eplb_runtime.moe.dispatch.recompute import RecomputeCache
from eplb_runtime.moe.layer import ExpertParallelLayer

LAYERS = 2


def break_nothing() -> None:
    pass


def work_everything_out_anew() -> None:
    RecomputeCache.repeated = lambda self, ids: None


@dataclass(frozen=True)
class Job:
    """``kind``: how forwards are repeated; ``at_once``: batches whose losses are added up before one backward."""

    kind: str = "no"
    at_once: int = 1
    replica_slots: int = 0
    damage: Callable[[], None] = break_nothing


def train(rank: int, job: Job) -> dict:
    job.damage()
    model = make_model("olmoe", experts=8, layers=LAYERS)
    if job.kind in ("each layer", "nested", "each layer, reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": job.kind == "each layer, reentrant"})
    if job.kind == "each layer, reentrant":
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    balancer = training.attach(model, optimizer, interval=1, gate="always", lag=0, replica_slots=job.replica_slots)
    wait_until_compiled(balancer)
    model.train()
    calls = count_collectives()
    losses, forward_calls, backward_calls = [], [], []

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    for step in range(3):
        whole, before = 0.0, len(calls)
        for part in range(job.at_once):
            ids = batch_of(rank, job.at_once * step + part) % 12
            nested = job.kind in ("whole model", "nested")
            whole = whole + (checkpoint(loss_of, ids, use_reentrant=False) if nested else loss_of(ids))
        forward_calls.append(len(calls) - before)
        before = len(calls)
        whole.backward()
        backward_calls.append(len(calls) - before)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole.item())
    result = {
        "losses": losses,
        "state": eplb.logical_state_dict(model, optimizer),
        "copies": int((balancer.placement.copy_count > 1).sum()),
        "forward": forward_calls[0],
        "backward": backward_calls[0],
    }
    balancer.close()
    return result


def count_collectives() -> list[str]:
    """Grows by a name with each collective that dispatch uses."""
    calls: list[str] = []
    call = dist.all_to_all_single

    def record(*args: object, **options: object) -> object:
        calls.append("all_to_all_single")
        return call(*args, **options)

    dist.all_to_all_single = record
    return calls


def assert_same(one: list[dict], other: list[dict]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a["losses"] == b["losses"]
        assert all(torch.equal(a["state"][name], b["state"][name]) for name in a["state"])


FORWARD = 3
"""All-to-alls that a layer's forward needs when it knows what goes where: rows, router weights, results."""
FIND_OUT = 2
"""To know it: counts, and which row each choice means."""
BACKWARD = 3
"""The same backwards."""


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
Trained = dict[str, list[dict]]


def train_all(rank: int) -> dict[str, dict]:
    found = {}
    for name, job in JOBS.items():
        with undone(dist, RecomputeCache):
            found[name] = train(rank, job)
    return found


@pytest.fixture(scope="module")
def trained() -> Trained:
    """Of each job what each rank gave."""
    of_ranks = run_ranks(2, train_all)
    return {name: [of_rank[name] for of_rank in of_ranks] for name in JOBS}


def test_without_checkpointing_only_gradients_travel_in_backward(trained: Trained) -> None:
    for result in trained["plain"]:
        assert result["forward"] == LAYERS * (FIND_OUT + FORWARD)
        assert result["backward"] == LAYERS * BACKWARD


@pytest.mark.parametrize(("kind", "times"), [("each layer", 1), ("whole model", 1), ("nested", 2)])
def test_a_repeated_forward_exchanges_no_counts_and_changes_no_bit(trained: Trained, kind: str, times: int) -> None:
    found = trained[kind]
    assert_same(trained["plain"], found)
    for result in found:
        repeated = result["backward"] - LAYERS * BACKWARD
        assert repeated % FORWARD == 0, "rows, weights and results, but no counts"
        assert LAYERS * FORWARD <= repeated <= times * LAYERS * FORWARD


def test_reentrant_checkpointing_works_everything_out_anew(trained: Trained) -> None:
    assert_same(trained["plain"], trained["reentrant"])


def test_several_forwards_before_one_backward_work_it_out_anew(trained: Trained) -> None:
    found = trained["two at once, each layer"]
    assert_same(trained["two at once"], found)
    for result in found:
        # The first batch's backward comes last, when it is alone; it was not when it began.
        assert result["backward"] == 2 * LAYERS * (BACKWARD + FIND_OUT + FORWARD)


def test_copies_are_split_as_they_were(trained: Trained) -> None:
    assert trained["copies, each layer"][0]["copies"] > 0
    assert_same(trained["copies"], trained["copies, each layer"])
    assert_same(trained["copies"], trained["copies, worked out anew"])


def route_otherwise_in_recompute() -> None:
    call = ExpertParallelLayer.__call__

    def fickle(self, hidden, ids, weights):
        return call(self, hidden, ids.flip(1) if in_recompute() else ids, weights)

    ExpertParallelLayer.__call__ = fickle


def test_a_router_that_does_not_repeat_itself_is_an_error() -> None:
    with pytest.raises(AssertionError, match="RecomputeError: activation recompute chose other experts"):
        run_ranks(2, train, Job("each layer", damage=route_otherwise_in_recompute))
