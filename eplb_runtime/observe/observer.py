"""Rank 0's listener: hears every event, makes a record of it on a thread of its own, and hands it to all who show it.

Nobody in training waits for it. It takes what it can hold; what comes beyond is left out and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..events import Event
from ..placement import Placement
from ..utils.worker import Worker
from .records import Record, record_of

logger = logging.getLogger("eplb_runtime")

MOST_WAITING = 256
"""Events that wait for the thread."""
CLOSING_SECONDS = 10.0

Sink = Callable[[Record], None]


class Observer:
    """Hands records to sinks, in order; a sink that fails is told of once, and tried again with the next record.

    Args:
        start: where the experts stand without a balancer.
        speed_R: of the ranks, as the planner knows it.

    Attributes:
        left_out: events that nobody could take.
    """

    def __init__(self, start: Placement, speed_R: NDArray[np.float64] | None = None) -> None:
        self._start = start
        self._speed_R = speed_R
        self._worker = Worker("eplb_runtime observer")
        self._room = threading.Semaphore(MOST_WAITING)
        self._sinks: dict[str, Sink] = {}
        self._closers: list[Callable[[], None]] = []
        self._failing: set[str] = set()
        self.left_out = 0

    def add(self, name: str, sink: Sink, close: Callable[[], None] = lambda: None) -> None:
        """A function that takes records from now on, on the observer's thread, and how to end it."""
        self._sinks = {**self._sinks, name: sink}
        self._closers.append(close)

    def __len__(self) -> int:
        return len(self._sinks)

    def hear(self, event: Event) -> None:
        """Never waits, never raises."""
        if self._worker.closed:
            return
        if not self._room.acquire(blocking=False):
            self.left_out += 1
            return
        self._worker.submit(partial(self._hand_on, event, time.time()))

    def close(self) -> None:
        """All that was heard is handed on, if it is quick enough, and the sinks are closed."""
        if self._worker.closed:
            return
        self._worker.submit(self._close_sinks)
        self._worker.close(CLOSING_SECONDS)

    def _hand_on(self, event: Event, now: float) -> None:
        self._room.release()
        try:
            record = record_of(event, self._start, now, self._speed_R)
        except Exception:
            logger.exception("the event %s cannot be shown; the job goes on", event.name)
            return
        for name, sink in self._sinks.items():
            try:
                sink(record)
            except Exception as error:
                if name not in self._failing:
                    logger.warning("%s: %s: %s; the job goes on", name, type(error).__name__, error)
                self._failing.add(name)
            else:
                self._failing.discard(name)

    def _close_sinks(self) -> None:
        for close in self._closers:
            try:
                close()
            except Exception as error:
                logger.warning("what shows the job did not close: %s: %s", type(error).__name__, error)
