"""Messages that a thread of a transport carries: what is left of them, their end, and their failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from .base import Message, Pending, Transport, TransportError


class PendingMessages(Pending):
    """Messages in flight, counted by the transport's thread: how many are left, until when, which have arrived
    (``here``; empty: it cannot tell), why they have failed. ``finished`` is set when all are done, or none will be."""

    def __init__(self, left: int, end: float, give_up: Callable[[PendingMessages, str], None]) -> None:
        self._give_up = give_up
        self.left = left
        self.end = end
        self.problem = ""
        self.here = bytearray()
        self.finished = threading.Event()
        if not left:
            self.finished.set()

    def expect(self, rank: int, receives: Sequence[Message]) -> list[int]:
        """Return the numbers of those of them that come from other ranks and are not empty."""
        self.here = bytearray(message.peer == rank or not message.data.numel() for message in receives)
        return [number for number, here in enumerate(self.here) if not here]

    def has(self, index: int) -> bool:
        return self.poll() or (bool(self.here) and bool(self.here[index]))

    def one_done(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.finished.set()

    def fail(self, problem: str) -> None:
        if not self.finished.is_set():
            self.problem = problem
            self.finished.set()

    def poll(self) -> bool:
        if not self.finished.is_set():
            return False
        self._raise_if_failed()
        return True

    def wait(self, deadline: float) -> None:
        if not self.finished.wait(max(0.0, deadline - time.monotonic())):
            self._give_up(self, "messages were not through in time")
        if not self.finished.is_set():
            raise TransportError("messages were given up, and are not told of any more")
        self._raise_if_failed()

    def abort(self) -> None:
        self._give_up(self, "messages were aborted")

    def _raise_if_failed(self) -> None:
        if self.problem:
            raise TransportError(self.problem)


def to_others(rank: int, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Return those of them that go to and come from other ranks and are not empty; this rank's own are copied at
    once."""
    own = ([message.data for message in messages if message.peer == rank] for messages in (receives, sends))
    for arrived, sent in zip(*own, strict=True):
        arrived.copy_(sent)
    others = ([m for m in messages if m.peer != rank and m.data.numel()] for messages in (sends, receives))
    out, into = others
    return out, into


def try_out(transport: Transport, peers: Iterable[int], deadline: float) -> None:
    """Send a byte to each of these peers, and receive one from each, in one call."""
    others = list(peers)
    out, arrived = transport.empty(1).zero_(), transport.empty(max(1, len(others)))
    transport.post(
        [Message(peer, out) for peer in others],
        [Message(peer, arrived[index : index + 1]) for index, peer in enumerate(others)],
    ).wait(deadline)
