"""Writes on a stream into windows: memory that other ranks write into.

A message goes in pieces through the window of who receives: a piece is written when the peer has room for it, then a
note that it is there; the peer copies it to where it belongs, then notes that there is room again. A thread looks at
notes while anything is pending. Nothing is written but windows: who gives up has nothing to fear from a peer that comes
late. What a window lies in is the subclass's own.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.errors import one_line
from .base import Message, Pending, TransportError, gather_bytes
from .progress import PendingMessages, ProgressTransport, to_others, try_out
from .side_stream import LEFT_SECONDS, SideStream, wait_until

LOOK_SECONDS = 0.0002
INBOX_BYTES, LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 512 << 20, 64 << 10, 16 << 20
"""All that other ranks write into, and what goes at once."""
HALVES = 2
"""While one piece is copied out, the next comes in."""
_NOTE = 2
"""A number and its complement: who reads one while it is written sees that they do not fit."""
KINDS = 3
ARRIVED, TAKEN, GOODBYE = range(KINDS)
"""Notes: pieces that were written to you, pieces of yours that were copied out, and that nothing comes any more."""


class Window:
    """What other ranks write into, the same on every rank.

    Args:
        memory: uint8 ``[nbytes]``, of this rank.
        rank, num_ranks: of the group.
        piece_bytes: B.
        kinds: of notes.

    Attributes:
        released: whether its user reads and writes it no longer.
        inbox_RHB: uint8 ``[R, 2, B]``, pieces from each rank.
        outbox_B: uint8, what goes out.
        notes_RKN: int64 ``[R, kinds, 2]``, numbers from each rank.
    """

    def __init__(self, memory: Tensor, rank: int, num_ranks: int, piece_bytes: int, kinds: int) -> None:
        self.released = False
        self._rank = rank
        inbox, note = num_ranks * HALVES * piece_bytes, num_ranks * kinds * _NOTE * 8
        self.inbox_RHB = memory[:inbox].view(num_ranks, HALVES, piece_bytes)
        self.outbox_B = memory[inbox : inbox + piece_bytes]
        notes = memory[inbox + piece_bytes :][: 2 * note].view(torch.int64)
        self.notes_RKN = notes[: note // 8].view(num_ranks, kinds, _NOTE)
        self._out_RKN = notes[note // 8 :].view(num_ranks, kinds, _NOTE)

    @staticmethod
    def nbytes(num_ranks: int, piece_bytes: int, kinds: int) -> int:
        return num_ranks * HALVES * piece_bytes + piece_bytes + 2 * num_ranks * kinds * _NOTE * 8

    def write(self, peer: int, half: int, data: Tensor, stream: int) -> None:
        """Put a piece into a rank's inbox; it is there when what follows on the stream runs."""
        self._put(self.inbox_RHB[self._rank, half, : data.numel()], data, peer, stream)

    def settle(self, stream: int) -> None:
        """What was put is there when what follows on the stream runs."""

    def tell(self, peer: int, kind: int, number: int, stream: int) -> None:
        """Put a number into a rank's notes, after all that was put before on this stream."""
        note = self._out_RKN[peer, kind]
        note.copy_(torch.tensor([number, ~number]), non_blocking=True)
        self._put(self.notes_RKN[self._rank, kind], note, peer, stream)

    def _put(self, place: Tensor, source: Tensor, peer: int, stream: int) -> None:
        """Copy to where that rank has ``place``, which is this rank's."""
        raise NotImplementedError


def piece_bytes_for(num_ranks: int) -> int:
    """Return the bytes that go at once between so many ranks."""
    return min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, INBOX_BYTES // (num_ranks * HALVES) // 4096 * 4096))


@dataclass
class _StagedPiece:
    data: Tensor
    last_of: PendingMessages | None


@dataclass
class _Peer:
    """Traffic with one. Numbers count pieces: ``sent`` to the peer, which has copied out ``room`` of them; ``arrived``
    from it, of which ``taken`` are copied out here. ``leaving``: it gives up, and what it wrote before is still to be
    seen."""

    sends: deque[_StagedPiece] = field(default_factory=deque)
    receives: deque[_StagedPiece] = field(default_factory=deque)
    sent: int = 0
    room: int = 0
    arrived: int = 0
    taken: int = 0
    leaving: bool = False
    problem: str = ""


