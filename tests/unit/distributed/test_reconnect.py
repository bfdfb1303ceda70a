"""Connections that are made anew: who gives up which."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_runtime.distributed import reconnect
from eplb_runtime.distributed.nccl_groups import NoGroupsLeft
from eplb_runtime.distributed.points import Phase
from eplb_runtime.distributed.process_groups import Connections
from eplb_runtime.distributed.reconnect import Link, RankState, Reconnection
from eplb_runtime.distributed.store import StoreError


class Store:
    """The launcher's, in this process."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}
        self.counters: dict[str, int] = {}
        self.silences = 0

    def word_of(self, key: str) -> str:
        return self.words.get(key, "")

    def compare_set(self, key: str, word: str) -> str:
        if self.silences:
            self.silences -= 1
            raise StoreError("the launcher's store does not answer: no answer in 3 s")
        return self.words.setdefault(key, word)

    def add(self, key: str, amount: int) -> int:
        self.counters[key] = self.counters.get(key, 0) + amount
        return self.counters[key]


class Groups:
    """Of a job of one rank; connections are names."""

    def __init__(self) -> None:
        self.store = Store()
        self.job = SimpleNamespace(ranks=(0,), rank=0)
        self.timeout_seconds = self.setup_seconds = 5.0
        self.current = Connections("first", "first")  # type: ignore[arg-type]
        self.connects_in_background = True
        self.attempts: list[int] = []
        self.made_on: list[str] = []
        self.hung_up: list[Any] = []
        self.given_back: list[Any] = []

    def connect_control(self, attempt: int, key: str, seconds: float) -> Any:
        return f"attempt {attempt}"

    def connect(self, control: Any, attempt: int, key: str, seconds: float) -> Connections:
        assert control == f"attempt {attempt}"
        self.attempts.append(attempt)
        self.made_on.append(threading.current_thread().name)
        return Connections(control, f"migration {attempt}")  # type: ignore[arg-type]

    def hang_up(self, connections: Connections) -> None:
        self.hung_up.append(connections.control)

    def give_back(self, *groups: Any) -> None:
        self.given_back.extend(groups)


class Agreeing:
    """The ranks, as far as there are any."""

    def __init__(self, *_: Any) -> None:
        pass

    def highest(self, mine: torch.Tensor, seconds: float | None = None) -> torch.Tensor:
        return mine


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Reconnection, Groups, RankState]]:
    monkeypatch.setattr(reconnect, "Agreement", Agreeing)
    groups, state = Groups(), RankState(step_seconds=1e-3)
    made = Reconnection(groups, state, lambda connections, seconds: FakeTransport(), lambda: None)  # type: ignore[arg-type, return-value]
    yield made, groups, state
    made.close(5.0)


def train_until_connected(made: Reconnection, groups: Groups, state: RankState) -> Link:
    while True:
        time.sleep(0)  # lets the other thread run
        state.steps += 1
        link = made.at_boundary()
        if link is not None:
            groups.current = link.connections
            return link


def test_connections_that_break_as_soon_as_they_hold_are_made_anew_once(
    job: tuple[Reconnection, Groups, RankState],
) -> None:
    """Training loses them again before the thread that made them has seen that they hold: it must not try on for the
    pause that is over, nor hang up what stands when it comes to the next one."""
    made, groups, state = job
    interval = sys.getswitchinterval()
    stood = [groups.current]
    made.begin()
    try:
        for _ in range(3):
            sys.setswitchinterval(100.0)  # this thread goes on until it waits: the other learns all of it later
            stood.append(train_until_connected(made, groups, state).connections)
            made.begin()
            sys.setswitchinterval(interval)
        train_until_connected(made, groups, state)
    finally:
        sys.setswitchinterval(interval)
    made.close(5.0)
    assert groups.hung_up == [connections.control for connections in stood]
    assert groups.current.control not in groups.hung_up + groups.given_back


def test_an_attempt_whose_record_a_silent_store_has_not_taken_is_not_made_again(
    job: tuple[Reconnection, Groups, RankState],
) -> None:
    """Addresses that ranks have left in the store at the first would be taken for those of the second."""
    made, groups, state = job

    def at(phase: Phase, subject: Any) -> None:
        if phase is Phase.MET and len(groups.attempts) == 0:
            groups.store.silences = 3  # the thread's record, training's, and the first time that it is made good

    made._probe = at
    made.begin()
    train_until_connected(made, groups, state)
    assert groups.store.silences == 0
    assert groups.attempts == [1, 2]


