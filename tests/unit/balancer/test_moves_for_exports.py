"""Moves into logical order and back begin when nothing else is in flight, and nothing else is on the control group."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from eplb_runtime.balancer.exports import placed_logically
from eplb_runtime.balancer.rebalancer import Rebalancer, _Pending
from eplb_runtime.distributed.ballot import Verdict
from eplb_runtime.placement import Placement
from eplb_runtime.utils.worker import Worker

INITIAL = Placement.initial(1, 4, 2)


@pytest.mark.parametrize("commits", [False, True])
def test_a_migration_in_flight_ends_before_the_body_where_experts_are_in_order_already(commits: bool) -> None:
    said: list[str] = []

    def drain() -> bool:
        said.append("drained")
        return commits

    rebalancer: Any = SimpleNamespace(placement=lambda: said.append("looked") or INITIAL, quiesced=0, drain=drain)
    with placed_logically(rebalancer, lambda: said.append("met"), lambda: said.append("moved")):
        said.append("body")
    before = said[: said.index("body")]
    assert before[:3] == ["met", "drained", "moved" if commits else "looked"]
    assert rebalancer.quiesced == 0


@pytest.fixture
def bare() -> Iterator[Any]:
    """A rebalancer of which nothing works but its worker."""
    rebalancer: Any = Rebalancer.__new__(Rebalancer)
    rebalancer._worker = Worker("test")
    rebalancer._config = SimpleNamespace(timeout_seconds=30.0)
    rebalancer._reconnection = SimpleNamespace(under_way=False)
    rebalancer._migration = SimpleNamespace(in_flight=False)
    rebalancer.overlapped = SimpleNamespace(withdraw=lambda: None)
    rebalancer._placement = INITIAL
    rebalancer._pending = rebalancer._said = None
    rebalancer._groups = SimpleNamespace(job=SimpleNamespace(rank=1))
    rebalancer._agreement = None
    yield rebalancer
    rebalancer._worker.close(5.0)


def test_a_move_waits_for_the_decision_on_the_worker_and_leaves_it_for_later(bare: Any) -> None:
    goes_on, said = Event(), []

    def decide() -> None:
        goes_on.wait(20.0)
        said.append("decided")

    decision: Future[Any] = bare._worker.submit(decide)
    bare._pending = pending = _Pending(1, "key", decision, None)
    bare._migrate = lambda target: said.append("migrated")
    bare._refuse_alone = lambda what: goes_on.set() if what != "a migration" else None  # as late as can be
    bare.move_to(INITIAL)
    goes_on.set()
    decision.result(20.0)
    assert said == ["decided", "migrated"] and bare._pending is pending


def test_words_to_other_ranks_are_said_before_the_control_group_is_used_here(bare: Any) -> None:
    goes_on, said = Event(), []

    def word(agreement: Any) -> None:
        goes_on.wait(20.0)
        said.append("the word")

    def check_equal(*_: Any) -> Verdict:
        said.append("compared")
        return Verdict(True)

    bare._agreement = SimpleNamespace(check_equal=check_equal)
    bare.say(word)
    word_is_said, wait_for_it = bare._said, bare._why_not_said

    def waits() -> str:
        goes_on.set()  # as late as can be
        return wait_for_it()

    bare._why_not_said = waits
    assert bare.compare(bytes(16), "it", "it").commit
    word_is_said.result(20.0)
    assert said == ["the word", "compared"]


def test_a_word_that_is_never_said_means_that_ranks_are_lost(bare: Any) -> None:
    bare._config.timeout_seconds = -0.99
    goes_on = Event()
    bare.say(lambda agreement: goes_on.wait(20.0))
    bare._pause = lambda cause: None
    verdict = bare.compare(bytes(16), "it", "it")
    goes_on.set()
    assert not verdict.commit and verdict.connections_broken and "stream of weights" in verdict.cause
