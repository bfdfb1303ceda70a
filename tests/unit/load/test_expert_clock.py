"""The share of a step in expert work: what marks of a step add up to, and what the gate makes of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from eplb_runtime.load.clock import ASSUMED_SHARE, ExpertClock, ExpertShare, SampledStep, StepClock, median_time


class FakeClock(ExpertClock):
    """Time passes when it is told to."""

    now = 0.0

    def mark(self) -> float:
        return self.now


def run_layer(clock: FakeClock, seconds: float) -> None:
    begin = clock.mark() if clock.on else None
    clock.now += seconds
    if begin is not None:
        clock.forward_ends(begin)


def step_of(expert_seconds: float, step_seconds: float) -> SampledStep:
    return SampledStep(0.0, step_seconds, [(0.0, expert_seconds)])


def test_a_step_adds_up_forwards_and_backwards() -> None:
    clock = FakeClock()
    clock.begin_step()
    run_layer(clock, 2.0)
    clock.now += 5.0
    metadata = object()
    clock.backward_begins(metadata)
    clock.now += 3.0
    clock.backward_ends(metadata)
    clock.end_step()
    (step,) = clock.take()
    assert step.time() == (10.0, 5.0)
    assert clock.take() == (), "taken once"


def test_a_backward_pass_that_does_not_end_is_left_out() -> None:
    clock, metadata = FakeClock(), object()
    for ends in (False, True):
        clock.begin_step()
        clock.backward_ends(metadata)  # of the step before: too late
        run_layer(clock, 2.0)
        metadata = object()
        clock.backward_begins(metadata)
        clock.now += 4.0
        if ends:
            clock.backward_ends(metadata)
        clock.end_step()
    assert [step.time()[1] for step in clock.take()] == [2.0, 6.0]  # type: ignore[index]


def test_an_odd_step_does_not_count() -> None:
    """A checkpoint was written in the last one; and the sum of all would be another share."""
    steps = [step_of(4.0, 10.0), step_of(3.0, 10.0), step_of(4.0, 100.0)]
    assert median_time(steps) == (10.0, 3.0)
    assert median_time([]) is None and median_time([step_of(0.0, 0.0)]) is None


class Event:
    """An event that a device reaches when it is told to."""

    def __init__(self, seconds: float, reached: bool = True) -> None:
        self.seconds, self.reached = seconds, reached

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.reached and end.reached, "it would raise"
        return 1e3 * (end.seconds - self.seconds)

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for the device")


def test_a_step_that_the_device_has_not_reached_is_not_read() -> None:
    begin, end, late = Event(0.0), Event(6.0), Event(6.0, reached=False)

    def step(end: Any, *span: Any) -> SampledStep:
        return SampledStep(begin, end, [span])  # type: ignore[arg-type, list-item]

    assert step(end, Event(1.0), Event(4.0)).time() == (6.0, 3.0)
    assert step(late, Event(1.0), Event(4.0)).time() is None
    assert step(end, Event(1.0), late).time() is None and median_time([step(end, Event(1.0), late)]) is None


def test_the_share_is_assumed_until_it_is_measured_and_a_given_one_stays() -> None:
    share = ExpertShare.before_measuring(None)
    assert share == ExpertShare(ASSUMED_SHARE, "assumed")
    assert share.updated(0.0, 0.0) is share, "nothing was measured"
    assert share.updated(3.0, 8.0) == ExpertShare(0.375, "measured")
    assert share.updated(3.0, 8.0).updated(0.0, 0.0) == ExpertShare(0.375, "measured"), "the last one stays"
    given = ExpertShare.before_measuring(0.2)
    assert given.updated(3.0, 8.0) == ExpertShare(0.2, "given")


def test_a_plan_saves_the_share_times_what_imbalance_falls_by() -> None:
    """Of a step of 10 s, 4 s are expert work at an imbalance of 2: with 1.5 it is 3 s, with an even load 2 s."""
    even = ExpertShare(0.4, "measured").even(2.0)
    assert 10.0 * even * (2.0 - 1.5) == pytest.approx(10.0 * 0.4 * (1 - 1.5 / 2.0)) == pytest.approx(1.0)
    assert ExpertShare(0.4, "measured").even(0.0) == 0.4, "no load: as it is"


def test_a_share_of_before_a_rebalance_is_brought_to_the_imbalance_of_now() -> None:
    """8 of 10 s at imbalance 4, so 2 s with even load; at 2 a step takes 2 + 4 s, and at 4 again 10 s."""
    share = ExpertShare(0.8, "measured").measured_at(4.0)
    assert share.even(2.0) == pytest.approx(2.0 / 6.0) and share.even(4.0) == pytest.approx(0.2)
    assert ExpertShare(0.8, "given").measured_at(4.0).even(2.0) == pytest.approx(0.4), "a given one is that of now"
    assert share.updated(3.0, 6.0).at == 0.0, "a new measurement has another imbalance"


# -- How long a step takes, where rollouts lie between steps and where not


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
