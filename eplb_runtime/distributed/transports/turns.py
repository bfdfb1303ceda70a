"""Whose call of a library comes next, where two threads of a rank make calls that all ranks must make in one order.

Tokens go in the order of the program, which is the same on every rank. What goes beside them is put in at one place of
that order: each rank holds its tokens and says how many calls it has begun, the largest number is the place, and no
rank begins another call before what goes beside them is through.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from .base import TransportError


class Turns:
    """The calls of one rank. The tokens' side costs a lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = self._ended = 0
        self._most: int | None = None
        self._holder: object = None

    @contextlib.contextmanager
    def of_tokens(self) -> Iterator[None]:
        """One call with tokens; waits while they are held."""
        with self._changed:
            while self._most is not None and self._begun >= self._most:
                self._changed.wait()
            self._begun += 1
        try:
            yield
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    def hold(self, holder: object, deadline: float) -> int:
        """From here on no call with tokens begins; how many have.

        One at a time holds them: what goes when all ranks are ready has this rank's buffer to itself, and two that hold
        different ranks end by their deadlines.

        Args:
            holder: who holds them from now on; once again changes nothing.
            deadline: a time of `time.monotonic`, for another one to let go.

        Raises:
            TransportError: another one did not.
        """
        with self._changed:
            while self._holder not in (None, holder):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TransportError(
                        "another model of this process has experts on their way by the same buffer: it was not through "
                        "in time; give one of the two another transport"
                    )
            self._holder, self._most = holder, self._begun
            return self._begun

    def reach(self, number: int, deadline: float) -> None:
        """Let tokens go on to this number of calls and wait until those are made; they stay held.

        Args:
            number: the largest that a rank's `hold` gave.
            deadline: a time of `time.monotonic`.

        Raises:
            TransportError: this rank's tokens did not get there in time.
        """
        with self._changed:
            self._most = number
            self._changed.notify_all()
            while self._ended < number:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TransportError("tokens that go by DeepEP before were not through in time")

    def release(self, holder: object) -> None:
        """Tokens go on, unless somebody else holds them."""
        with self._changed:
            if self._holder is holder:
                self._holder = self._most = None
                self._changed.notify_all()
