"""Between the GPUs of one node: who receives copies straight out of the memory of who sends, by the copy engine.

Memory that was registered is read where it is; what is sent from elsewhere is packed first. A note says that bytes are
there and may be read, another that they have been. Nobody writes into the memory of another rank, so who gives up
waiting only has to end its own copies. A rank that gives up sending closes its card before it gives its memory back;
who has copied from it looks at the card afterwards, and believes what it has copied only if the card is open.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.errors import one_line
from .base import Message, TransportError
from .cuda_memory import DeviceMemory, Export, open_offered, why_not
from .neighbours import Kind, Notification
from .progress import PendingMessages
from .side_stream import LEFT_SECONDS, wait_until
from .within_node import Traffic, WithinNode

logger = logging.getLogger("eplb_runtime")

LOOK_SECONDS = 0.0002
"""So often a rank looks whether its stream has come to an end of something."""
LEAST_PACKED_BYTES = 1 << 16
_PATTERN = 251


class _Posted(PendingMessages):
    """Attributes:
    ready: asks whether what is sent is there and may be read.
    packed: memory for what is sent from elsewhere.
    elsewhere: that, kept until it has been packed.
    """

    ready: Callable[[], bool]
    packed: tuple[Tensor, Export] | None = None
    elsewhere: Sequence[Tensor] = ()


@dataclass(frozen=True)
class _IpcSend:
    export: Export
    data: Tensor
    pending: _Posted


@dataclass(frozen=True)
class _IpcReceive:
    into: Tensor
    number: int
    pending: _Posted


@dataclass
class _IpcTraffic(Traffic):
    """Args:
    sends: messages that it has not been told of yet.
    readable: messages that it may read, and has not read yet.
    receives: messages that this rank waits for.
    opened: its storages by the identity of their pages.
    """

    sends: deque[_IpcSend] = field(default_factory=deque)
    readable: deque[_IpcSend] = field(default_factory=deque)
    receives: deque[_IpcReceive] = field(default_factory=deque)
    opened: dict[int, Tensor] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return bool(self.sends or self.readable or self.receives)

    def drop(self) -> None:
        for queue in (self.sends, self.readable, self.receives, self.offers):
            queue.clear()


class CudaIpc(WithinNode[_Posted, _IpcTraffic]):
    """Reads the memory of other GPUs.

    Args:
        group, timeout_seconds, peers: as of `WithinNode`.
        backend: of the group, by name.
        device: the model's.
        memory: None: of the device.

    Raises:
        TransportError: the model is not on a GPU.
    """

    by = "CUDA IPC"

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        device: torch.device,
        timeout_seconds: float,
        peers: Sequence[int] | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        if memory is None and why_not(device):
            raise TransportError(f"transport 'cuda_ipc': {why_not(device)}")
        super().__init__(group, torch.device("cpu") if backend == "gloo" else device, timeout_seconds, peers)
        self.device = device
        self._memory = memory or DeviceMemory(device)
        self._stream = self._memory.stream()
        self._exports: list[Export] = []
        self._spare: list[tuple[Tensor, Export]] = []
        self._under_way: deque[tuple[Callable[[], bool], int, _IpcReceive]] = deque()

    def register(self, regions: Sequence[Tensor]) -> None:
        with self._state:
            self._tell_what_is_gone()
            for region in regions:
                if region.numel() and not any(export.holds(region) for export in self._exports):
                    try:
                        self._exports.append(Export.of(region, self._memory))
                    except RuntimeError as error:
                        logger.info("transport: memory is packed before it is sent, not shared: %s", one_line(error))

    def empty(self, nbytes: int) -> Tensor:
        return self._memory.empty(nbytes)

    def _new_traffic(self) -> _IpcTraffic:
        return _IpcTraffic()

    def _new_pending(self, messages: int, end: float) -> _Posted:
        return _Posted(messages, end, self.give_up)

    def _closing_memory(self) -> contextlib.AbstractContextManager[object]:
        return self._stream()  # closing memory waits for the current stream

    def _try_out(self, deadline: float) -> None:
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

    def _take_on(
        self, out: Sequence[Message], into: Sequence[Message], numbers: Sequence[int], pending: _Posted
    ) -> None:
        self._stream.after_current()
        try:
            shared = self._shared(out, pending)
            pending.ready = self._stream.mark()
        except RuntimeError as error:
            self._give_up(one_line(error))
            raise TransportError(f"what is sent cannot be shared: {one_line(error)}") from error
        for message, send in zip(out, shared, strict=True):
            self._traffic[message.peer].sends.append(send)
        for number, message in zip(numbers, into, strict=True):
            self._traffic[message.peer].receives.append(_IpcReceive(message.data.detach(), number, pending))

    def _shared(self, messages: Sequence[Message], pending: _Posted) -> list[_IpcSend]:
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
                sends.append(_IpcSend(export, data, pending))
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
        # Who gives up may free it while the stream has yet to write it. Exported memory takes no record any more.
        self._stream.will_use(memory)
        return memory, Export.of(memory, self._memory)

    def free_spare(self) -> None:
        with self._state:
            self._spare.clear()
            self._tell_what_is_gone()

    def _tell_what_is_gone(self) -> None:
        for export in [export for export in self._exports if export.gone]:
            self._exports.remove(export)
            self._notify_all(Notification(Kind.FREED, self._rank, export.page.identity))

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _hear(self, note: Notification, traffic: _IpcTraffic) -> None:
        if note.kind == Kind.FREED:
            with self._closing_memory():
                traffic.opened.pop(note.identity, None)
        elif traffic.readable:
            traffic.readable.popleft().pending.one_done()

    def _step_on(self) -> None:
        try:
            self._offer_what_is_ready()
            self._copy_what_is_offered()
            self._end_what_is_copied()
        except (OSError, RuntimeError) as error:  # memory that cannot be opened, CUDA
            self._give_up(one_line(error))

    def _next(self) -> Callable[[], None] | None:
        """A short sleep, where it waits for its stream: nothing else would wake it."""
        for_stream = bool(self._under_way) or any(traffic.sends for traffic in self._traffic.values())
        return partial(time.sleep, LOOK_SECONDS) if for_stream else None

    def _keep(self, pending: _Posted) -> None:
        if pending.packed is not None:
            self._spare.append(pending.packed)

    def _offer_what_is_ready(self) -> None:
        for peer, traffic in self._traffic.items():
            while traffic.sends and not traffic.problem and traffic.sends[0].pending.ready():
                send = traffic.sends.popleft()
                self._tell(peer, send.export.offer(self._rank, send.data))
                traffic.readable.append(send)

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
            receive.pending.here[receive.number] = 1
            self._tell(peer, Notification(Kind.WRITTEN, self._rank), receive.pending.one_done)

    def _part(self, problem: str) -> str:
        if self._under_way:
            try:
                wait_until(self._stream.mark(), time.monotonic() + LEFT_SECONDS, "what was being copied")
            except (RuntimeError, TransportError) as error:
                problem = f"{problem}; {one_line(error)}"
        self._under_way.clear()
        return problem
