"""New connections: taken over by all ranks at the same boundary or by none, whichever rank fails, is late or is lost.

Ranks are threads of this process. A step is a barrier, so they are at most one boundary apart, as in training.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from eplb_runtime.distributed import control_channel
from eplb_runtime.distributed.consensus import Phase
from eplb_runtime.distributed.control_channel import MOST_TRIES, ControlChannel
from eplb_runtime.distributed.store import JobStore

RANKS = 3


class Groups:
    """`ProcessGroups` of one rank."""

    setup_seconds, backend, control = 10.0, "gloo", None

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.job = SimpleNamespace(rank=rank, ranks=tuple(range(RANKS)))
        self.timeout_seconds = 5.0
        self.store = JobStore(store, "job", 5.0)
        self.hung_up = 0
        self.held, self.used = list[Any](), ()
        self.fails: Callable[[int], None] = lambda attempt: None

    def make_again(self, attempt: int, seconds: float) -> Any:
        self.fails(attempt)
        made = f"control {attempt}", f"migration {attempt}"
        self.held += made
        return made

    def take_over(self, made: Any) -> None:
        self.used = made

    def release_unused(self) -> None:
        self.held = [group for group in self.held if group in self.used]

    def close_connections(self) -> None:
        self.hung_up += 1


class LostRanks:
    """All ranks, each of which has lost the others."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self.groups = [Groups(rank, store) for rank in range(RANKS)]
        self.probes: list[Callable[[Phase, Any], None]] = [lambda phase, subject: None] * RANKS
        self.ranks = [self._of(rank) for rank in range(RANKS)]
        self._stepped = threading.Barrier(RANKS)

    def _of(self, rank: int) -> ControlChannel:
        groups: Any = self.groups[rank]
        return ControlChannel(groups, Mock(), Mock(), lambda phase, subject: self.probes[rank](phase, subject))

    def step(
        self, boundaries: int, notice: tuple[int, ...] = (0, 0, 0), skips: Collection[tuple[int, int]] = ()
    ) -> list[dict[int, Any]]:
        """What each rank has taken over, by boundary. ``notice``: the boundary at which each rank notices that it has
        lost the others; ``skips``: ranks, and a boundary at which each does not look."""

        def of(rank: int) -> dict[int, Any]:
            taken = {}
            for boundary in range(boundaries):
                self._stepped.wait(60.0)
                if boundary == notice[rank]:
                    self.ranks[rank].begin_reconnecting()
                made = None if (rank, boundary) in skips else self.ranks[rank].reconnect(boundary)
                if made is not None:
                    taken[boundary] = made
                    self.groups[rank].release_unused()
            return taken

        with ThreadPoolExecutor(RANKS) as threads:
            return list(threads.map(of, range(RANKS)))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[LostRanks]:
    caplog.set_level(logging.INFO, "eplb_runtime")
    for of_torch in ("Agreement", "host_timeout"):
        monkeypatch.setattr(control_channel, of_torch, Mock())
    job = LostRanks()
    yield job
    for groups in job.groups:
        groups.store.close()


def fail_at_first(attempt: int) -> None:
    if attempt == 1:
        raise RuntimeError("made to fail")


def held(job: LostRanks) -> list[list[str]]:
    """Names of the groups that each rank has and has not given back."""
    return [groups.held for groups in job.groups]


def test_all_ranks_meet_at_one_boundary_whenever_each_has_noticed(job: LostRanks) -> None:
    taken = job.step(20, notice=(0, 7, 3))
    (boundary,) = taken[0]
    assert boundary > 7 and all(list(each) == [boundary] for each in taken)
    assert [groups.hung_up for groups in job.groups] == [1] * RANKS
    assert held(job) == [["control 1", "migration 1"]] * RANKS
    assert not any(rank.reconnecting for rank in job.ranks)
    again = job.step(12)
    assert len({tuple(each) for each in again}) == 1 and len(again[0]) == 1
    assert [group[-1] for group in held(job)] == ["migration 2"] * RANKS, "a later failure makes groups of new names"


@pytest.mark.parametrize("where", ["the migration group", "the transport"])
def test_one_rank_that_fails_leaves_all_without_and_the_next_try_holds(
    job: LostRanks, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    if where == "the transport":
        job.probes[1] = lambda at, attempt: fail_at_first(attempt) if at is Phase.CONNECTED else None
    else:
        job.groups[1].fails = fail_at_first
    taken = job.step(20)
    assert len({tuple(each) for each in taken}) == 1 and len(taken[0]) == 1
    assert held(job) == [["control 2", "migration 2"]] * RANKS
    lines = [record.getMessage() for record in caplog.records]
    assert lines and all("rank 1" in line and "made to fail" in line for line in lines)


@pytest.mark.parametrize("late", [(2,), (0, 1, 2)])
def test_ranks_that_have_passed_the_step_are_named_and_the_next_try_holds(
    job: LostRanks, late: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    taken = job.step(20, skips={(rank, 2) for rank in late})
    assert len({tuple(each) for each in taken}) == 1 and len(taken[0]) == 1
    assert held(job) == [["control 2", "migration 2"]] * RANKS
    assert len(late) > 1 or any("rank 2" in record.getMessage() for record in caplog.records)


def test_a_rank_that_never_comes_is_named_and_balancing_stays_off_with_one_warning(
    job: LostRanks, caplog: pytest.LogCaptureFixture
) -> None:
    for groups in job.groups:
        groups.timeout_seconds = 0.3
    store = job.groups[2].store
    for attempt in range(1, MOST_TRIES + 2):  # it is known to have lost the others, and does not meet them
        store.add(f"connections/{attempt}/here", 1)
    taken = job.step(100, notice=(0, 0, 1000))
    assert taken == [{}, {}, {}] and held(job) == [[]] * RANKS
    named = [record for record in caplog.records if "rank 2 did not come within" in record.getMessage()]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(named) == 2 * MOST_TRIES
    assert warnings == [f"the ranks could not connect in {MOST_TRIES} tries: nothing is rebalanced any more"] * 2


def test_a_store_that_does_not_answer_ends_no_step(job: LostRanks) -> None:
    job.groups[0].store = JobStore(Mock(clone=Mock(side_effect=RuntimeError("gone"))), "job", 0.05)
    assert job.step(5) == [{}, {}, {}]
    assert job.ranks[0].reconnecting
