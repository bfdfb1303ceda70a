"""Faults of one rank at the named points of the protocol (`distributed.points.Phase`), drawn at random.

A new point joins by its name. A rank acts on a draw where it comes to the point. What it breaks mends by itself, but
for a rank that is killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eplb_runtime.balancer.balancer import Balancer
from eplb_runtime.distributed.points import Phase
from eplb_runtime.distributed.transports.base import Message, Pending, Transport, TransportError

KILL, RAISE = "kill", "exception"
ALL_RANKS = -1
SLOW_PASSES = 6
"""A slow rank dawdles so often."""
NOT_RAISED: Mapping[Phase, str] = {
    Phase.STEPPED: "it is on the training thread: the error is the loop's",
    Phase.AWAITED: "it is on the training thread: the error is the forward's",
    Phase.DECIDED: "all ranks have agreed: an error ends the job, as it must",
    Phase.COMMITTING: "all ranks have agreed: an error ends the job, as it must",
    Phase.COMMITTED: "all ranks have agreed: an error ends the job, as it must",
}
"""Where no exception is made, and why."""
_ERRORS: Sequence[type[Exception]] = (RuntimeError, OSError, MemoryError, KeyError, TransportError)


@dataclass(frozen=True)
class Draw:
    """One fault.

    Args:
        point: where it happens.
        victim: the rank on which, or `ALL_RANKS`.
        passes: how often the victim passes the point before.
        amount: in [0, 1): how long, or which.
    """

    fault: str
    point: Phase
    victim: int
    passes: int
    amount: float

    def is_on(self, rank: int) -> bool:
        return self.victim in (rank, ALL_RANKS)


class Deck:
    """All faults at all points in a random order, again and again.

    Args:
        chance: seeded alike on every rank.
        first: how many were drawn before.
    """

    def __init__(self, chance: random.Random, ranks: int, first: int = 0) -> None:
        self._chance = chance
        self._ranks = ranks
        self._pairs = [(fault, point) for fault in FAULTS for point in Phase if fault != KILL]
        self._pairs = [pair for pair in self._pairs if not (pair[0] == RAISE and pair[1] in NOT_RAISED)]
        random.Random(0).shuffle(self._pairs)
        self._next = first

    def draw(self) -> list[Draw]:
        """The next one, and now and then another beside it."""
        self._next += 1
        drawn = [self._of(*self._pairs[self._next % len(self._pairs)])]
        if self._chance.random() < 0.3:
            drawn.append(self._of(*self._chance.choice(self._pairs)))
        return drawn

    def kill(self, points: Sequence[Phase]) -> Draw:
        return self._of(KILL, points[self._next % len(points)])

    def _of(self, fault: str, point: Phase) -> Draw:
        everywhere = fault != KILL and self._chance.random() < 0.15
        victim = ALL_RANKS if everywhere else self._chance.randrange(self._ranks)
        return Draw(fault, point, victim, self._chance.choice((0, 0, 1, 2)), self._chance.random())


class Faults:
    """What one rank does at the points of its balancer.

    Args:
        balancer: of this rank.
        rank: this one.
        timeout_seconds: of the balancer.
    """

    def __init__(self, balancer: Balancer, rank: int, timeout_seconds: float) -> None:
        self.groups = balancer.runtime.groups
        self.timeout_seconds = timeout_seconds
        self._rank = rank
        self._executor = balancer.rebalancer._engine.executor
        self._executor._add = self._send  # type: ignore[method-assign]
        self._passed: dict[Draw, int] = {}
        self._acted: set[Draw] = set()
        self._lock = threading.Lock()
        self.corrupting = False
        self._deaf: weakref.ref[Transport] | None = None  # what nobody else holds goes
        self._engine = balancer.rebalancer._engine
        self._engine.probe = self._at

    def arm(self, draws: Sequence[Draw]) -> None:
        """From here on, what is drawn happens, each once; what was drawn before does not any more."""
        with self._lock:
            self._acted = set()
            self._passed = {draw: 0 for draw in draws if draw.is_on(self._rank)}

    def hurry(self) -> None:
        """What has not happened yet does at the next pass."""
        with self._lock:
            for draw in self._passed.keys() - self._acted:
                self._passed[draw] = draw.passes

    @property
    def over(self) -> bool:
        """Whether all that was drawn for this rank has happened."""
        return len(self._acted) == len(self._passed)

    def reached(self, draw: Draw) -> bool:
        return draw in self._acted

    def cut(self) -> None:
        """End the connections that rebalancing talks over."""
        self.groups.hang_up()

    def lose_what_is_sent(self) -> None:
        """From here on nothing that this rank sends arrives, until it connects anew."""
        self._deaf = weakref.ref(self._executor._transport)

    def stall_store(self, seconds: float) -> None:
        if not self.groups.store._worker.closed:
            self.groups.store._worker.submit(lambda: time.sleep(seconds))

    def _at(self, phase: Phase, subject: Any) -> None:
        if self.corrupting and phase is Phase.STAGED and subject:
            self.corrupting = False
            subject[0].record[3] ^= 1
        due: list[Draw] = []
        with self._lock:
            for draw in self._passed:
                if draw.point is phase:
                    self._passed[draw] += 1
                    over = self._passed[draw] - 1 - draw.passes
                    if over == 0 or (draw.fault == "slow" and 0 < over < SLOW_PASSES):
                        due.append(draw)
                        self._acted.add(draw)
        for draw in due:
            FAULTS[draw.fault](self, draw, subject)

    def _send(self, exchange: Any, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        if self._deaf is not None and self._deaf() is self._executor._transport:
            sends = []
        return type(self._executor)._add(self._executor, exchange, sends, receives)


Fault = Callable[[Faults, Draw, Any], None]


def _stop(faults: Faults, draw: Draw, subject: Any) -> None:
    seconds = faults.timeout_seconds * (1.1 + draw.amount / 2)
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    # To this very thread: sent to the process, another may take it, and this one goes on for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _raise(faults: Faults, draw: Draw, subject: Any) -> None:
    raise _ERRORS[int(draw.amount * len(_ERRORS))]("a fault that was drawn")


def _corrupt(faults: Faults, draw: Draw, subject: Any) -> None:
    if draw.point is Phase.PLANNED and len(subject) > 20:
        subject[-20:] = b"#" * 20
    elif draw.point is Phase.STAGED and subject:
        subject[0].record[3] ^= 1
    else:
        faults.corrupting = True  # what comes next


FAULTS: Mapping[str, Fault] = {
    "stop": _stop,
    "stand still": lambda faults, draw, _: time.sleep(faults.timeout_seconds * (1.1 + draw.amount / 2)),
    KILL: lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    RAISE: _raise,
    "silent store": lambda faults, draw, _: faults.stall_store(faults.timeout_seconds * (1.1 + 2 * draw.amount)),
    "dropped bytes": lambda faults, *_: faults.lose_what_is_sent(),
    "corrupt bytes": _corrupt,
    "slow": lambda faults, draw, _: time.sleep(faults.timeout_seconds * (0.02 + 0.2 * draw.amount)),
    "cut": lambda faults, *_: faults.cut(),
}
"""By the names in the result. "stop" is of the whole process, "stand still" of the thread that comes to the point, both
longer than the timeout; "cut" ends the connections."""
