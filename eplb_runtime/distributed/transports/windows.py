"""Writes into windows: memory that other ranks write into.

A message goes in pieces through the window of who receives: a piece is written when the peer has room for it, then a
note that it is there; the peer copies it to where it belongs, then notes that there is room again. Notes are numbers in
the window, too, or go the library's own way. All of it goes on while somebody polls. Nothing is written but windows:
who gives up has nothing to fear from a peer that comes late.
"""

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.text import one_line
from ..consensus import TransportError, failing_together
from .base import LEFT_SECONDS, Message, Pending, SideStream, Transport, synchronize, wait_until

WINDOW_BYTES, LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 512 << 20, 64 << 10, 16 << 20
"""All of a window, and what goes at once."""
HALVES = 2  # while one piece is copied out, the next comes in
ASK_SECONDS, TURN_SECONDS = 0.2, 0.002
"""How often a rank that waits writes an empty note, as only a write shows that a rank is gone; how long a turn is."""
KINDS = 4
ARRIVED, TAKEN, GOODBYE, NOTHING = range(KINDS)
"""Notes: pieces that were written to you, pieces of yours that were copied out, and that nothing comes any more."""
_NOTE = 2
"""A number and its complement: who reads one while it is written sees that they do not fit."""

HasLeft = Callable[[], bool]
"""Asks whether a write has left."""


@dataclass(eq=False)
class _Posted(Pending):
    """Messages of one call, of which so many pieces are ``left``."""

    windows: "Windows"
    left: int = 0

    def poll(self) -> bool:
        with self.windows.state:
            if self.left:
                self.windows.go_on()
            if self.left and self.windows.problem:
                raise TransportError(self.windows.problem)
            return not self.left

    def abort(self) -> None:
        with self.windows.state:
            if self.left:
                self.windows.give_up("messages were aborted")


@dataclass
class _Peer:
    """Traffic with one peer. Numbers count pieces: ``sent`` to it, of which it has copied out ``room``; ``arrived``
    from it, of which ``taken`` are copied out here. ``leaving``: it gives up; ``gone``: and its notes are read."""

    sends: deque[tuple[Tensor, _Posted]] = field(default_factory=deque)
    receives: deque[tuple[Tensor, _Posted]] = field(default_factory=deque)
    sent = room = arrived = taken = 0
    leaving = gone = False


