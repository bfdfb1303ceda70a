"""The thread that carries experts beside a step: rounds are voted on when they are here, not when others are sent."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from eplb_runtime.distributed.ballot import Act, Ballot, Heard, Verdict
from eplb_runtime.migration.overlapped import InFlightRound, Overlapped
from eplb_runtime.migration.schedule import Round


class _Engine:
    """One whose rounds are here once one more is posted."""

    def __init__(self) -> None:
        self.did: list[tuple[str, int]] = []

    def restart(self) -> None:
        pass

    def post(self, migration: Any, round_: Round) -> Any:
        self.did.append(("post", round_.number))
        staged: list[Any] = []
        return SimpleNamespace(number=round_.number, problem="", exchange=SimpleNamespace(staged=staged))

    def has_arrived(self, posted: Any) -> bool:
        return ("post", posted.number + 1) in self.did

    def arrive(self, posted: Any, get_ready: Any, meanwhile: Any) -> None:
        self.did.append(("arrive", posted.number))

    def vote(self, posted: Any, ballot: Ballot) -> None:
        self.did.append(("vote", posted.number))
        assert ballot.hear(Heard.VOTE, Verdict(True)) is Act.SAY_YES
        ballot.hear(Heard.COMMIT, Verdict(True))


def test_a_round_that_is_here_is_voted_on_before_the_next_but_one_is_sent() -> None:
    engine = _Engine()
    registry = SimpleNamespace(layers=range(4), num_layers=4, parameters=lambda: [torch.zeros(1)])
    background = Overlapped(
        engine,  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        registry=registry,  # type: ignore[arg-type]
        maps=SimpleNamespace(prepare=None),  # type: ignore[arg-type]
        is_planner=True,
        timeout_seconds=1.0,
        link_seconds_per_byte=0.0,
        max_pause_seconds=None,
    )
    rounds = [Round(number, np.zeros((0, 4), dtype=np.int64), (number,), (number,)) for number in range(4)]
    flights = [InFlightRound(round_, Ballot(str(round_.number)), True, 0.0, "") for round_ in rounds]
    gate = threading.Event()
    gate.set()
    background._transfer_rounds(flights, gate, lambda: None, lambda round_: engine.post(None, round_))
    assert all(flight.ballot.verdict == Verdict(True) for flight in flights)
    order = engine.did
    for number in range(2):
        assert order.index(("vote", number)) < order.index(("post", number + 2))
        assert order.index(("post", number + 1)) < order.index(("arrive", number)), "the links do not stand idle"
