"""Between the GPUs of one node: who receives copies straight out of the memory of who sends, by the copy engine.

Memory that was registered is read where it is; what is sent from elsewhere is packed first. A note says that bytes are
there and may be read, another that they have been. Nobody writes into the memory of another rank, so who gives up
waiting only has to end its own copies. A rank that gives up sending closes its card before it gives its memory back;
who has copied from it looks at the card afterwards, and believes what it has copied only if the card is open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Message, Pending, Transport, TransportError
from .counted import Counted, to_others
from .cuda_memory import DeviceMemory, Export, missing, open_offered
from .neighbours import Card, Inbox, Kind, Neighbour, Note, meet_all, wait_for
from .side_stream import wait_until

logger = logging.getLogger("eplb_runtime")

LOOK_SECONDS = 0.0002
"""So often a rank looks whether its stream has come to an end of something."""
LISTEN_SECONDS = 0.5
"""So often a rank that waits looks at its neighbours' cards, should a note have found no room."""
LEAST_PACKED_BYTES = 1 << 16
_LEFT_SECONDS = 5.0
"""Copies that run when a rank gives up may take so long."""
_PATTERN = 251


class _Posted(Counted):
    """Attributes:
    ready: asks whether what is sent is there and may be read.
    packed: memory for what is sent from elsewhere.
    elsewhere: that, kept until it has been packed.
    """

    ready: Callable[[], bool]
    packed: tuple[Tensor, Export] | None = None
    elsewhere: Sequence[Tensor] = ()


@dataclass(frozen=True)
class _Send:
    export: Export
    data: Tensor
    pending: _Posted


@dataclass(frozen=True)
class _Receive:
    into: Tensor
    pending: _Posted


@dataclass
class _Traffic:
    """With one neighbour, in order.

    Args:
        sends: messages that it has not been told of yet.
        told: messages that it may read, and has not read yet.
        offers: its messages to this rank that are there.
        receives: messages that this rank waits for.
        opened: its storages by the identity of their pages.
        problem: why nothing goes this way any more.
    """

    sends: deque[_Send] = field(default_factory=deque)
    told: deque[_Send] = field(default_factory=deque)
    offers: deque[Note] = field(default_factory=deque)
    receives: deque[_Receive] = field(default_factory=deque)
    opened: dict[int, Tensor] = field(default_factory=dict)
    problem: str = ""


