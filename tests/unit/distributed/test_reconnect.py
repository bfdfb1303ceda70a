"""Connections that are made anew: who gives up which."""

from __future__ import annotations

import logging
import sys
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
        self.attempts: list[int] = []
        self.hung_up: list[Any] = []
        self.given_back: list[Any] = []

    def connect(self, attempt: int, key: str, seconds: float) -> Connections:
        self.attempts.append(attempt)
        return Connections(f"attempt {attempt}", f"attempt {attempt}")  # type: ignore[arg-type]

    def hang_up(self, connections: Connections) -> None:
        self.hung_up.append(connections.control)

    def give_back(self, connections: Connections) -> None:
        self.given_back.append(connections.control)


class Agreeing:
    def __init__(self, *_: Any) -> None:
        pass

    def highest(self, mine: torch.Tensor) -> torch.Tensor:
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
    assert groups.given_back == ["attempt 1"]
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

    def connect(attempt: int, key: str, seconds: float) -> Connections:
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
