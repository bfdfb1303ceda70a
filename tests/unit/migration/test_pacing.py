"""As many rounds as can be there in time travel beside a step, by brute force over all subsets."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eplb_runtime.migration.pacing import Pace, next_batch
from eplb_runtime.migration.schedule import Round

MIB = 1 << 20


def round_of(number: int, layer: int) -> Round:
    return Round(number, np.zeros((0, 4), dtype=np.int64), (layer,), (layer,))


def most_in_time(jobs: list[tuple[int, int]]) -> int:
    """The largest number of ``(microseconds, deadline)`` that are all in time, one after another."""
    for count in range(len(jobs), 0, -1):
        for chosen in combinations(jobs, count):
            by_deadline = sorted(chosen, key=lambda job: job[1])
            if all(end <= job[1] for end, job in zip(np.cumsum([j[0] for j in by_deadline]), by_deadline, strict=True)):
                return count
    return 0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=7))
def test_the_largest_number_that_comes_in_time_travels(jobs: list[tuple[int, int]]) -> None:
    rounds = {layer: [round_of(layer, layer)] for layer in range(len(jobs))}
    nbytes = {layer: size * MIB for layer, (size, _) in enumerate(jobs)}
    pace = Pace(tuple(deadline for _, deadline in jobs), us_per_mib=1)
    batch = next_batch(rounds, nbytes, {}, pace, in_flight_bytes=1000 * MIB)
    most = most_in_time(jobs)
    assert batch.waited_for == (most == 0)
    assert len(batch.rounds) == max(most, 1)
    if most:
        end = 0
        for round_ in batch.rounds:
            end += jobs[round_.number][0]
            assert end <= jobs[round_.number][1], "in the order in which they travel, each is in time"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(9, 20))
def test_no_more_bytes_than_a_rank_may_receive_in_a_step(sizes: list[int], most: int) -> None:
    rounds = {layer: [round_of(layer, layer)] for layer in range(len(sizes))}
    nbytes = {layer: size * MIB for layer, size in enumerate(sizes)}
    batch = next_batch(rounds, nbytes, {}, Pace((1 << 30,) * len(sizes), 1), in_flight_bytes=most * MIB)
    assert sum(nbytes[round_.number] for round_ in batch.rounds) <= most * MIB
    assert not batch.waited_for


def test_a_layer_of_several_rounds_sends_one_after_another() -> None:
    batch = next_batch({0: [round_of(3, 0), round_of(4, 0)]}, {3: MIB, 4: MIB}, {}, Pace((100,), 1), 100 * MIB)
    assert [round_.number for round_ in batch.rounds] == [3]


def test_what_was_late_twice_is_waited_for_when_nothing_else_is_left() -> None:
    rounds = {0: [round_of(0, 0)], 1: [round_of(1, 1)]}
    nbytes, pace = {0: MIB, 1: MIB}, Pace((100, 200), 1)
    first = next_batch(rounds, nbytes, {1: 2}, pace, 100 * MIB)
    assert [round_.number for round_ in first.rounds] == [0] and not first.waited_for
    last = next_batch({1: rounds[1]}, nbytes, {1: 2}, pace, 100 * MIB)
    assert [round_.number for round_ in last.rounds] == [1] and last.waited_for


def test_after_some_came_too_late_less_travels_at_once() -> None:
    pace = Pace((0, 50, 60, 70), us_per_mib=10)
    sizes = dict.fromkeys(range(4), 2 * MIB)
    rounds = {layer: [round_of(layer, layer)] for layer in range(4)}
    batch = next_batch(rounds, sizes, {}, pace, 1 << 40)
    assert [round_.layers for round_ in batch.rounds] == [(1,), (2,), (3,)]
    batch = next_batch(rounds, sizes, {}, pace.slower(), 1 << 40)
    assert pace.slower().us_per_mib == 20 and len(batch.rounds) == 1 and not batch.waited_for
