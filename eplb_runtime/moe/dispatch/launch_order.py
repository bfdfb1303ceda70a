"""Which of two ways launches its next exchange, so that all ranks launch in one order.

A kernel that waits for its peers keeps what it has on the GPU until they come. With two threads a rank, one rank may
launch A and then B, and another B and then A; where anything on a GPU or in its driver takes them in the order of their
launches (a hardware queue; a thread that waits for counts and holds the interpreter, as in DeepEP's `Buffer`), both
wait for ever. In one order nothing waits for what comes later: the earliest exchange that is not over has been launched
everywhere, and its peers need nothing but it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class LaunchOrder:
    """Two sequences in one: the first of each, then the second of each, until one has ended. What is launched follows
    from how long both are, and not from how fast."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._launched = [0, 0]
        self._asks = [False, False]
        self._ended = [False, False]

    @contextlib.contextmanager
    def turn(self, way: int) -> Iterator[None]:
        """Inside, the way's next exchange is launched; waits for the other way's launches that come first.

        Args:
            way: 0 or 1.
        """
        with self._changed:
            self._asks[way] = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._comes_next(way))
        try:
            yield
        finally:
            with self._changed:
                self._asks[way] = False
                self._launched[way] += 1
                self._changed.notify_all()

    def until_the_other_asks(self, way: int) -> None:
        """Within a turn: wait until the other way has queued all that it computes before its next exchange."""
        with self._changed:
            self._changed.wait_for(lambda: self._asks[1 - way] or self._ended[1 - way])

    def end(self, way: int) -> None:
        """It launches nothing any more, having done its work or failed."""
        with self._changed:
            self._ended[way] = True
            self._changed.notify_all()

    def _comes_next(self, way: int) -> bool:
        other = 1 - way
        return self._ended[other] or self._launched[other] >= self._launched[way] + way
