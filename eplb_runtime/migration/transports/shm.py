"""Shared memory between ranks of one node, on the CPU: who sends writes straight into the memory of who receives.

Memory that `SharedMemory.empty` gives is shared; a message that is received into other memory is copied once more. A
thread does the writing while anything is pending, and none runs otherwise. A rank that gives up closes its card: nobody
begins to write to it any more, and who is in the middle of a piece is waited for, or cut off by other memory put in its
place.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ...checksum import HASH_BLOCK_BYTES
from ...host_bytes import copy, copy_and_hash
from .base import Message, Pending, Transport, TransportError
from .counted import Counted, to_others
from .neighbours import Card, Inbox, Kind, Neighbour, Note, meet_all, wait_for
from .segments import Segment, open_segment

logger = logging.getLogger("eplb_runtime")

SHARED_BYTES = 1 << 20
"""Memory of at least so many bytes is shared; each piece of it takes a descriptor."""
PIECE_BYTES = 8 << 20
"""Written at once; between two pieces a rank looks whether anybody has given up."""
LOOK_SECONDS = 0.5
"""So often a rank that waits looks at its neighbours' cards, should a note have found no room."""
FENCE_SECONDS = 0.25
"""Who has given up waits so long for a neighbour in the middle of a piece."""


def missing(device: torch.device) -> str:
    """What this process lacks to share memory; empty: nothing."""
    if device.type != "cpu":
        return f"it carries between CPUs, not on {device.type}"
    try:
        segment = Segment(mmap.PAGESIZE)
        open_segment(os.getpid(), segment.descriptor, segment.identity, segment.nbytes)
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:  # not on this kernel, or not on this system at all
        return f"no memory can be shared here: {error}"
    return ""


class _Shared(Counted):
    """Attributes:
    spare: shared memory for what is received elsewhere.
    """

    spare: Segment | None = None


@dataclass
class _Send:
    data: Tensor
    hashes: Tensor | None
    fill: Callable[[], None] | None
    pending: _Shared
    done: int = 0


@dataclass
class _Receive:
    segment: Segment
    into: Tensor | None
    """Where the bytes go from the segment; None: they are where they should be."""
    at: Tensor | None
    number: int
    pending: _Shared


@dataclass
class _Traffic:
    """With one neighbour, in order.

    Args:
        sends: messages that are not written yet.
        offers: memory of the neighbour's for the next of them.
        receives: messages that were offered memory and are not here yet.
        mapped: segments of the neighbour's by identity.
        problem: why nothing goes this way any more.
    """

    sends: deque[_Send] = field(default_factory=deque)
    offers: deque[Note] = field(default_factory=deque)
    receives: deque[_Receive] = field(default_factory=deque)
    mapped: dict[int, Tensor] = field(default_factory=dict)
    problem: str = ""


