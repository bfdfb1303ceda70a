"""Writes into windows: memory that other ranks write into.

A message goes in pieces through the window of who receives: a piece is written when the peer has room for it, then a
note that it is there; the peer copies it to where it belongs, then notes that there is room again. A thread looks at
notes while anything is pending. Nothing is written but windows: who gives up has nothing to fear from a peer that comes
late. What a window lies in, and how writes and notes travel, is each transport's own.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.text import one_line
from ...utils.worker import ignore_captures_of_others
from ..consensus import TransportError
from .base import LEFT_SECONDS, Message, Pending, PendingMessages, SideStream, Transport, synchronize, wait_until

LOOK_SECONDS = 0.0002
INBOX_BYTES, LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 512 << 20, 64 << 10, 16 << 20
"""All that other ranks write into, and what goes at once."""
HALVES = 2
"""While one piece is copied out, the next comes in."""
ASK_SECONDS = 0.2
"""So often a rank that waits for another looks whether it is still there."""
_NOTE = 2
"""A number and its complement: who reads one while it is written sees that they do not fit."""
KINDS = 3
ARRIVED, TAKEN, GOODBYE = range(KINDS)
"""Notes: pieces that were written to you, pieces of yours that were copied out, and that nothing comes any more."""


Put = Callable[[Tensor, Tensor, int], object]


class Window(ABC):
    """What other ranks write into, the same on every rank: uint8 ``memory`` of this one, ``piece_bytes`` B at once.
    ``inbox_RHB``: uint8 ``[R, 2, B]``, pieces from each rank; ``released``: whether its user has done with it."""

    def __init__(self, memory: Tensor, rank: int, num_ranks: int, piece_bytes: int) -> None:
        self.released = False
        self.piece_bytes = piece_bytes
        self._rank = rank
        inbox = num_ranks * HALVES * piece_bytes
        self.inbox_RHB = memory[:inbox].view(num_ranks, HALVES, piece_bytes)
        self._rest = memory[inbox:]

    def begin(self, deadline: float) -> None:  # noqa: B027 (notes may not be memory)
        """Forget notes of who used it before; no rank writes yet."""

    @abstractmethod
    def write(self, peer: int, half: int, data: Tensor) -> None:
        """Put a piece into a rank's inbox; it is there when a note sent after it is."""

    @abstractmethod
    def tell(self, peer: int, kind: int, number: int) -> Callable[[], bool]:
        """Tell a rank a number, after all that was written before and all that the stream has to do. Returns what asks
        whether it has left."""

    @abstractmethod
    def notes(self) -> Sequence[Sequence[int]] | None:
        """Return the newest number of each kind from each rank, ``[R][kinds]``; None: they are on their way. Nothing
        waits."""

    def ask(self, peer: int) -> None:  # noqa: B027 (most libraries cannot tell)
        """Raise RuntimeError if a rank that something is awaited from is known to be gone."""

    def settle(self) -> None:  # noqa: B027 (writes may be in order)
        """What was written is there when a note sent after it is."""


class StreamWindow(Window):
    """A window that others write into on streams: notes are memory, too. ``put(place, source, peer)`` copies on the
    stream to where that rank has ``place``, which is this rank's."""

    def __init__(self, memory: Tensor, rank: int, num_ranks: int, piece_bytes: int, stream: SideStream, put: Put):
        super().__init__(memory, rank, num_ranks, piece_bytes)
        self._stream, self._reading, self._put = stream, SideStream(memory.device), put
        self.outbox_B = self._rest[:piece_bytes]
        notes = self._rest[piece_bytes:].view(torch.int64).view(2, num_ranks, KINDS, _NOTE)
        self.notes_RKN, self._out_RKN = notes
        self._read_RKN = torch.zeros_like(self.notes_RKN, device="cpu", pin_memory=memory.is_cuda)
        self._are_here: Callable[[], bool] | None = None

    @staticmethod
    def nbytes(num_ranks: int, piece_bytes: int) -> int:
        return num_ranks * HALVES * piece_bytes + piece_bytes + 2 * num_ranks * KINDS * _NOTE * 8

    def begin(self, deadline: float) -> None:
        with self._stream():
            self.notes_RKN.copy_(torch.tensor([0, ~0]))
        wait_until(self._stream.mark(), deadline, "clearing notes")

    def write(self, peer: int, half: int, data: Tensor) -> None:
        self._put(self.inbox_RHB[self._rank, half, : data.numel()], data, peer)

    def tell(self, peer: int, kind: int, number: int) -> Callable[[], bool]:
        note = self._out_RKN[peer, kind]
        note.copy_(torch.tensor([number, ~number]), non_blocking=True)
        self._put(self.notes_RKN[self._rank, kind], note, peer)
        return self._stream.mark()

    def notes(self) -> Sequence[Sequence[int]] | None:
        """Take what is here, and ask for the next at the next call. Where all streams share one queue
        (`CUDA_DEVICE_MAX_CONNECTIONS=1`), even this copy comes after kernels that training has queued, and training may
        wait for the lock."""
        if self._are_here is None:
            with self._reading():
                self._read_RKN.copy_(self.notes_RKN, non_blocking=True)
            self._are_here = self._reading.mark()
        if not self._are_here():
            return None
        self._are_here = None
        notes = self._read_RKN.tolist()
        return [[number if number == ~complement else 0 for number, complement in of_rank] for of_rank in notes]


