"""Events and a balancer in words: tables of 80 columns, and lines in the log for decisions and rebalances."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

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
