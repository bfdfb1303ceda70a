"""One progress base of the transports that have a thread of their own: what is pending, its end, and its failure.

A thread runs while anything is pending, and none runs otherwise. How bytes move is each transport's own.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Generic, TypeVar

import torch

from ...utils.worker import ignore_captures_of_others
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
        self._raise_if_failed()

    def abort(self) -> None:
        self._give_up(self, "messages were aborted")

    def _raise_if_failed(self) -> None:
        if self.problem:
            raise TransportError(self.problem)


Posted = TypeVar("Posted", bound=PendingMessages)


class ProgressTransport(Transport, Generic[Posted]):
    """A transport whose thread carries what is pending. `_state` guards all of it; ``by`` is what carries, in words."""

    by: ClassVar[str]

    def __init__(self, rank: int, timeout_seconds: float) -> None:
        self._rank = rank
        self._timeout = timeout_seconds
        self._state = threading.Condition(threading.RLock())
        self._pending: list[Posted] = []
        self._thread: threading.Thread | None = None
        self._problem = ""

    def give_up(self, pending: PendingMessages, reason: str) -> None:
        """End everything that is not done yet; afterwards nothing of it is read or written."""
        with self._state:
            if not pending.finished.is_set():
                self._give_up(reason)

    def _run(self) -> None:
        """Start the thread, unless it runs. The lock is held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._on_thread, daemon=True, name="eplb_runtime transport")
            self._thread.start()

    def _on_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread is on the first GPU, and would begin to use it
        ignore_captures_of_others()
        self._work()

    def _require_in_use(self, why_not: str) -> None:
        """Raise `TransportError` where nothing is carried any more; ``why_not``: empty: it is."""
        if why_not:
            raise TransportError(f"{self.by} is not used any more: {why_not}")

    def _require(self, peer: int, problem: str | None) -> None:
        """Raise `TransportError` where a peer is lost; ``problem``: with it; None: there is no such peer."""
        if problem is None:
            raise TransportError(f"EP rank {peer} is not connected by {self.by}")
        if problem:
            raise TransportError(problem)

    def _drop_finished(self) -> None:
        """Forget what is done or has failed. The lock is held."""
        self._pending = [pending for pending in self._pending if not pending.finished.is_set()]

    def _is_late(self) -> bool:
        now = time.monotonic()
        return any(now > pending.end for pending in self._pending)

    @abstractmethod
    def _work(self) -> None:
        """Run on the thread until nothing is pending; set ``_thread`` to None, with the lock held, at the end."""

    @abstractmethod
    def _give_up(self, problem: str) -> None:
        """End all that is pending, on this rank and on those that it has to do with. The lock is held."""


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
