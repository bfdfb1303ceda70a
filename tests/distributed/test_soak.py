"""The soak for a while: faults drawn at points of the protocol, lives that end with a kill; and what it notices."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from soak.faults import FAULTS, KILL, NOT_RAISED, RAISE, Deck
from soak.life import SETTINGS, Life, Soak
from soak.lives import of_life

from eplb_runtime.distributed.points import Phase
from eplb_runtime.migration.exchange import RoundExecutor

pytestmark = pytest.mark.long

RANKS, BOUTS, SECONDS = 3, 2, 100.0


def break_nothing() -> None:
    pass


def live(rank: int, settings: str, first: int, kill: bool, damage: Callable[[], None]) -> dict[str, Any]:
    damage()
    return Soak(life_of(settings, first, kill)).run()


def life_of(settings: str, first: int = 0, kill: bool = True) -> Life:
    return Life(0, 1, settings, BOUTS, first, kill, time.monotonic() + SECONDS)


@pytest.mark.parametrize(("number", "settings"), list(enumerate(SETTINGS)), ids=list(SETTINGS))
def test_faults_at_points_of_the_protocol_part_no_ranks_and_change_no_bit(number: int, settings: str) -> None:
    results = run_ranks(RANKS, live, settings, BOUTS * number, True, break_nothing, expect_exit=tuple(range(RANKS)))
    alive = [result for result in results if result is not None]
    assert len(alive) == RANKS - 1
    told = of_life(life_of(settings), alive, "")
    assert told["killed"] and not told["error"]
    assert len(told["drawn"]) > BOUTS and all(one["held"] for one in told["drawn"])
    assert told["drawn"][-1]["fault"] == KILL and told["committed"] > BOUTS


def leave_a_row() -> None:
    commit, done = RoundExecutor.commit, []

    def spoil(self: RoundExecutor, exchange: Any, layer: int, record_format: Any) -> None:
        commit(self, exchange, layer, record_format)
        if not done and layer == 1:
            done.append(True)
            with torch.no_grad():
                record_format.fields[0].source.memory[0][0].add_(1)

    RoundExecutor.commit = spoil


def test_control_a_row_that_is_not_what_it_should_be_is_noticed() -> None:
    for result in run_ranks(RANKS, live, "overlap", 0, False, leave_a_row):
        assert "differs from the twin's" in result["error"]


def test_each_fault_is_drawn_at_each_point_but_where_it_ends_the_job_as_it_must() -> None:
    pairs = {(fault, point) for fault in FAULTS for point in Phase if fault != KILL}
    pairs -= {(RAISE, point) for point in NOT_RAISED}
    deck = Deck(random.Random(0), RANKS)
    drawn = [deck.draw() for _ in pairs]
    assert {(draws[0].fault, draws[0].point) for draws in drawn} == pairs
    assert {len(draws) for draws in drawn} == {1, 2}
    assert {deck.kill(list(Phase)).point for _ in range(50) if deck.draw()} == set(Phase)
    assert all(NOT_RAISED.values())
