"""Events and a balancer in words: tables of 80 columns, and lines in the log for decisions and rebalances."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from eplb_runtime.balancer.gradients import norm
from eplb_runtime.balancer.gradients.norm import RangesOfSlots, squares_of_slots
from eplb_runtime.balancer.status import DecisionLine
from eplb_runtime.events import (
    BalancingPaused,
    EventLog,
    GuardFinding,
    LoadMeasured,
    RebalanceAborted,
    RebalanceCommitted,
    RebalancePlanned,
)

PLANNED = RebalancePlanned(60, 3, 4, "rebalance", "saves 5 s for 0.1 s", 1.9, 1.2, 0.01, 1.1, 5.0, 0.1)
COMMITTED = RebalanceCommitted(60, 3, "ab" * 16, 4, 3 * 2**20, 0.025)
STAYS = RebalancePlanned(120, 4, 0, "stay", "the planner is still being compiled", 0.0, 0.0, 0.0)


def log() -> EventLog:
    events = EventLog()
    events.emit(LoadMeasured(60, 50, ((1.5, 2.5), (1.0, 2.0))))
    events.emit(PLANNED)
    events.emit(COMMITTED)
    events.emit(RebalanceAborted(120, 3, "staged", "rank 2 has waited 30 s for rank 1: " + "a long story " * 20))
    events.emit(BalancingPaused(120, "connection lost"))
    events.emit(GuardFinding(130, "ranks differ in lm_head"))
    return events


def test_each_decision_and_each_rebalance_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog()
    events.called_at_once.append(DecisionLine())
    with caplog.at_level(logging.INFO, "eplb_runtime"):
        for event in log():
            events.emit(event)
        events.emit(COMMITTED)  # without a plan before it, as restoring does
        for seconds in (3, 4, 5):
            events.emit(replace(STAYS, reason=f"nothing to gain in {seconds} s"))
        events.emit(replace(STAYS, reason="the ranks wait for a checkpoint " * 5))
        costs = "would save 0.1 s, less than 1.2 x the 1 s it costs; forecast imbalance 1.900 -> 1.200, worst layer 2.5"
        events.emit(replace(STAYS, reason=f"{costs} -> 1.3, by moves in 3 of 4 layers"))
    assert [record.getMessage() for record in caplog.records] == [
        "step 60: rebalance: saves 5 s for 0.1 s, forecast imbalance 1.900 -> 1.200",
        "step 60: epoch 3: 4 experts moved, 3.0 MiB came here, 25.0 ms pause, to save 5 s for 0.1 s",
        "step 60: epoch 3: 4 experts moved, 3.0 MiB came here, 25.0 ms pause",
        "step 120: stay: nothing to gain in 3 s",
        f"step 120: stay: {'the ranks wait for a checkpoint ' * 3}the ...",
        "step 120: stay: would save 0.1 s, less than 1.2 x the 1 s it costs; forecast imbalance 1.900 -> 1.200",
    ]


# -- The squared norm of an expert does not depend on where its gradient is cut


LENGTH = 1000
CUTS = (0, 1, 63, 64, 65, 500, 704, 999, LENGTH)
CPU = torch.device("cpu")


def squares(monkeypatch: pytest.MonkeyPatch, gradients: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """By two ranks on threads, of which each has one side of each cut."""
    ranges = tuple(((0, cut), (cut, LENGTH)) for cut in cuts)
    here, given = Barrier(2), dict[int, Tensor]()

    def reduce(values: Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None) -> None:
        given[id(values)] = values.clone()
        here.wait(60)
        both = torch.stack(list(given.values()))
        here.wait(60)
        given.clear()
        values.copy_(both.sum(0) if op is torch.distributed.ReduceOp.SUM else both.amax(0))
        here.wait(60)

    def of_rank(place: int) -> Tensor:
        kept = [one[slice(*own[place])] for one, own in zip(gradients, ranges, strict=True)]
        layers = [RangesOfSlots([one if one.numel() else None for one in kept], ranges)]
        return squares_of_slots(layers, place, None, CPU)[0]  # type: ignore[arg-type]

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    with ThreadPoolExecutor(2) as ranks:
        found, other = ranks.map(of_rank, range(2))
    torch.testing.assert_close(found, other, rtol=0, atol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("chunk", [norm._CHUNK, 128])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_no_cut_changes_a_bit(monkeypatch: pytest.MonkeyPatch, chunk: int, size: float) -> None:
    monkeypatch.setattr(norm, "_CHUNK", chunk)
    gradient = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, LENGTH) * size
    found = squares(monkeypatch, gradient.expand(len(CUTS), LENGTH), CUTS)
    assert len(set(found.tolist())) == 1
    assert float(found[0]) == pytest.approx(float(gradient.double().square().sum()), rel=1e-12, abs=0)


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_what_is_not_finite_stays(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    gradient = torch.zeros(LENGTH)
    gradient[640] = value
    found = squares(monkeypatch, gradient.expand(len(CUTS), LENGTH), CUTS)
    torch.testing.assert_close(found, torch.full_like(found, value), rtol=0, atol=0, equal_nan=True)


def test_a_gradient_of_another_length_is_refused() -> None:
    layers = [RangesOfSlots([torch.ones(3)], (((0, 4), (4, 8)),))]
    with pytest.raises(RuntimeError, match="3 elements, and 4 of its expert are stepped on this rank"):
        squares_of_slots(layers, 0, None, CPU)  # type: ignore[arg-type]
