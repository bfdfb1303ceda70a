"""Shared memory between ranks of one node, on the CPU: who sends writes straight into the memory of who receives.

Memory that `SharedMemory.empty` gives is shared; a message that is received into other memory is copied once more. A
thread does the writing while anything is pending, and none runs otherwise. A rank that gives up closes its card: nobody
begins to write to it any more, and who is in the middle of a piece is waited for, or cut off by other memory put in its
place.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.checksums import HASH_BLOCK_BYTES
from ...utils.checksums_numba import copy, copy_and_hash
from .base import Message, TransportError
from .neighbours import Kind, Neighbour, Notification
from .progress import PendingMessages, try_out
from .segments import Segment, open_segment
from .within_node import Traffic, WithinNode

SHARED_BYTES = 1 << 20
"""Memory of at least so many bytes is shared; each piece of it takes a descriptor."""
PIECE_BYTES = 8 << 20
"""Written at once; between two pieces a rank looks whether anybody has given up."""
FENCE_SECONDS = 0.25
"""Who has given up waits so long for a neighbour in the middle of a piece."""


def why_not(device: torch.device) -> str:
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


class _Shared(PendingMessages):
    """Attributes:
    spare: shared memory for what is received elsewhere.
    """

    spare: Segment | None = None


@dataclass
class _ShmSend:
    data: Tensor
    hashes: Tensor | None
    fill: Callable[[], None] | None
    pending: _Shared
    done: int = 0


@dataclass
class _ShmReceive:
    segment: Segment
    into: Tensor | None
    """Where the bytes go from the segment; None: they are where they should be."""
    at: Tensor | None
    number: int
    pending: _Shared


@dataclass
class _ShmTraffic(Traffic):
    """Args:
    sends: messages that are not written yet.
    receives: messages that were offered memory and are not here yet.
    mapped: segments of the neighbour's by identity.
    """

    sends: deque[_ShmSend] = field(default_factory=deque)
    receives: deque[_ShmReceive] = field(default_factory=deque)
    mapped: dict[int, Tensor] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return bool(self.sends or self.receives)

    def drop(self) -> None:
        self.sends.clear()
        self.receives.clear()

    def forget(self) -> None:
        super().forget()
        self.mapped.clear()


class SharedMemory(WithinNode[_Shared, _ShmTraffic]):
    """Writes into the memory of other processes, and hashes on the way.

    Args:
        group, timeout_seconds, peers: as of `WithinNode`.
        backend: of the group, by name.
        device: the model's; the CPU.

    Raises:
        TransportError: the model is not on a CPU.
    """

    by = "shared memory"

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
        super().__init__(group, self.device, timeout_seconds, peers)
        self.hashes = self.one_by_one = True
        self._segments: list[Segment] = []
        self._spare: list[Segment] = []
        self._freed: deque[int] = deque()
        self._copying = False

    def empty(self, nbytes: int) -> Tensor:
        if nbytes < SHARED_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._state:
            self._segments = [segment for segment in self._segments if segment.alive]
            self._segments.append(Segment(nbytes, self._freed.append))
            return self._segments[-1].hand_out()

    def _new_traffic(self) -> _ShmTraffic:
        return _ShmTraffic()

    def _new_pending(self, messages: int, end: float) -> _Shared:
        return _Shared(messages, end, self.give_up)

    def _try_out(self, deadline: float) -> None:
        try_out(self, self._peers, deadline)

    # -- posting -------------------------------------------------------------------------------------------------------

    def _take_on(
        self, out: Sequence[Message], into: Sequence[Message], numbers: Sequence[int], pending: _Shared
    ) -> None:
        self._offer(into, numbers, pending)
        for message in out:
            send = _ShmSend(message.data.detach(), message.hashes, message.fill, pending)
            self._traffic[message.peer].sends.append(send)

    def _offer(self, messages: Sequence[Message], numbers: Sequence[int], pending: _Shared) -> None:
        places = [self._place_of(message.data) for message in messages]
        elsewhere = sum(message.data.numel() for message, place in zip(messages, places, strict=True) if not place)
        spare = self._take_spare(elsewhere, pending) if elsewhere else None
        used = 0
        for number, message, place in zip(numbers, messages, places, strict=True):
            nbytes = message.data.numel()
            if place is not None:
                segment, offset = place
                receive = _ShmReceive(segment, None, None, number, pending)
            else:
                assert spare is not None
                segment, offset = spare, used
                receive = _ShmReceive(spare, message.data, spare.tensor[used : used + nbytes], number, pending)
                used += nbytes
            note = Notification(
                Kind.OFFER, self._rank, segment.identity, segment.descriptor, segment.nbytes, offset, nbytes
            )
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

    def free_spare(self) -> None:
        with self._state:
            self._spare.clear()
            self._tell_what_is_gone()

    def _tell_what_is_gone(self) -> None:
        while self._freed:
            self._notify_all(Notification(Kind.FREED, self._rank, self._freed.popleft()))

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _hear(self, note: Notification, traffic: _ShmTraffic) -> None:
        if note.kind == Kind.FREED:
            traffic.mapped.pop(note.identity, None)
        elif traffic.receives:
            receive = traffic.receives.popleft()
            if receive.into is not None and receive.at is not None:
                copy(receive.into, receive.at)
            receive.pending.here[receive.number] = 1
            receive.pending.one_done()

    def _keep(self, pending: _Shared) -> None:
        if pending.spare is not None:
            self._spare.append(pending.spare)
            pending.spare = None

    def _next(self) -> Callable[[], None] | None:
        """A piece for a neighbour that has offered memory for what is to be sent to it; each gets a message in turn."""
        for peer, traffic in self._traffic.items():
            if traffic.sends and traffic.offers and not traffic.problem:
                self._copying = True
                return partial(self._write_one_piece, peer, traffic.sends[0], traffic.offers[0])
        return None

    def _write_one_piece(self, peer: int, send: _ShmSend, offer: Notification) -> None:
        try:
            self._write(peer, send, offer)
        finally:
            with self._state:
                self._copying = False
                self._state.notify_all()

    def _write(self, peer: int, send: _ShmSend, offer: Notification) -> None:
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
                self._lose(peer, "it has given up")
            elif not self._problem:
                send.done = end
                if end == total:
                    self._traffic[peer].sends.popleft()
                    self._traffic[peer].offers.popleft()
                    self._tell(peer, Notification(Kind.WRITTEN, self._rank), send.pending.one_done)
                    # Another neighbour's turn.
                    self._traffic[peer] = self._traffic.pop(peer)

    def _mapping(self, peer: int, offer: Notification) -> Tensor:
        mapped = self._traffic[peer].mapped
        if offer.identity not in mapped:
            process = self._neighbours[peer].process
            mapped[offer.identity] = open_segment(process, offer.descriptor, offer.identity, offer.size)
        return mapped[offer.identity]

    # -- the end -------------------------------------------------------------------------------------------------------

    def _fail(self, problem: str) -> None:
        with self._state:
            self._give_up(problem)

    def _part(self, problem: str) -> str:
        while self._copying and self._thread not in (None, threading.current_thread()):
            self._state.wait()
        end = time.monotonic() + FENCE_SECONDS
        for peer, traffic in self._traffic.items():
            if traffic.receives:
                self._keep_out(self._neighbours[peer], traffic, end)
        return problem

    def _keep_out(self, neighbour: Neighbour, traffic: _ShmTraffic, end: float) -> None:
        """Let nothing more be written into what this neighbour was offered."""
        while neighbour.writes_to(self._rank) and not neighbour.ended:
            if time.monotonic() > end:
                for segment in {id(receive.segment): receive.segment for receive in traffic.receives}.values():
                    segment.part_from_others()
                return
            time.sleep(0.0002)


def _write_piece(target: Tensor, send: _ShmSend, first: int, end: int) -> None:
    """Bytes ``first`` to ``end`` of a message; a piece begins at a whole block."""
    if send.hashes is None:
        copy(target[first:end], send.data[first:end])
    else:
        blocks = slice(first // HASH_BLOCK_BYTES, end // HASH_BLOCK_BYTES)
        copy_and_hash(target[first:end], send.data[first:end], send.hashes[blocks])
