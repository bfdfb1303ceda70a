"""One order of the collectives of two channels, the same on all ranks.

A kernel that waits for its peers keeps what it has on the GPU until they come. With two threads a rank, one rank may
launch A and then B, and another B and then A; where anything on a GPU or in its driver takes them in the order of their
launches (a hardware queue; a thread that waits for counts and holds the interpreter, as in DeepEP's `Buffer`), both
wait for ever. In one order nothing waits for what comes later: the earliest exchange that is not over has been launched
everywhere, and its peers need nothing but it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_NAMES = "the first", "the second"


class CollectiveOrder:
    """Interleaves two sequences of launches: the first of each, then the second of each, until one has ended. The order
    depends on the lengths of the sequences, not on their speed.

    Args:
        seconds: how long one waits for the other at most.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._launching: set[int] = set()
        self._changed = threading.Condition()
        self._launched = [0, 0]
        self._asks = [False, False]
        self._ended = [False, False]

    @contextlib.contextmanager
    def launching(self, channel: int) -> Iterator[None]:
        """Inside, the way's next exchange is launched; waits for the other way's launches that come first.

        Args:
            channel: 0 or 1.

        Raises:
            RuntimeError: the other way did not get there in time, or this thread is within a turn already.
        """
        thread = threading.get_ident()
        with self._changed:
            if thread in self._launching:
                raise RuntimeError("an exchange began within the launch of another: ranks would count one as two")
            self._asks[channel] = True
            self._changed.notify_all()
            try:
                self._wait(channel, lambda: self._is_next(channel))
            except BaseException:
                self._asks[channel] = False
                raise
            self._launching.add(thread)
        try:
            yield
        finally:
            with self._changed:
                self._launching.remove(thread)
                self._asks[channel] = False
                self._launched[channel] += 1
                self._changed.notify_all()

    def until_the_other_asks(self, channel: int) -> None:
        """Within a turn: wait until the other way has queued all that it computes before its next exchange.

        Raises:
            RuntimeError: it did not ask in time.
        """
        with self._changed:
            self._wait(channel, lambda: self._asks[1 - channel] or self._ended[1 - channel])

    def end(self, channel: int) -> None:
        """It launches nothing any more, having done its work or failed."""
        with self._changed:
            self._ended[channel] = True
            self._changed.notify_all()

    def _wait(self, channel: int, ready: Callable[[], bool]) -> None:
        if not self._changed.wait_for(ready, self._seconds):
            awaited = self._launched[1 - channel] + 1
            raise RuntimeError(
                f"of two batches at once, {_NAMES[1 - channel]} did not reach its exchange {awaited} "
                f"within {self._seconds:g} s; exchange {self._launched[channel] + 1} of {_NAMES[channel]} waited for it"
            )

    def _is_next(self, channel: int) -> bool:
        other = 1 - channel
        return self._ended[other] or self._launched[other] >= self._launched[channel] + channel
