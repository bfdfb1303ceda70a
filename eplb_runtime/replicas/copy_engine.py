"""Rows of replicas by the copy engines of one node's GPUs: no host waits and no multiprocessor copies.

Replica rows and the rows in which their gradients leave lie in memory that the node's ranks open to each other. What a
replica hangs on does all copying, on a side stream: it writes weights into the replica's rows, and reads gradients out
of them. A replica's rank says that its rows are its parent's now (`_GO`: weights may be overwritten, gradients are
whole), and the parent that they are the replica's again (`_DONE`).

A signal waits until the one before on its channel was taken, so stages go round over ``depth`` channels, and a stage
begins when the one ``depth`` before it has been waited for; stages are waited for in the order in which they were
posted. So whatever a stage waits for on any rank comes earlier in the order of posts and waits, which is the same on
all ranks: nothing waits in a circle, not even where all of a GPU's streams share one queue.

A rank that does not come is waited for until the timeout; then torch's kernel says which signal is missing and ends
this process's work on the GPU with an error, as NCCL's watchdog does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..distributed.transports.symmetric import LEAST_CHANNELS, NodeMemory
from .plan import Row, RowStage, RowTransport, Waiting

MOST_DEPTH = 32
"""Stages that are under way at once, of weights and of gradients."""
_GO, _DONE = 0, 1
_SIGNALS = 2


class CopyStream:
    """A stream next to the current one; on a CPU, where doubles are used, a thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._thread = None if self._stream is not None else ThreadPoolExecutor(1, "eplb_runtime copies")

    def begin(self, work: Callable[[], None]) -> Callable[[], object]:
        """Do it after all that was begun here and what the current stream has to do now. What is returned makes the
        current stream wait for its end."""
        if self._stream is None:
            assert self._thread is not None
            return self._thread.submit(work).result
        stream, device = self._stream, self._stream.device
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record(stream)
        return lambda: torch.cuda.current_stream(device).wait_event(ended)


class CopyEngine(RowTransport):
    """Rows between ranks of this node, the first of which is ``first``, by copy engines; ``inter_node`` carries the
    rest."""

    def __init__(self, memory: NodeMemory, first: int, device: torch.device, inter_node: RowTransport) -> None:
        self._memory = memory
        self._node = range(first, first + memory.size)
        self._inter_node = inter_node
        depth = min(MOST_DEPTH, memory.channels // LEAST_CHANNELS)
        self._queues = [_Queue(memory, CopyStream(device), depth, down * _SIGNALS * depth) for down in (0, 1)]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._memory.zeros(shape, dtype, device)

    def open(self) -> None:
        self._memory.open()

    def stage(self, layer: int, down: bool, number: int, sends: Sequence[Row], receives: Sequence[Row]) -> RowStage:
        near, far = (
            [[row for row in rows if (row.rank in self._node) == here] for rows in (sends, receives)] for here in (1, 0)
        )
        of_children, of_parents = near if down else reversed(near)
        children: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for row in of_children:
            there = self._memory.of_peer(row.rank - self._node.start, row.at_replica)
            copy = (there, row.local) if down else (row.local, there)
            children.setdefault(row.rank - self._node.start, []).append(copy)
        parents = tuple(dict.fromkeys(row.rank - self._node.start for row in of_parents))
        return _Stage(self._queues[down], parents, children, self._inter_node.stage(layer, down, number, *far))

    def post(self, stages: Sequence[RowStage]) -> list[Sequence[Waiting]]:
        own = [stage for stage in stages if isinstance(stage, _Stage)]
        far = self._inter_node.post([stage.far for stage in own])
        return [[stage.queue.post(stage), *works] for stage, works in zip(own, far, strict=True)]


@dataclass(frozen=True)
class _Stage(RowStage):
    """Parents of this rank's replicas, children with what is copied into and from, and what leaves the node."""

    queue: _Queue
    parents: tuple[int, ...]
    children: dict[int, list[tuple[Tensor, Tensor]]]
    far: RowStage

    def post(self) -> Sequence[Waiting]:
        return [self.queue.post(self), *self.far.post()]


@dataclass
class _Exchange:
    """One stage under way; ``arrived`` makes the current stream wait for this rank's own copying."""

    number: int
    stage: _Stage
    arrived: Callable[[], object] | None = None
    over: bool = False

    def wait(self) -> None:
        self.stage.queue.wait(self)


@dataclass
class _Queue:
    """Stages of one kind, in the order in which they are posted."""

    memory: NodeMemory
    side: CopyStream
    depth: int
    first_channel: int
    posted: int = 0
    in_flight: deque[_Exchange] = field(default_factory=deque)
    to_begin: deque[_Exchange] = field(default_factory=deque)

    def post(self, stage: _Stage) -> _Exchange:
        exchange = _Exchange(self.posted, stage)
        self.posted += 1
        self.to_begin.append(exchange)
        self._begin()
        return exchange

    def wait(self, exchange: _Exchange) -> None:
        """End all up to this one."""
        while not exchange.over:
            first = self.in_flight.popleft()
            for parent in first.stage.parents:
                self.memory.wait(parent, self._channel(first, _DONE))
            assert first.arrived is not None
            first.arrived()
            first.over = True
            self._begin()

    def _begin(self) -> None:
        while self.to_begin and len(self.in_flight) < self.depth:
            exchange = self.to_begin.popleft()
            self.in_flight.append(exchange)
            exchange.arrived = self.side.begin(lambda exchange=exchange: self._copy(exchange))  # type: ignore[misc]

    def _copy(self, exchange: _Exchange) -> None:
        go, done = self._channel(exchange, _GO), self._channel(exchange, _DONE)
        for parent in exchange.stage.parents:
            self.memory.put(parent, go)
        for child, copies in exchange.stage.children.items():
            self.memory.wait(child, go)
            for into, source in copies:
                into.copy_(source, non_blocking=True)
            self.memory.put(child, done)

    def _channel(self, exchange: _Exchange, signal: int) -> int:
        return self.first_channel + _SIGNALS * (exchange.number % self.depth) + signal