class Windows(ProgressTransport[PendingMessages]):
    """Writes into the windows of other ranks; the group is only used to meet."""

    def __init__(self, group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float) -> None:
        self.device = device
        self._group = group
        self._group_device = torch.device("cpu") if backend == "gloo" else device
        super().__init__(group.rank(), timeout_seconds)
        self._peers = {peer: _Peer() for peer in range(group.size()) if peer != self._rank}
        self._stream, self._reading = SideStream(device), SideStream(device)
        self._window: Window | None = None
        self._notes_RKN = torch.zeros(0)
        self._are_here: Callable[[], bool] | None = None
        self._under_way: deque[tuple[Callable[[], bool], PendingMessages]] = deque()
        self._closed = False

    @abstractmethod
    def _open(self, deadline: float) -> Window:
        """Make the window of this rank and open those of others. Collective."""

    def warm_up(self, deadline: float) -> None:
        if self._window is not None:
            return
        window = self._open(deadline)
        # What another transport has left on its way is over on every rank before notes begin anew.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        gather_bytes(b"", self._group, self._group_device, deadline)
        with self._stream():
            window.notes_RKN.copy_(torch.tensor([0, ~0]))
        wait_until(self._stream.mark(), deadline, "clearing notes")
        self._notes_RKN = torch.empty_like(window.notes_RKN, device="cpu", pin_memory=self.device.type == "cuda")
        gather_bytes(b"", self._group, self._group_device, deadline)
        self._window = window
        try_out(self, self._peers, deadline)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        out, into = to_others(self._rank, sends, receives)
        with self._state:
            for peer in {message.peer for message in (*out, *into)}:
                self._refuse_if_lost(peer)
            pending = PendingMessages(len(out) + len(into), time.monotonic() + self._timeout, self.give_up)
            if not pending.left:
                return pending
            self._stream.after_current()
            self._pending.append(pending)
            for message in out:
                self._peers[message.peer].sends.extend(self._pieces(message, pending))
            for message in into:
                self._peers[message.peer].receives.extend(self._pieces(message, pending))
            self._run()
        return pending

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        """The window is its library's to free: that may wait for all ranks."""
        with self._state:
            self._closed = True
            if self._window is not None:
                self._give_up("the transport is closed")
            thread, self._window = self._thread, None
        if thread is not None:
            thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._state:
                try:
                    went_on = not self._problem and self._go_on()
                except RuntimeError as error:  # of the device
                    self._give_up(one_line(error))
                    went_on = False
                self._drop_finished()
                if not self._pending:
                    self._thread = None
                    return
            if not went_on:
                time.sleep(LOOK_SECONDS)

    def _go_on(self) -> bool:
        """Begin what can begin, end what is through; whether there was anything."""
        assert self._window is not None
        if self._is_late():
            self._give_up("messages were not through in time")
            return True
        went_on = False
        self._read_notes(self._window)
        for peer, traffic in self._peers.items():
            while traffic.sends and traffic.sent - traffic.room < HALVES and not traffic.problem:
                self._send(self._window, peer, traffic)
                went_on = True
            while traffic.receives and traffic.taken < traffic.arrived:
                self._take(self._window, peer, traffic)
                went_on = True
            if traffic.problem and (traffic.sends or traffic.receives):
                self._give_up(traffic.problem)
                return True
        while self._under_way and self._under_way[0][0]():
            self._under_way.popleft()[1].one_done()
            went_on = True
        return went_on

    def _read_notes(self, window: Window) -> None:
        """Take what notes are here, and ask for the next. Nothing waits: where all streams share one queue
        (`CUDA_DEVICE_MAX_CONNECTIONS=1`), even this copy comes after kernels that training has queued, and training may
        wait for the lock."""
        if self._are_here is None:
            with self._reading():
                self._notes_RKN.copy_(window.notes_RKN, non_blocking=True)
            self._are_here = self._reading.mark()
        if not self._are_here():
            return
        self._are_here = None
        notes = self._notes_RKN.tolist()
        for peer, traffic in self._peers.items():
            if traffic.leaving and not traffic.problem:
                traffic.problem = f"EP rank {peer} has given up"
            numbers = [number if number == ~complement else 0 for number, complement in notes[peer]]
            traffic.arrived = max(traffic.arrived, numbers[ARRIVED])
            traffic.room = max(traffic.room, numbers[TAKEN])
            traffic.leaving = bool(numbers[GOODBYE])

    def _send(self, window: Window, peer: int, traffic: _Peer) -> None:
        piece = traffic.sends.popleft()
        with self._stream() as stream:
            window.write(peer, traffic.sent % HALVES, piece.data, stream)
            traffic.sent += 1
            window.tell(peer, ARRIVED, traffic.sent, stream)
        self._mark(piece)

    def _take(self, window: Window, peer: int, traffic: _Peer) -> None:
        piece = traffic.receives.popleft()
        with self._stream() as stream:
            inbox = window.inbox_RHB[peer, traffic.taken % HALVES]
            piece.data.copy_(inbox[: piece.data.numel()], non_blocking=True)
            traffic.taken += 1
            window.tell(peer, TAKEN, traffic.taken, stream)
        self._mark(piece)

    def _mark(self, piece: _StagedPiece) -> None:
        if piece.last_of is not None:
            self._under_way.append((self._stream.mark(), piece.last_of))

    def _pieces(self, message: Message, pending: PendingMessages) -> list[_StagedPiece]:
        assert self._window is not None
        parts = torch.split(message.data.detach(), self._window.outbox_B.numel())
        return [_StagedPiece(part, pending if part is parts[-1] else None) for part in parts]

    # -- the end -------------------------------------------------------------------------------------------------------

    def _refuse_if_lost(self, peer: int) -> None:
        unused = self._closed or self._window is None
        self._require_in_use(self._problem or ("it is not warmed up, or closed" if unused else ""))
        self._require(peer, self._peers[peer].problem if peer in self._peers else None)

    def _give_up(self, problem: str) -> None:
        """End all that is pending on this rank, and tell the others."""
        if self._problem:
            return
        self._problem = problem
        assert self._window is not None
        try:
            with self._stream() as stream:
                self._window.settle(stream)
                for peer in self._peers:
                    self._window.tell(peer, GOODBYE, 1, stream)
            wait_until(self._stream.mark(), time.monotonic() + LEFT_SECONDS, "what was under way")
            self._window.released = True
        except (RuntimeError, TransportError) as error:
            self._problem = f"{problem}; {error}"
        for traffic in self._peers.values():
            traffic.sends.clear()
            traffic.receives.clear()
        while self._under_way and self._under_way[0][0]():
            self._under_way.popleft()[1].one_done()
        for pending in self._pending:
            pending.fail(self._problem)