class CudaIpc(Transport):
    """Reads the memory of other GPUs.

    Args:
        group: the migration group; only used to find each other.
        backend: its backend's name.
        device: the model's.
        timeout_seconds: nothing that was posted is waited for longer, whatever the deadline.
        peers: the ranks of this node that will be sent to; None: all of the group.
        memory: None: of the device.

    Raises:
        TransportError: the model is not on a GPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        device: torch.device,
        timeout_seconds: float,
        peers: Sequence[int] | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        if memory is None and missing(device):
            raise TransportError(f"transport 'cuda_ipc': {missing(device)}")
        self.device = device
        self._group = group
        self._meeting_device = torch.device("cpu") if backend == "gloo" else device
        self._rank = group.rank()
        self._timeout = timeout_seconds
        self._memory = memory or DeviceMemory(device)
        self._stream = self._memory.stream()
        everybody = range(group.size()) if peers is None else peers
        self._peers = [peer for peer in everybody if peer != self._rank]
        self._lock = threading.RLock()
        self._inbox = Inbox()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._card = Card(group.size())
        self._neighbours: dict[int, Neighbour] = {}
        self._traffic: dict[int, _Traffic] = {}
        self._exports: list[Export] = []
        self._spare: list[tuple[Tensor, Export]] = []
        self._pending: list[_Posted] = []
        self._under_way: deque[tuple[Callable[[], bool], int, _Receive]] = deque()
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._closed = False

    def warm_up(self, deadline: float) -> None:
        try:
            self._neighbours = meet_all(
                self._group, self._meeting_device, self._inbox, self._card, self._peers, deadline
            )
            self._traffic = {peer: _Traffic() for peer in self._peers}
            self._try_both_ways(deadline)
        except BaseException:
            self.close()
            raise

    def register(self, regions: Sequence[Tensor]) -> None:
        with self._lock:
            self._tell_what_is_gone()
            for region in regions:
                if region.numel() and not any(export.holds(region) for export in self._exports):
                    try:
                        self._exports.append(Export.of(region, self._memory))
                    except RuntimeError as error:
                        logger.info("transport: memory is packed before it is sent, not shared: %s", _first_line(error))

    def empty(self, nbytes: int) -> Tensor:
        return self._memory.empty(nbytes)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        out, into = to_others(self._rank, sends, receives)
        with self._lock:
            for peer in {message.peer for message in (*out, *into)}:
                self._refuse_if_lost(peer)
            pending = _Posted(len(out) + len(into), time.monotonic() + self._timeout, self.give_up)
            if not pending.left:
                return pending
            self._tell_what_is_gone()
            self._stream.after_current()
            try:
                shared = self._shared(out, pending)
                pending.ready = self._stream.mark()
            except RuntimeError as error:
                self._give_up(_first_line(error))
                raise TransportError(f"what is sent cannot be shared: {_first_line(error)}") from error
            self._pending.append(pending)
            for message, send in zip(out, shared, strict=True):
                self._traffic[message.peer].sends.append(send)
            for message in into:
                self._traffic[message.peer].receives.append(_Receive(message.data.detach(), pending))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="eplb_runtime transport")
                self._thread.start()
        os.eventfd_write(self._wake, 1)
        return pending

    def close(self) -> None:
        with self._lock:
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
        with self._stream():  # closing memory waits for the current stream
            self._traffic.clear()
        self._inbox.close()
        os.close(self._wake)

    def give_up(self, pending: Counted, reason: str) -> None:
        """End everything that is not done yet; afterwards nothing of it is read or written."""
        with self._lock:
            if not pending.finished.is_set():
                self._give_up(reason)

    def _try_both_ways(self, deadline: float) -> None:
        """Bytes from shared memory and packed ones, to and from each neighbour, have to arrive as they left."""
        shared, packed = (self.empty(64).fill_(self._rank % _PATTERN + kind) for kind in (1, 2))
        self.register([shared])
        arrived = {peer: (self.empty(64).zero_(), self.empty(64).zero_()) for peer in self._peers}
        self.post(
            [Message(peer, data) for peer in self._peers for data in (shared, packed)],
            [Message(peer, into) for peer in self._peers for into in arrived[peer]],
        ).wait(deadline)
        for peer, both in arrived.items():
            if any(bool((into != peer % _PATTERN + kind).any()) for kind, into in enumerate(both, 1)):
                raise TransportError(f"bytes of EP rank {peer} do not arrive as they left")

    # -- sending -------------------------------------------------------------------------------------------------------

    def _shared(self, messages: Sequence[Message], pending: _Posted) -> list[_Send]:
        """Messages where others can read them: in their own memory, if that was registered, or packed."""
        exports = [self._export_of(message.data) for message in messages]
        elsewhere = sum(m.data.nbytes for m, export in zip(messages, exports, strict=True) if export is None)
        if elsewhere:
            pending.packed = self._take_spare(elsewhere)
            pending.elsewhere = [m.data for m, export in zip(messages, exports, strict=True) if export is None]
        sends, used = [], 0
        with self._stream():
            for message, export in zip(messages, exports, strict=True):
                data = message.data.detach()
                if export is None:
                    assert pending.packed is not None
                    memory, export = pending.packed
                    packed = memory[used : used + data.nbytes]
                    used += data.nbytes
                    self._memory.copy(packed, data)
                    data = packed
                sends.append(_Send(export, data, pending))
        return sends

    def _export_of(self, data: Tensor) -> Export | None:
        return next((export for export in self._exports if export.holds(data)), None)

    def _take_spare(self, nbytes: int) -> tuple[Tensor, Export]:
        """Shared memory to pack messages in; kept for the next ones."""
        fitting = [spare for spare in self._spare if spare[0].numel() >= nbytes]
        if fitting:
            spare = min(fitting, key=lambda spare: spare[0].numel())
            self._spare = [other for other in self._spare if other is not spare]
            return spare
        memory = self._memory.empty(max(nbytes, LEAST_PACKED_BYTES))
        return memory, Export.of(memory, self._memory)

    def _tell_what_is_gone(self) -> None:
        for export in [export for export in self._exports if export.gone]:
            self._exports.remove(export)
            for peer, traffic in self._traffic.items():
                if not traffic.problem:
                    self._tell(peer, Note(Kind.FREED, self._rank, export.page.identity))

    def _tell(self, peer: int, note: Note, told: Callable[[], None] = lambda: None) -> None:
        self._neighbours[peer].outbox.append((note.encode(), told))

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Until nothing is pending."""
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            with torch.no_grad():
                while self._step():
                    pass
        except BaseException as error:
            logger.exception("the thread that reads other GPUs has failed")
            with self._lock:
                self._thread = None
                self._give_up(f"{type(error).__name__}: {_first_line(error)}")

    def _step(self) -> bool:
        """Hear, begin what can begin, end what is through, say so; or wait. Whether to go on."""
        with self._lock:
            try:
                self._listen()
                self._offer_what_is_ready()
                self._copy_what_is_offered()
                self._end_what_is_copied()
            except (OSError, RuntimeError) as error:  # memory that cannot be opened, CUDA
                self._give_up(_first_line(error))
            for neighbour in self._neighbours.values():
                neighbour.send()
            if any(time.monotonic() > pending.end for pending in self._pending):
                self._give_up("messages between GPUs were not through in time")
            self._forget_what_is_over()
            if not self._pending:
                self._thread = None
                return False
            for_stream = bool(self._under_way) or any(traffic.sends for traffic in self._traffic.values())
            full = [n.inbox for n in self._neighbours.values() if n.outbox]
            ends = [n.end for p, n in self._neighbours.items() if not self._traffic[p].problem]
            seconds = max(0.0, min(LISTEN_SECONDS, min(p.end for p in self._pending) - time.monotonic()))
        if for_stream:
            time.sleep(LOOK_SECONDS)
        else:
            wait_for([self._inbox.reading, self._wake, *ends], full, seconds)
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
            if note.kind == Kind.OFFER:
                traffic.offers.append(note)
            elif note.kind == Kind.FREED:
                with self._stream():  # closing memory waits for the current stream
                    traffic.opened.pop(note.identity, None)
            elif note.kind == Kind.GOODBYE:
                self._lose(note.source, "it has given up")
            elif traffic.told:
                traffic.told.popleft().pending.one_done()
        for peer, why in gone.items():
            self._lose(peer, why)

    def _offer_what_is_ready(self) -> None:
        for peer, traffic in self._traffic.items():
            while traffic.sends and not traffic.problem and traffic.sends[0].pending.ready():
                send = traffic.sends.popleft()
                self._tell(peer, send.export.offer(self._rank, send.data))
                traffic.told.append(send)

    def _copy_what_is_offered(self) -> None:
        for peer, traffic in self._traffic.items():
            while traffic.receives and traffic.offers and not traffic.problem:
                receive, note = traffic.receives.popleft(), traffic.offers.popleft()
                if receive.into.nbytes != note.nbytes:
                    self._give_up(f"EP rank {peer} sends {note.nbytes} bytes where {receive.into.nbytes} are expected")
                    return
                if note.identity not in traffic.opened:
                    process = self._neighbours[peer].process
                    traffic.opened[note.identity] = open_offered(process, note, self._memory)
                source = traffic.opened[note.identity][note.offset : note.offset + note.nbytes]
                with self._stream():
                    self._memory.copy(receive.into, source)
                self._under_way.append((self._stream.mark(), peer, receive))

    def _end_what_is_copied(self) -> None:
        while self._under_way and self._under_way[0][0]():
            _, peer, receive = self._under_way.popleft()
            why = self._why_gone(peer)
            if why:  # it may have written what was being copied
                self._lose(peer, why)
                self._give_up(self._traffic[peer].problem)
                return
            self._tell(peer, Note(Kind.WRITTEN, self._rank), receive.pending.one_done)

    def _forget_what_is_over(self) -> None:
        for pending in self._pending:
            if pending.finished.is_set() and not pending.problem and pending.packed is not None:
                self._spare.append(pending.packed)
        self._pending = [pending for pending in self._pending if not pending.finished.is_set()]

    # -- the end -------------------------------------------------------------------------------------------------------

    def _why_gone(self, peer: int) -> str:
        neighbour = self._neighbours[peer]
        if neighbour.ended:
            return "its process has ended"
        return "it has given up" if neighbour.closed else ""

    def _refuse_if_lost(self, peer: int) -> None:
        if self._problem:
            raise TransportError(f"memory of other GPUs is not read any more: {self._problem}")
        traffic = self._traffic.get(peer)
        if traffic is None:
            raise TransportError(f"EP rank {peer} is not connected by CUDA IPC")
        if traffic.problem:
            raise TransportError(traffic.problem)

    def _lose(self, peer: int, why: str) -> None:
        """Nothing comes from or goes to a neighbour any more."""
        traffic = self._traffic[peer]
        if traffic.problem:
            return
        traffic.problem = f"EP rank {peer} does not answer: {why}"
        self._neighbours[peer].outbox.clear()
        traffic.offers.clear()
        if traffic.sends or traffic.told or traffic.receives:
            self._give_up(traffic.problem)

    def _give_up(self, problem: str) -> None:
        """End all that is pending on this rank, and tell the others. The card is closed before memory is free again."""
        if self._problem:
            return
        self._problem = problem
        self._card.close()
        for peer, neighbour in self._neighbours.items():
            if not self._traffic[peer].problem:
                self._tell(peer, Note(Kind.GOODBYE, self._rank))
                neighbour.send()
        if self._under_way:
            try:
                wait_until(self._stream.mark(), time.monotonic() + _LEFT_SECONDS, "what was being copied")
            except (RuntimeError, TransportError) as error:
                self._problem = f"{problem}; {_first_line(error)}"
        self._under_way.clear()
        for traffic in self._traffic.values():
            for queue in (traffic.sends, traffic.told, traffic.receives, traffic.offers):
                queue.clear()
        for pending in self._pending:
            pending.fail(self._problem)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
