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
from eplb_runtime.distributed.control_channel import ControlChannel
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
    """A rebalancer of which nothing works but its channel."""
    rebalancer: Any = Rebalancer.__new__(Rebalancer)
    rebalancer.control = control = ControlChannel.__new__(ControlChannel)
    control.worker, control._seconds = Worker("test"), 30.0
    control.reconnection, control.agreement = SimpleNamespace(under_way=False), None  # type: ignore[assignment]
    rebalancer._migration = rebalancer._between_steps = SimpleNamespace(in_flight=False)
    rebalancer.overlapped = SimpleNamespace(withdraw=lambda: None)
    rebalancer._placement, rebalancer._pending = INITIAL, None
    yield rebalancer
    control.worker.close(5.0)


def test_a_move_waits_for_the_decision_in_flight_and_leaves_it_for_later(bare: Any) -> None:
    goes_on, said = Event(), []

    def decide() -> None:
        goes_on.wait(20.0)
        said.append("decided")

    def advance() -> None:
        said.append("migrated")

    decision: Future[Any] = bare.control.worker.submit(decide)
    bare._pending = pending = _Pending(1, "key", decision, None, 0)
    bare._between_steps = SimpleNamespace(
        in_flight=False, begin=lambda *_: goes_on.set(), advance=advance
    )  # as late as can be
    bare._new_key = bare._take_over = lambda _: "key"
    bare.move_to(INITIAL)
    assert said == ["decided", "migrated"] and bare._pending is pending


def test_notices_to_other_ranks_are_sent_before_the_control_group_is_used_again(bare: Any) -> None:
    goes_on, said = Event(), []

    def notice(agreement: Any) -> None:
        goes_on.wait(20.0)
        said.append("the notice")

    def check_equal(*_: Any) -> Verdict:
        said.append("compared")
        return Verdict(True)

    bare.control.broadcast_notice(notice)
    bare.control.agreement = SimpleNamespace(check_equal=check_equal)
    bare.overlapped.withdraw = goes_on.set  # as late as can be
    assert bare.compare(bytes(16), "it", "it").commit
    assert said == ["the notice", "compared"]


def test_a_notice_that_is_never_sent_means_that_ranks_are_lost(bare: Any) -> None:
    bare.control._seconds = -0.99
    goes_on, lost = Event(), []
    bare.control.broadcast_notice(lambda agreement: goes_on.wait(20.0))
    bare._pause = lost.append
    verdict = bare.compare(bytes(16), "it", "it")
    goes_on.set()
    assert not verdict.commit and verdict.connections_broken and len(lost) == 1