class Windows(Transport):
    """Writes into the windows of other ranks; the group is only used to meet. ``state`` guards all of it."""

    staged: ClassVar[bool] = True
    """Pieces are copied into this rank's window, and written from there."""

    def __init__(
        self, group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float, package: Any = None
    ) -> None:
        super().__init__(group, backend, device, timeout_seconds, package)
        self.state, self.problem = threading.RLock(), "it is not warmed up"
        self._piece_bytes, self._next_ask = 0, 0.0
        self._peers = {peer: _Peer() for peer in range(self._num_ranks) if peer != self._rank}
        self._stream, self._reading = SideStream(device), SideStream(device)
        # With the piece: nothing else may hold this memory, which the stream has yet to read.
        self._under_way: list[tuple[HasLeft, _Posted, Tensor]] = []
        self._notes_are_here: HasLeft | None = None

    @abstractmethod
    def _open(self, nbytes: int, deadline: float) -> Tensor:
        """Return this rank's window, uint8 and as large on every rank, and open those of others. Collective."""

    @abstractmethod
    def _put(self, place: Tensor, source: Tensor, peer: int, after: HasLeft | None = None) -> HasLeft:
        """Write to where that rank has this rank's ``place``, after the stream's work so far and write ``after``."""

    def _tell(self, peer: int, kind: int, number: int, after: HasLeft | None = None) -> HasLeft:
        """Write a note, as `_put` does, over one that the peer must have seen: it has had room for what came after."""
        note = self._out_RKHN[peer, kind, number % HALVES]
        note.copy_(torch.tensor([number, ~number]), non_blocking=True)
        return self._put(self._notes_RKHN[self._rank, kind, number % HALVES], note, peer, after)

    def _look(self) -> bool:
        """Copy the notes that are here to the host; return whether the copy is there. With one queue for all streams
        (`CUDA_DEVICE_MAX_CONNECTIONS=1`) it comes after training's kernels, and training may wait for the lock."""
        if self._notes_are_here is None:
            with self._reading():
                self._read_RKHN.copy_(self._notes_RKHN, non_blocking=True)
            self._notes_are_here = self._reading.mark()
        return self._notes_are_here()

    def _go_on_with_puts(self) -> None:
        """Do what writes need the host for; raises an error of the library if one has failed."""

    def _drop_puts(self) -> None:
        """Give up writes that have not left."""

    def _release(self) -> None:
        """Note that this rank has written its last."""

    def warm_up(self, deadline: float) -> None:
        if self._piece_bytes:
            return
        pieces = self._num_ranks * HALVES * (1 + self.staged)
        piece_bytes = min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, WINDOW_BYTES // pieces // 4096 * 4096))
        notes = 2 * self._num_ranks * KINDS * HALVES * _NOTE
        window = self._open(pieces * piece_bytes + 8 * notes, deadline)
        with failing_together(self._group, self._group_device, deadline):
            self._lay_out(window, piece_bytes)
            self.problem = ""
            # What another transport has left on its way is over on every rank before new notes begin.
            synchronize(self.device, deadline)
        with failing_together(self._group, self._group_device, deadline):
            with self._stream():
                self._notes_RKHN.copy_(torch.tensor([0, ~0]))
            wait_until(self._stream.mark(), deadline, "clearing notes")
        self._try_out(deadline)

    def _lay_out(self, window: Tensor, piece_bytes: int) -> None:
        self._piece_bytes, ranks = piece_bytes, self._num_ranks
        inbox = ranks * HALVES * piece_bytes
        boxes, notes = window.tensor_split([inbox * (1 + self.staged)])
        self._inbox_RHB = boxes[:inbox].view(ranks, HALVES, piece_bytes)
        self._outbox_RHB = boxes[-inbox:].view(ranks, HALVES, piece_bytes)
        self._notes_RKHN, self._out_RKHN = notes.view(torch.int64).view(2, ranks, KINDS, HALVES, _NOTE)
        self._read_RKHN = torch.zeros_like(self._notes_RKHN, device="cpu", pin_memory=window.is_cuda)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        both = self._to_others(sends, receives)
        with self.state:
            if self.problem:
                raise TransportError(f"{type(self).__name__} is not used any more: {self.problem}")
            posted = _Posted(self)
            self._stream.after_current()
            for messages, sent in zip(both, (True, False), strict=True):
                for message in messages:
                    traffic = self._peers[message.peer]
                    pieces = torch.split(message.data.detach(), self._piece_bytes)
                    (traffic.sends if sent else traffic.receives).extend((piece, posted) for piece in pieces)
                    posted.left += len(pieces)
            self.go_on()
        return posted

    def close(self) -> None:
        """Call `give_up`, unless the lock is held for 5 s. The window is not freed: that may wait for all ranks."""
        if self.state.acquire(timeout=LEFT_SECONDS):
            try:
                self.give_up("the transport is closed")
            finally:
                self.state.release()

    # -- the protocol; the lock is held --------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Start and finish pieces of messages for up to 2 ms. An error makes this rank `give_up`. The lock is held."""
        end = time.monotonic() + TURN_SECONDS
        try:
            while not self.problem and self._step() and time.monotonic() < end:
                pass
        except Exception as error:  # of the device, or of the library
            self.give_up(one_line(error))

    def _step(self) -> bool:
        """Return whether anything began or ended."""
        self._hear()
        self._go_on_with_puts()
        went_on = False
        for peer, traffic in self._peers.items():
            while traffic.sends and traffic.sent - traffic.room < HALVES and not traffic.leaving:
                (data, posted), went_on = traffic.sends.popleft(), True
                traffic.sent += 1
                half, source = traffic.sent % HALVES, data
                with self._stream():
                    if self.staged:
                        source = self._outbox_RHB[peer, half, : data.numel()].copy_(data, non_blocking=True)
                    piece = self._put(self._inbox_RHB[self._rank, half, : data.numel()], source, peer)
                    self._under_way.append((self._tell(peer, ARRIVED, traffic.sent, piece), posted, data))
            while traffic.receives and traffic.taken < traffic.arrived:
                (data, posted), went_on = traffic.receives.popleft(), True
                traffic.taken += 1
                with self._stream():
                    data.copy_(self._inbox_RHB[peer, traffic.taken % HALVES, : data.numel()], non_blocking=True)
                    self._under_way.append((self._tell(peer, TAKEN, traffic.taken), posted, data))
            if traffic.gone and (traffic.sends or traffic.receives):
                self.give_up(f"EP rank {peer} has given up")
                return True
        return self._end_pieces() or went_on

    def _end_pieces(self) -> bool:
        """Note what is through; return whether there was anything."""
        before, self._under_way = self._under_way, []
        for has_left, posted, data in before:
            if has_left():
                posted.left -= 1
            else:
                self._under_way.append((has_left, posted, data))
        return len(self._under_way) < len(before)

    def _hear(self) -> None:
        """Take what notes are here, and only then ask who has not left: to one who has, a note may fail."""
        if self._look():
            self._notes_are_here = None
            numbers, complements = self._read_RKHN.unbind(-1)
            notes_RKH = torch.where(numbers == ~complements, numbers, 0).tolist()
            for peer, traffic in self._peers.items():
                traffic.gone = traffic.leaving
                traffic.arrived = _counted(traffic.arrived, notes_RKH[peer][ARRIVED])
                traffic.room = _counted(traffic.room, notes_RKH[peer][TAKEN])
                traffic.leaving = any(notes_RKH[peer][GOODBYE])
        if (now := time.monotonic()) > self._next_ask:
            self._next_ask = now + ASK_SECONDS
            for peer, traffic in self._peers.items():
                if (traffic.sends or traffic.receives) and not traffic.leaving:
                    with self._stream():
                        self._tell(peer, NOTHING, 0)

    def give_up(self, problem: str) -> None:
        """Set ``problem``, end all that is pending on this rank, and tell the others; only the first time."""
        if self.problem:
            return
        with suppress(Exception):
            self._hear()  # who has left is not told
        self.problem = problem
        try:
            self._drop_puts()
            with self._stream():
                for peer in (peer for peer, traffic in self._peers.items() if not traffic.leaving):
                    self._tell(peer, GOODBYE, 1, after=lambda: True)
            wait_until(self._stream.mark(), time.monotonic() + LEFT_SECONDS, "what was under way")
            self._release()
            self._go_on_with_puts()
        except Exception as error:
            self.problem = f"{problem}; {one_line(error)}"
        self._peers.clear()
        with suppress(Exception):  # of a device that is lost
            self._end_pieces()


def _counted(count: int, notes: Sequence[int]) -> int:
    """Return the count with those that follow it: notes may overtake each other."""
    while notes[(count + 1) % HALVES] == count + 1:
        count += 1
    return count
