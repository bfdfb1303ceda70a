"""How long a step takes, where rollouts lie between steps and where not."""

from __future__ import annotations

import time

import pytest

from eplb_runtime.load.clock import StepClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only entry."""
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    return clock


def two_rounds(now: list[float], begins: bool) -> list[float]:
    """A rollout of 50 s and a pause of 7 s lie before each step of 2 s with two micro-batches."""
    clock, seconds = StepClock(0.0), []
    for _ in range(3):
        now[0] += 50.0
        clock.exclude(7.0)
        now[0] += 7.0
        for _ in range(2):
            if begins:
                clock.begin()
            now[0] += 1.0
        clock.tick()
        seconds.append(clock.step_seconds)
    return seconds


def test_a_step_begins_with_its_first_forward_where_rollouts_lie_between_steps(now: list[float]) -> None:
    assert two_rounds(now, begins=True) == pytest.approx([0.0, 2.0, 2.0])
    assert two_rounds(now, begins=False) == pytest.approx([0.0, 52.0, 52.0]), "control"


def test_pauses_inside_a_step_that_has_begun_are_left_out(now: list[float]) -> None:
    clock = StepClock(0.0)
    clock.tick()
    now[0] += 9.0
    clock.begin()
    now[0] += 3.0
    clock.exclude(1.0)
    clock.tick()
    assert clock.step_seconds == pytest.approx(2.0)