class FakeTransport:
    """Of experts; knows whether it was given back."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_a_transport_whose_connections_never_held_is_closed_and_the_one_that_holds_is_not(
    job: tuple[Reconnection, Groups, RankState],
) -> None:
    """The first try fails after its transport was warmed up, the second holds."""
    made, groups, state = job
    made_so_far: list[FakeTransport] = []

    def make_transport(*_: Any) -> FakeTransport:
        made_so_far.append(FakeTransport())
        return made_so_far[-1]

    def at(phase: Phase, subject: Any) -> None:
        if phase is Phase.CONNECTED and subject == 1:
            raise RuntimeError("made to fail")

    made._make_transport, made._probe = make_transport, at  # type: ignore[assignment]
    made.begin()
    link = train_until_connected(made, groups, state)
    assert groups.given_back == ["migration 1", "attempt 1"]
    assert [one.closed for one in made_so_far] == [True, False]
    assert link.transport is made_so_far[1]  # type: ignore[comparison-overlap]


def test_a_transport_that_training_never_took_over_is_closed_at_the_end(
    job: tuple[Reconnection, Groups, RankState],
) -> None:
    made, *_ = job
    transport = FakeTransport()
    made._make_transport = lambda *_: transport  # type: ignore[assignment, return-value]
    made.begin()
    while made._proposal is None:
        time.sleep(0)
    made.close(5.0)
    assert transport.closed


def test_without_groups_left_it_is_said_once_and_nothing_is_tried_again(
    job: tuple[Reconnection, Groups, RankState], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, groups, _state = job
    left = RuntimeError("made to fail"), NoGroupsLeft("no more are ready: experts stay where they are")

    def connect(control: Any, attempt: int, key: str, seconds: float) -> Connections:
        groups.attempts.append(attempt)
        raise left[len(groups.attempts) - 1]

    monkeypatch.setattr(groups, "connect", connect)
    made.begin()
    with caplog.at_level(logging.ERROR, "eplb_runtime"):
        made._worker.submit(lambda: None).result(30)  # the same thread, after it
    assert [record.getMessage() for record in caplog.records] == [str(left[1])]
    assert groups.attempts == [1, 2] and made.under_way and made.at_boundary() is None


def test_a_rank_that_waits_for_others_who_have_no_groups_left_ends_too(
    job: tuple[Reconnection, Groups, RankState], caplog: pytest.LogCaptureFixture
) -> None:
    made, groups, _state = job
    groups.job = SimpleNamespace(ranks=(0, 1), rank=0)  # the other never comes
    groups.store.words["connections/ended"] = "no more are ready: experts stay where they are"
    made.begin()
    with caplog.at_level(logging.ERROR, "eplb_runtime"):
        made._worker.submit(lambda: None).result(30)
    assert [record.getMessage() for record in caplog.records] == ["no more are ready: experts stay where they are"]
    assert groups.attempts == []


def test_what_waits_on_a_device_is_made_by_the_thread_that_trains_and_the_rest_beside_it(
    job: tuple[Reconnection, Groups, RankState],
) -> None:
    made, groups, state = job
    made.begin()
    train_until_connected(made, groups, state)
    groups.connects_in_background = False
    made.begin()
    link = train_until_connected(made, groups, state)
    assert groups.made_on == ["eplb_runtime connect", threading.current_thread().name]
    assert link.connections.control == "attempt 2"  # type: ignore[comparison-overlap]
    made.close(5.0)
    assert groups.store.words["connections/2/step"] == groups.store.words["connections/2/hold"] == "yes"
    assert groups.given_back == []


@pytest.mark.parametrize("whose", ["this rank's", "another's"])
def test_a_rank_that_cannot_make_it_at_that_step_lets_no_rank_take_it_over(
    job: tuple[Reconnection, Groups, RankState], monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """The first try fails where training makes the transport, the second holds."""
    made, groups, state = job
    groups.connects_in_background = False
    transports: list[FakeTransport] = []

    def make_transport(*_: Any) -> FakeTransport:
        if whose == "this rank's" and len(groups.attempts) == 1:
            raise MemoryError("made to fail")
        transports.append(FakeTransport())
        return transports[-1]

    def highest(agreeing: Agreeing, mine: torch.Tensor, seconds: float | None = None) -> torch.Tensor:
        of_making = len(mine) == 1 and threading.current_thread() is threading.main_thread()
        fails = of_making and whose == "another's" and len(groups.attempts) == 1
        return torch.ones_like(mine) if fails else mine

    made._make_transport = make_transport  # type: ignore[assignment]
    monkeypatch.setattr(Agreeing, "highest", highest)
    made.begin()
    link = train_until_connected(made, groups, state)
    made.close(5.0)
    assert groups.store.words["connections/1/step"] == "yes" and groups.store.words["connections/1/hold"] == "no"
    assert groups.given_back == ["migration 1", "attempt 1"]
    assert link.transport is transports[-1]  # type: ignore[comparison-overlap]
    assert [one.closed for one in transports] == ([False] if whose == "this rank's" else [True, False])


def test_without_groups_left_where_training_makes_them_it_is_said_once_too(
    job: tuple[Reconnection, Groups, RankState], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, groups, state = job
    groups.connects_in_background = False

    def connect(*_: Any) -> Connections:
        groups.attempts.append(0)
        raise NoGroupsLeft("no more are ready: experts stay where they are")

    monkeypatch.setattr(groups, "connect", connect)
    made.begin()
    with caplog.at_level(logging.ERROR, "eplb_runtime"):
        said = made._worker.submit(lambda: None)  # the same thread, after it
        while not said.done():
            time.sleep(0)
            state.steps += 1
            assert made.at_boundary() is None
    assert [record.getMessage() for record in caplog.records] == ["no more are ready: experts stay where they are"]
    assert len(groups.attempts) == 1 and made.under_way


def test_training_that_is_interrupted_while_it_makes_them_leaves_no_thread_that_waits(
    job: tuple[Reconnection, Groups, RankState], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, groups, state = job
    groups.connects_in_background = False

    def interrupted(*_: Any) -> Connections:
        raise KeyboardInterrupt

    monkeypatch.setattr(groups, "connect", interrupted)
    made.begin()
    with pytest.raises(KeyboardInterrupt):
        train_until_connected(made, groups, state)
    made._closing.set()
    made._worker.submit(lambda: None).result(30)
    assert "attempt 1" in groups.given_back