class SharedMemory(Transport):
    """Writes into the memory of other processes, and hashes on the way.

    Args:
        group: the migration group; only used to find each other.
        backend: its backend's name.
        device: the model's; the CPU.
        timeout_seconds: nothing that was posted is waited for longer, whatever the deadline.
        peers: the ranks of this node that will be sent to; None: all of the group.

    Raises:
        TransportError: the model is not on a CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        device: torch.device,
        timeout_seconds: float,
        peers: Sequence[int] | None = None,
    ) -> None:
        if device.type != "cpu":
            raise TransportError(f"transport 'shm' carries experts between CPUs, not on {device.type}")
        self.device = torch.device("cpu")
        self.hashes = self.one_by_one = True
        self._group = group
        self._rank = group.rank()
        self._timeout = timeout_seconds
        everybody = range(group.size()) if peers is None else peers
        self._peers = [peer for peer in everybody if peer != self._rank]
        self._state = threading.Condition(threading.RLock())
        self._inbox = Inbox()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._card = Card(group.size())
        self._neighbours: dict[int, Neighbour] = {}
        self._traffic: dict[int, _Traffic] = {}
        self._segments: list[Segment] = []
        self._spare: list[Segment] = []
        self._freed: deque[int] = deque()
        self._pending: list[_Shared] = []
        self._thread: threading.Thread | None = None
        self._copying = False
        self._problem = ""
        self._closed = False

    def warm_up(self, deadline: float) -> None:
        try:
            self._neighbours = meet_all(self._group, self.device, self._inbox, self._card, self._peers, deadline)
            self._traffic = {peer: _Traffic() for peer in self._peers}
            self._say_hello(deadline)
        except BaseException:
            self.close()
            raise

    def empty(self, nbytes: int) -> Tensor:
        if nbytes < SHARED_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._state:
            self._segments = [segment for segment in self._segments if segment.alive]
            self._segments.append(Segment(nbytes, self._freed.append))
            return self._segments[-1].hand_out()

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        out, into = to_others(self._rank, sends, receives)
        with self._state:
            for peer in {message.peer for message in (*out, *into)}:
                self._refuse_if_lost(peer)
            pending = _Shared(len(out) + len(into), time.monotonic() + self._timeout, self.give_up)
            numbers = pending.expect(self._rank, receives)
            if not pending.left:
                return pending
            self._pending.append(pending)
            self._tell_what_is_gone()
            self._offer(into, numbers, pending)
            for message in out:
                send = _Send(message.data.detach(), message.hashes, message.fill, pending)
                self._traffic[message.peer].sends.append(send)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="eplb_runtime transport")
                self._thread.start()
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
        for neighbour in self._neighbours.values():
            neighbour.close()
        self._traffic.clear()
        self._inbox.close()
        os.close(self._wake)

    def give_up(self, pending: Counted, reason: str) -> None:
        """End everything that is not done yet; afterwards nothing of it is read or written."""
        with self._state:
            if not pending.finished.is_set():
                self._give_up(reason)
                if not self._closed:
                    os.eventfd_write(self._wake, 1)

    # -- meeting -------------------------------------------------------------------------------------------------------

    def _say_hello(self, deadline: float) -> None:
        out, arrived = self.empty(1).zero_(), self.empty(len(self._peers))
        self.post(
            [Message(peer, out) for peer in self._peers],
            [Message(peer, arrived[index : index + 1]) for index, peer in enumerate(self._peers)],
        ).wait(deadline)

    # -- posting -------------------------------------------------------------------------------------------------------

    def _refuse_if_lost(self, peer: int) -> None:
        if self._problem:
            raise TransportError(f"shared memory is not used any more: {self._problem}")
        traffic = self._traffic.get(peer)
        if traffic is None:
            raise TransportError(f"EP rank {peer} is not connected by shared memory")
        if traffic.problem:
            raise TransportError(traffic.problem)

    def _offer(self, messages: Sequence[Message], numbers: Sequence[int], pending: _Shared) -> None:
        places = [self._place_of(message.data) for message in messages]
        elsewhere = sum(message.data.numel() for message, place in zip(messages, places, strict=True) if not place)
        spare = self._take_spare(elsewhere, pending) if elsewhere else None
        used = 0
        for number, message, place in zip(numbers, messages, places, strict=True):
            nbytes = message.data.numel()
            if place is not None:
                segment, offset = place
                receive = _Receive(segment, None, None, number, pending)
            else:
                assert spare is not None
                segment, offset = spare, used
                receive = _Receive(spare, message.data, spare.tensor[used : used + nbytes], number, pending)
                used += nbytes
            note = Note(Kind.OFFER, self._rank, segment.identity, segment.descriptor, segment.nbytes, offset, nbytes)
            self._traffic[message.peer].receives.append(receive)
            self._tell(message.peer, note)

    def _place_of(self, data: Tensor) -> tuple[Segment, int] | None:
        """The shared memory that a tensor is part of."""
        address, nbytes = data.data_ptr(), data.numel()
        for segment in self._segments:
            if segment.holds(address, nbytes):
                return segment, address - segment.address
        return None

    def _take_spare(self, nbytes: int, pending: _Shared) -> Segment:
        """Shared memory for messages that are received into other memory; kept for the next ones."""
        fitting = [segment for segment in self._spare if segment.nbytes >= nbytes]
        spare = min(fitting, key=lambda segment: segment.nbytes) if fitting else None
        if spare is None:
            spare = Segment(max(nbytes, 1 << 16), self._freed.append)
        else:
            self._spare.remove(spare)
        pending.spare = spare
        return spare

    def _tell(self, peer: int, note: Note, told: _Shared | None = None) -> None:
        written = told.one_done if told is not None else _nothing
        self._neighbours[peer].outbox.append((note.encode(), written))

    def _tell_what_is_gone(self) -> None:
        while self._freed:
            identity = self._freed.popleft()
            for peer, traffic in self._traffic.items():
                if not traffic.problem:
                    self._tell(peer, Note(Kind.FREED, self._rank, identity))

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Until nothing is pending."""
        try:
            with torch.no_grad():
                while self._step():
                    pass
        except BaseException as error:
            logger.exception("the thread that writes to shared memory has failed")
            with self._state:
                self._copying, self._thread = False, None
                self._give_up(f"{type(error).__name__}: {error}")
                self._state.notify_all()

    def _step(self) -> bool:
        """Hear, say, and write one piece, or wait for something to happen. Whether to go on."""
        with self._state:
            self._listen()
            self._bring_up_to_date()
            if not self._pending:
                self._thread = None
                return False
            piece = self._next_piece()
            self._copying = piece is not None
            waiting = [n.inbox for n in self._neighbours.values() if n.outbox]
            ends = [n.end for p, n in self._neighbours.items() if not self._traffic[p].problem]
            seconds = max(0.0, min(LOOK_SECONDS, min(p.end for p in self._pending) - time.monotonic()))
        if piece is None:
            wait_for([self._inbox.reading, self._wake, *ends], waiting, seconds)
            return True
        try:
            self._write(*piece)
        finally:
            with self._state:
                self._copying = False
                self._state.notify_all()
        return True

    def _listen(self) -> None:
        """Hear what the neighbours say; who has ended or closed may have said something before."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        gone = {
            peer: "its process has ended" if neighbour.ended else "it has given up"
            for peer, neighbour in self._neighbours.items()
            if not self._traffic[peer].problem and (neighbour.closed or neighbour.ended)
        }
        for note in self._inbox.read():
            self._hear(note)
        for peer, why in gone.items():
            self._lose(peer, f"EP rank {peer} does not answer: {why}")

    def _hear(self, note: Note) -> None:
        traffic = self._traffic.get(note.source)
        if traffic is None or traffic.problem:
            return
        if note.kind == Kind.OFFER:
            traffic.offers.append(note)
        elif note.kind == Kind.FREED:
            traffic.mapped.pop(note.identity, None)
        elif note.kind == Kind.GOODBYE:
            self._lose(note.source, f"EP rank {note.source} does not answer: it has given up")
        elif traffic.receives:
            receive = traffic.receives.popleft()
            if receive.into is not None and receive.at is not None:
                copy(receive.into, receive.at)
            receive.pending.here[receive.number] = 1
            receive.pending.one_done()

    def _bring_up_to_date(self) -> None:
        """Write what can be said, and leave out what is over."""
        for neighbour in self._neighbours.values():
            neighbour.send()
        if any(time.monotonic() > pending.end for pending in self._pending):
            self._give_up("messages through shared memory were not through in time")
        for pending in self._pending:
            if pending.finished.is_set() and pending.spare is not None and not pending.problem:
                self._spare.append(pending.spare)
                pending.spare = None
        self._pending = [pending for pending in self._pending if not pending.finished.is_set()]

    def _next_piece(self) -> tuple[int, _Send, Note] | None:
        """A neighbour that has offered memory for what is to be sent to it; each gets a message in turn."""
        for peer, traffic in self._traffic.items():
            if traffic.sends and traffic.offers and not traffic.problem:
                return peer, traffic.sends[0], traffic.offers[0]
        return None

    def _write(self, peer: int, send: _Send, offer: Note) -> None:
        """Write the next piece of a message, unless its receiver has given up.

        This rank says that it writes before it looks at the receiver's card, and the receiver closes its card before
        it looks whether anybody writes: one of both sees the other. Between store and look there is a lock taken and
        released, which orders them on every processor.
        """
        total = send.data.numel()
        if total != offer.nbytes:
            self._fail(f"EP rank {peer} expects {offer.nbytes} bytes and is sent {total}")
            return
        try:
            target = self._mapping(peer, offer)[offer.offset : offer.offset + offer.nbytes]
        except (OSError, RuntimeError) as error:
            self._fail(f"memory of EP rank {peer} cannot be opened: {error}")
            return
        first, end = send.done, min(send.done + PIECE_BYTES, total)
        self._card.write_to(peer, True)
        try:
            with self._state:
                closed = self._neighbours[peer].closed
            if not closed:
                if send.fill is not None and not first:
                    send.fill()
                _write_piece(target, send, first, end)
        finally:
            with self._state:
                self._card.write_to(peer, False)
        with self._state:
            if closed:
                self._lose(peer, f"EP rank {peer} does not answer: it has given up")
            elif not self._problem:
                send.done = end
                if end == total:
                    self._traffic[peer].sends.popleft()
                    self._traffic[peer].offers.popleft()
                    self._tell(peer, Note(Kind.WRITTEN, self._rank), send.pending)
                    # Another neighbour's turn.
                    self._traffic[peer] = self._traffic.pop(peer)

    def _mapping(self, peer: int, offer: Note) -> Tensor:
        mapped = self._traffic[peer].mapped
        if offer.identity not in mapped:
            process = self._neighbours[peer].process
            mapped[offer.identity] = open_segment(process, offer.descriptor, offer.identity, offer.size)
        return mapped[offer.identity]

    # -- the end -------------------------------------------------------------------------------------------------------

    def _lose(self, peer: int, problem: str) -> None:
        """Nothing comes from or goes to a neighbour any more."""
        traffic = self._traffic[peer]
        if traffic.problem:
            return
        traffic.problem = problem
        self._neighbours[peer].outbox.clear()
        if traffic.sends or traffic.receives:
            self._give_up(problem)
        traffic.offers.clear()
        traffic.mapped.clear()

    def _fail(self, problem: str) -> None:
        with self._state:
            self._give_up(problem)

    def _give_up(self, problem: str) -> None:
        """End all that is pending, on this rank and, since it was told, on those that it has to do with."""
        if not self._problem:
            self._problem = problem
            self._card.close()
            goodbye = Note(Kind.GOODBYE, self._rank)
            for peer, neighbour in self._neighbours.items():
                if not self._traffic[peer].problem:
                    self._tell(peer, goodbye)
                    neighbour.send()
        while self._copying and threading.current_thread() is not self._thread:
            self._state.wait()
        end = time.monotonic() + FENCE_SECONDS
        for peer, traffic in self._traffic.items():
            if traffic.receives:
                self._keep_out(self._neighbours[peer], traffic, end)
            traffic.sends.clear()
            traffic.receives.clear()
        for pending in self._pending:
            pending.fail(problem)

    def _keep_out(self, neighbour: Neighbour, traffic: _Traffic, end: float) -> None:
        """Let nothing more be written into what this neighbour was offered."""
        while neighbour.writes_to(self._rank) and not neighbour.ended:
            if time.monotonic() > end:
                for segment in {id(receive.segment): receive.segment for receive in traffic.receives}.values():
                    segment.part_from_others()
                return
            time.sleep(0.0002)


def _write_piece(target: Tensor, send: _Send, first: int, end: int) -> None:
    """Bytes ``first`` to ``end`` of a message; a piece begins at a whole block."""
    if send.hashes is None:
        copy(target[first:end], send.data[first:end])
    else:
        blocks = slice(first // HASH_BLOCK_BYTES, end // HASH_BLOCK_BYTES)
        copy_and_hash(target[first:end], send.data[first:end], send.hashes[blocks])


def _nothing() -> None:
    """For notes whose writing nobody waits for."""
