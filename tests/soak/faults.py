"""Faults of one rank at the named points of the protocol (`distributed.consensus.Phase`), drawn at random.

A new point joins by its name. A rank acts on a draw where it comes to the point. What it breaks mends by itself, but
for a rank that is killed.
"""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eplb_runtime.balancer.balancer import Balancer
from eplb_runtime.distributed.consensus import Phase
from eplb_runtime.distributed.transports.base import TransportError

KILL, ALL_RANKS = "kill", -1
NOT_RAISED = (Phase.STEPPED, Phase.AWAITED, Phase.DECIDED, Phase.COMMITTING, Phase.COMMITTED)
"""Where no exception is made: it would be the training loop's, or all ranks have agreed, and it ends the job."""
_ERRORS: Sequence[type[Exception]] = (RuntimeError, OSError, MemoryError, KeyError, TransportError)


@dataclass(frozen=True)
class Draw:
    """One fault at a point of a rank, or of `ALL_RANKS`, after so many passes of it; ``amount`` in [0, 1) says how
    long, or which."""

    fault: str
    point: Phase
    victim: int
    passes: int
    amount: float

    def is_on(self, rank: int) -> bool:
        return self.victim in (rank, ALL_RANKS)


def draws(chance: random.Random, ranks: int, first: int) -> Iterator[list[Draw]]:
    """All faults at all points in a random order, again and again, now and then two; ``first`` were drawn before. The
    chance is seeded alike on every rank."""
    pairs = [(fault, point) for fault in FAULTS for point in Phase if fault != KILL]
    pairs = [(fault, point) for fault, point in pairs if fault != "exception" or point not in NOT_RAISED]
    random.Random(0).shuffle(pairs)
    while True:
        first += 1
        drawn = [pairs[first % len(pairs)], *[chance.choice(pairs)] * (chance.random() < 0.3)]
        yield [draw_of(chance, *one, ALL_RANKS if chance.random() < 0.15 else chance.randrange(ranks)) for one in drawn]


def draw_of(chance: random.Random, fault: str, point: Phase, victim: int) -> Draw:
    return Draw(fault, point, victim, chance.choice((0, 0, 1, 2)), chance.random())


class Faults:
    """What one rank does at the points of its balancer."""

    def __init__(self, balancer: Balancer, rank: int, timeout_seconds: float) -> None:
        self.groups, self.timeout_seconds = balancer.runtime.groups, timeout_seconds
        self._rank, engine = rank, balancer.rebalancer._engine
        engine.probe, self._executor = self._at, engine.executor
        self._left: dict[Draw, int] = {}
        self._lock = threading.Lock()
        self.corrupting = False

    def arm(self, drawn: Sequence[Draw]) -> None:
        """From here on, what is drawn happens, each once; what was drawn before does not any more."""
        with self._lock:
            self._left = {draw: draw.passes for draw in drawn if draw.is_on(self._rank)}

    def hurry(self) -> None:
        """What has not happened yet does at the next pass."""
        with self._lock:
            self._left = dict.fromkeys(self._left, 0)

    def waits_for(self, draw: Draw) -> bool:
        """Whether it is this rank's, and has not happened yet."""
        return draw in self._left

    def lose_what_is_sent(self) -> None:
        """From here on nothing that this rank sends arrives, until it connects again."""
        transport = self._executor.transport
        post = type(transport).post
        transport.post = lambda sends, receives: post(transport, [], receives)  # type: ignore[method-assign]

    def stall_store(self, seconds: float) -> None:
        if not self.groups.store._worker.closed:
            self.groups.store._worker.submit(lambda: time.sleep(seconds))

    def _at(self, phase: Phase, subject: Any) -> None:
        if self.corrupting and phase is Phase.STAGED and subject:
            self.corrupting = False
            subject[0].record[3] ^= 1
        with self._lock:
            here = [draw for draw in self._left if draw.point is phase]
            due = [draw for draw in here if self._left[draw] == 0]
            self._left.update({draw: self._left[draw] - 1 for draw in here})
            for draw in due:
                del self._left[draw]
        for draw in due:
            FAULTS[draw.fault](self, draw, subject)


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


FAULTS: Mapping[str, Callable[[Faults, Draw, Any], None]] = {
    "stop": _stop,
    "stand still": lambda faults, draw, _: time.sleep(faults.timeout_seconds * (1.1 + draw.amount / 2)),
    KILL: lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "exception": _raise,
    "silent store": lambda faults, draw, _: faults.stall_store(faults.timeout_seconds * (1.1 + 2 * draw.amount)),
    "dropped bytes": lambda faults, *_: faults.lose_what_is_sent(),
    "corrupt bytes": _corrupt,
    "slow": lambda faults, draw, _: time.sleep(faults.timeout_seconds * (0.1 + 0.8 * draw.amount)),
    "cut": lambda faults, *_: faults.groups.close_connections(),
}
"""By the names in the result. "stop" is of the whole process, "stand still" of the thread that comes to the point, both
longer than the timeout; "slow" is shorter; "cut" ends the connections."""