def piece_bytes_for(num_ranks: int) -> int:
    """Return the bytes that go at once between so many ranks."""
    return min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, INBOX_BYTES // (num_ranks * HALVES) // 4096 * 4096))


@dataclass
class _Piece:
    """``ends``: the last one of a message of ``pending``, which has that number among those received; None: sent."""

    data: Tensor
    pending: PendingMessages
    ends: bool
    number: int | None


@dataclass
class _Peer:
    """Traffic with one. Numbers count pieces: ``sent`` to the peer, which has copied out ``room`` of them; ``arrived``
    from it, of which ``taken`` are copied out here. ``leaving``: it gives up, and what it wrote before is still to be
    seen."""

    sends: deque[_Piece] = field(default_factory=deque)
    receives: deque[_Piece] = field(default_factory=deque)
    sent: int = 0
    room: int = 0
    arrived: int = 0
    taken: int = 0
    leaving: bool = False
    problem: str = ""


class Windows(Transport):
    """Writes into the windows of other ranks; the group is only used to meet. A thread runs while anything is pending;
    `_state` guards all of it. ``by`` is what carries, in words; ``package`` is used in the place of its library."""

    by: ClassVar[str]

    def __init__(
        self, group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float, package: Any = None
    ) -> None:
        super().__init__(group, backend, device, timeout_seconds, package)
        self._state = threading.RLock()
        self._pending: list[PendingMessages] = []
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._peers = {peer: _Peer() for peer in range(self._num_ranks) if peer != self._rank}
        self._stream = SideStream(device)
        self._window: Window | None = None
        self._under_way: list[tuple[Callable[[], bool], _Piece]] = []
        self._next_ask = 0.0
        self._closed = False

    @abstractmethod
    def _open(self, deadline: float) -> Window:
        """Make the window of this rank and open those of others. Collective."""

    def warm_up(self, deadline: float) -> None:
        if self._window is not None:
            return
        window = self._open(deadline)
        # What another transport has left on its way is over on every rank before new notes begin.
        synchronize(self.device, deadline)
        self._gather(None, deadline)
        window.begin(deadline)
        self._gather(None, deadline)
        self._window = window
        self._try_out(deadline)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        out, into = self._to_others(sends, receives)
        with self._state:
            if self._problem or self._closed or self._window is None:
                problem = self._problem or "it is not warmed up, or closed"
                raise TransportError(f"{self.by} is not used any more: {problem}")
            for message in (*out, *into.values()):
                if problem := self._peers[message.peer].problem:
                    raise TransportError(problem)
            pending = PendingMessages(len(out) + len(into), into, time.monotonic() + self._timeout, self.give_up)
            if not pending.left:
                return pending
            self._stream.after_current()
            self._pending.append(pending)
            numbered: list[tuple[int | None, Message]] = [*((None, message) for message in out), *into.items()]
            for number, message in numbered:
                traffic = self._peers[message.peer]
                parts = torch.split(message.data.detach(), self._window.piece_bytes)
                pieces = [_Piece(part, pending, part is parts[-1], number) for part in parts]
                (traffic.sends if number is None else traffic.receives).extend(pieces)
            self._run()
        return pending

    def close(self) -> None:
        """The window is its library's to free: that may wait for all ranks. A call of the library that does not come
        back is left to the thread."""
        self._closed, thread = True, self._thread
        if self._state.acquire(timeout=LEFT_SECONDS):
            try:
                if self._window is not None:
                    self._give_up("the transport is closed")
                self._window = None
            finally:
                self._state.release()
        if thread is not None:
            thread.join(LEFT_SECONDS)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Start the thread, unless it runs. The lock is held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="eplb_runtime transport")
            self._thread.start()

    def _work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread is on the first GPU, and would begin to use it
        ignore_captures_of_others()
        while True:
            with self._state:
                try:
                    went_on = not self._problem and self._go_on()
                except Exception as error:  # of the device, or of the library
                    self._give_up(one_line(error))
                    went_on = False
                self._pending = [pending for pending in self._pending if not pending.finished.is_set()]
                if not self._pending:
                    self._thread = None
                    return
            if not went_on:
                time.sleep(LOOK_SECONDS)

    def _go_on(self) -> bool:
        """Begin what can begin, end what is through; whether there was anything."""
        window, now = self._window, time.monotonic()
        assert window is not None
        if any(now > pending.end for pending in self._pending):
            self._give_up("messages were not through in time")
            return True
        self._hear(window, now)
        went_on = False
        for peer, traffic in self._peers.items():
            while traffic.sends and traffic.sent - traffic.room < HALVES and not traffic.problem:
                piece, went_on = traffic.sends.popleft(), True
                with self._stream():
                    window.write(peer, traffic.sent % HALVES, piece.data)
                    traffic.sent += 1
                    self._under_way.append((window.tell(peer, ARRIVED, traffic.sent), piece))
            while traffic.receives and traffic.taken < traffic.arrived:
                piece, went_on = traffic.receives.popleft(), True
                with self._stream():
                    inbox = window.inbox_RHB[peer, traffic.taken % HALVES]
                    piece.data.copy_(inbox[: piece.data.numel()], non_blocking=True)
                    traffic.taken += 1
                    self._under_way.append((window.tell(peer, TAKEN, traffic.taken), piece))
            if traffic.problem and (traffic.sends or traffic.receives):
                self._give_up(traffic.problem)
                return True
        return self._end_pieces() or went_on

    def _end_pieces(self) -> bool:
        """Note what is through; whether there was anything."""
        before, self._under_way = self._under_way, []
        for is_through, piece in before:
            if not is_through():
                self._under_way.append((is_through, piece))
            elif piece.ends:
                piece.pending.one_done(piece.number)
        return len(self._under_way) < len(before)

    def _hear(self, window: Window, now: float) -> None:
        """Take what notes are here."""
        if now > self._next_ask:
            self._next_ask = now + ASK_SECONDS
            for peer, traffic in self._peers.items():
                if traffic.sends or traffic.receives:
                    window.ask(peer)
        if (notes := window.notes()) is None:
            return
        for peer, traffic in self._peers.items():
            if traffic.leaving and not traffic.problem:
                traffic.problem = f"EP rank {peer} has given up"
            traffic.arrived = max(traffic.arrived, notes[peer][ARRIVED])
            traffic.room = max(traffic.room, notes[peer][TAKEN])
            traffic.leaving = bool(notes[peer][GOODBYE])

    # -- the end -------------------------------------------------------------------------------------------------------

    def give_up(self, pending: PendingMessages, reason: str) -> None:
        """End everything that is not done yet; afterwards nothing of it is read or written."""
        with self._state:
            if not pending.finished.is_set():
                self._give_up(reason)

    def _give_up(self, problem: str) -> None:
        """End all that is pending on this rank, and tell the others."""
        if self._problem:
            return
        self._problem = problem
        assert self._window is not None
        try:
            with self._stream():
                self._window.settle()
                for peer in self._peers:
                    self._window.tell(peer, GOODBYE, 1)
            wait_until(self._stream.mark(), time.monotonic() + LEFT_SECONDS, "what was under way")
            self._window.released = True
        except (RuntimeError, TransportError) as error:
            self._problem = f"{problem}; {error}"
        for traffic in self._peers.values():
            traffic.sends.clear()
            traffic.receives.clear()
        with suppress(Exception):  # of a device that is lost
            self._end_pieces()
        for pending in self._pending:
            pending.fail(self._problem)
