"""The share of a step in expert work is measured in a few steps, agreed on by all ranks, shown and recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training

from eplb_runtime.events import LoadMeasured
from eplb_runtime.load.expert_clock import ExpertClock
from eplb_runtime.load.series import read_series
from eplb_runtime.moe.dispatch.base import _Dispatch
from eplb_runtime.moe.experts.compute import LocalExperts

INTERVAL, STEPS, LAYERS = 8, 16, 2
FORWARD, BACKWARD = 1.0, 2.0
"""Seconds of a layer's expert work; everything else in a step takes REST."""
REST = {0: 14.0, 1: 34.0}


class FakeTime:
    """Passes where expert work runs, and between."""

    def __init__(self) -> None:
        self.now = 0.0
        self.marks = 0

    def mark(self, clock: ExpertClock) -> float:
        self.marks += 1
        return self.now

    def install(self) -> None:
        compute, combine_gradients = LocalExperts.__call__, _Dispatch.backward

        def slow(*arguments: Any) -> torch.Tensor:
            self.now += FORWARD
            return compute(*arguments)

        def slow_backward(*arguments: Any) -> Any:
            self.now += BACKWARD
            return combine_gradients(*arguments)

        ExpertClock.mark = lambda clock: self.mark(clock)  # type: ignore[method-assign]
        LocalExperts.__call__ = slow  # type: ignore[method-assign]
        _Dispatch.backward = staticmethod(slow_backward)  # type: ignore[method-assign]


def train(
    rank: int, run: str | None, options: dict[str, Any], checkpointing: bool = False, rollouts: bool = False
) -> dict[str, Any]:
    time = FakeTime()
    time.install()
    model = make_model("olmoe")
    assert len(model.model.layers) == LAYERS
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    interval = None if rollouts else INTERVAL
    balancer = training.attach(model, optimizer, interval=interval, policy="static", run=run, **options)
    clock = balancer.runtime.expert_clock
    model.train()
    sampled, marked = [], []
    for step in range(STEPS):
        sampled += [step] if clock.on else []
        marks = time.marks
        ids = batch_of(rank, step)
        if rollouts:
            with torch.no_grad():
                model.eval()(input_ids=ids)
            model.train()
            time.now += 100.0
        model(input_ids=ids, labels=ids).loss.backward()
        time.now += REST[rank]
        marked += [step] if time.marks > marks else []
        optimizer.step()
        optimizer.zero_grad()
    balancer.rebalance()
    shares = [(event.moe_share, event.moe_share_source) for event in balancer.events.of_type(LoadMeasured)]
    balancer.close()
    return {"sampled": sampled, "marked": marked, "shares": shares}


def test_the_share_is_what_the_clock_says_on_every_rank(tmp_path: Path) -> None:
    """6 s of expert work in steps of 20 s and of 40 s: of 60 s, 12 s."""
    run = str(tmp_path / "run")
    found = run_ranks(2, train, run, {})
    for of_rank in found:
        assert of_rank["marked"] == of_rank["sampled"], "nothing is marked in other steps"
        assert 2 <= len(of_rank["sampled"]) <= 3 and set(of_rank["sampled"]) <= {4, 5, 6}
        assert of_rank["shares"] == [(pytest.approx(0.2), "measured")] * len(of_rank["shares"])
        assert len(of_rank["shares"]) >= 2, "the second decision keeps the share"
    job = read_series(Path(run))[2]
    assert job.expert_seconds > 0, "the run's record has it, for assess"


def test_forwards_that_are_repeated_are_expert_work() -> None:
    """Activation checkpointing: 2 s more of each step on each rank, 16 of 64 s."""
    found = run_ranks(2, train, None, {}, True)
    for of_rank in found:
        assert of_rank["shares"][0] == (pytest.approx(16 / 64), "measured")


def test_rollouts_between_steps_are_no_part_of_a_step() -> None:
    """Without an interval: the three steps after a decision, each from its first forward in training."""
    found = run_ranks(2, train, None, {}, False, True)
    for of_rank in found:
        assert of_rank["sampled"] == [1, 2, 3], "the first begins ahead of the first step's end"
        assert of_rank["shares"] == [(pytest.approx(0.2), "measured")]
