"""What transports between processes of one node have in common: they find each other, tell each other by notes what may
be read or written, from a thread that runs while anything is pending, and end together.

How bytes move is theirs: `shm` writes into the receiver's memory, `cuda_ipc` reads the sender's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from ...utils.errors import one_line
from .base import Message, Pending
from .neighbours import Kind, Mailbox, Neighbour, Notification, PeerFlags, neighbours_of, wait_for
from .progress import PendingMessages, Posted, ProgressTransport, to_others

logger = logging.getLogger("eplb_runtime")

LISTEN_SECONDS = 0.5
"""So often a rank that waits looks at its neighbours' cards, should a note have found no room."""


@dataclass
class Traffic:
    """With one neighbour, in order.

    Args:
        offers: its memory for the next messages: to be written, or to be read.
        problem: why nothing goes this way any more.
    """

    offers: deque[Notification] = field(default_factory=deque)
    problem: str = ""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether messages are on their way."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the messages that are on their way."""

    def forget(self) -> None:
        """The neighbour is gone: forget what it has said."""
        self.offers.clear()


Way = TypeVar("Way", bound=Traffic)


class WithinNode(ProgressTransport[Posted], Generic[Posted, Way]):
    """Between processes of one node.

    Args:
        group: the migration group; only used to find each other.
        group_device: that its backend works on.
        timeout_seconds: nothing that was posted is waited for longer, whatever the deadline.
        peers: the ranks of this node that will be sent to; None: all of the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        group_device: torch.device,
        timeout_seconds: float,
        peers: Sequence[int] | None,
    ) -> None:
        self._group = group
        self._group_device = group_device
        super().__init__(group.rank(), timeout_seconds)
        everybody = range(group.size()) if peers is None else peers
        self._peers = [peer for peer in everybody if peer != self._rank]
        self._inbox = Mailbox()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._card = PeerFlags(group.size())
        self._neighbours: dict[int, Neighbour] = {}
        self._traffic: dict[int, Way] = {}
        self._closed = False

    def warm_up(self, deadline: float) -> None:
        try:
            self._neighbours = neighbours_of(
                self._group, self._group_device, self._inbox, self._card, self._peers, deadline
            )
            self._traffic = {peer: self._new_traffic() for peer in self._peers}
            self._try_out(deadline)
        except BaseException:
            self.close()
            raise

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        out, into = to_others(self._rank, sends, receives)
        with self._state:
            for peer in {message.peer for message in (*out, *into)}:
                self._refuse_if_lost(peer)
            pending = self._new_pending(len(out) + len(into), time.monotonic() + self._timeout)
            numbers = pending.expect(self._rank, receives)
            if not pending.left:
                return pending
            self._pending.append(pending)
            self._tell_what_is_gone()
            self._take_on(out, into, numbers, pending)
            self._run()
            os.eventfd_write(self._wake, 1)
        return pending

    def close(self) -> None:
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._give_up("the transport is closed")
            thread = self._thread
        os.eventfd_write(self._wake, 1)
        if thread is not None:
            thread.join()
        with self._closing_memory():
            self._traffic.clear()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for neighbour in self._neighbours.values():
            neighbour.close()
        self._inbox.close()
        os.close(self._wake)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if not self._closed:  # of a model that was let go of: no thread runs, and no lock is taken here
                self._closed = True
                self._close_descriptors()

    def give_up(self, pending: PendingMessages, reason: str) -> None:
        with self._state:
            super().give_up(pending, reason)
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    # -- what they differ in; the lock is held, unless said otherwise --------------------------------------------------

    @abstractmethod
    def _new_traffic(self) -> Way: ...

    @abstractmethod
    def _new_pending(self, messages: int, end: float) -> Posted: ...

    @abstractmethod
    def _try_out(self, deadline: float) -> None:
        """Without the lock: whether bytes arrive at all."""

    @abstractmethod
    def _take_on(
        self, out: Sequence[Message], into: Sequence[Message], numbers: Sequence[int], pending: Posted
    ) -> None:
        """Put messages on their way. What is to come later is left to the thread, which may run already.

        Args:
            numbers: of those received, for `PendingMessages.here`.
        """

    @abstractmethod
    def _tell_what_is_gone(self) -> None:
        """Say which memory of this rank the others should close."""

    @abstractmethod
    def _hear(self, note: Notification, traffic: Way) -> None:
        """A neighbour says a thing other than that it ends."""

    @abstractmethod
    def _next(self) -> Callable[[], None] | None:
        """What the thread does now, without the lock; None: it waits until something happens."""

    @abstractmethod
    def _part(self, problem: str) -> str:
        """This rank has said that it ends: wait for what others, or a device, still do in memory that will be free.

        Returns:
            The problem, and what has been added to it.
        """

    def _step_on(self) -> None:
        """The thread has heard what there is to hear: begin and end what can be begun and ended."""

    def _keep(self, pending: Posted) -> None:
        """It is over and was right: take back what serves again."""

    def _closing_memory(self) -> contextlib.AbstractContextManager[object]:
        """Inside, memory of neighbours is closed."""
        return contextlib.nullcontext()

    # -- telling -------------------------------------------------------------------------------------------------------

    def _tell(self, peer: int, note: Notification, on_sent: Callable[[], None] = lambda: None) -> None:
        """``told``: called when it is written."""
        self._neighbours[peer].outbox.append((note.encode(), on_sent))

    def _notify_all(self, note: Notification) -> None:
        for peer, traffic in self._traffic.items():
            if not traffic.problem:
                self._tell(peer, note)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Until nothing is pending."""
        try:
            with torch.no_grad():
                while self._step():
                    pass
        except BaseException as error:
            logger.exception("the thread that carries experts by %s has failed", self.by)
            with self._state:
                self._thread = None
                self._give_up(f"{type(error).__name__}: {one_line(error)}")
                self._state.notify_all()

    def _step(self) -> bool:
        """Hear, begin what can begin, end what is through, say so; or wait. Whether to go on."""
        with self._state:
            self._listen()
            self._step_on()
            for neighbour in self._neighbours.values():
                neighbour.send()
            if self._is_late():
                self._give_up(f"messages by {self.by} were not through in time")
            for pending in self._pending:
                if pending.finished.is_set() and not pending.problem:
                    self._keep(pending)
            self._drop_finished()
            if not self._pending:
                self._thread = None
                return False
            work = self._next()
            full = [n.inbox for n in self._neighbours.values() if n.outbox]
            ends = [n.end for p, n in self._neighbours.items() if not self._traffic[p].problem]
            seconds = max(0.0, min(LISTEN_SECONDS, min(p.end for p in self._pending) - time.monotonic()))
        if work is None:
            wait_for([self._inbox.reading, self._wake, *ends], full, seconds)
        else:
            work()
        return True

    def _listen(self) -> None:
        """Hear what the neighbours say; who has ended or closed may have said something before."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        gone = {peer: why for peer in self._neighbours if (why := self._why_gone(peer))}
        for note in self._inbox.read():
            traffic = self._traffic.get(note.source)
            if traffic is None or traffic.problem:
                continue
            if note.kind == Kind.GOODBYE:
                self._lose(note.source, "it has given up")
            elif note.kind == Kind.OFFER:
                traffic.offers.append(note)
            else:
                self._hear(note, traffic)
        for peer, why in gone.items():
            self._lose(peer, why)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _why_gone(self, peer: int) -> str:
        neighbour = self._neighbours[peer]
        if neighbour.ended:
            return "its process has ended"
        return "it has given up" if neighbour.closed else ""

    def _refuse_if_lost(self, peer: int) -> None:
        self._require_in_use(self._problem)
        traffic = self._traffic.get(peer)
        self._require(peer, None if traffic is None else traffic.problem)

    def _lose(self, peer: int, why: str) -> None:
        """Nothing comes from or goes to a neighbour any more."""
        traffic = self._traffic[peer]
        if traffic.problem:
            return
        traffic.problem = f"EP rank {peer} does not answer: {why}"
        self._neighbours[peer].forget()
        if traffic.busy:
            self._give_up(traffic.problem)
        traffic.forget()

    def _give_up(self, problem: str) -> None:
        """End all that is pending, on this rank and, since it was told, on those that it has to do with. The card is
        closed before memory is free again."""
        if not self._problem:
            self._problem = problem
            self._card.close()
            self._notify_all(Notification(Kind.GOODBYE, self._rank))
            for neighbour in self._neighbours.values():
                neighbour.send()
        problem = self._part(problem)
        for traffic in self._traffic.values():
            traffic.drop()
        for pending in self._pending:
            pending.fail(problem)
