"""Rows of replicas by the copy engines of one node's GPUs: no host waits and no multiprocessor copies.

Replica rows and the rows in which their gradients leave lie in memory that the node's ranks open to each other. What a
replica hangs on does all copying, on a side stream: it writes weights into the replica's rows, and reads gradients out
of them. A replica's rank says that its rows are its parent's now (`_GO`: weights may be overwritten, gradients are
whole), and the parent that they are the replica's again (`_DONE`).

A signal waits until the one before on its channel was taken, so stages go round over ``depth`` channels, and a stage
begins when the one ``depth`` before it has been waited for; stages are waited for in the order in which they were
posted. So whatever a stage waits for on any rank comes earlier in the order of posts and waits, which is the same on
all ranks: nothing waits in a circle, not even where all of a GPU's streams share one queue. If a rank does not come in
time, torch's kernel names the missing signal and ends this process's work on the GPU with an error.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.transports.symmetric import LEAST_CHANNELS, NodeMemory
from .plan import PointToPoint, Row, RowStage

MOST_DEPTH = 32
"""Stages that are under way at once, of weights and of gradients."""
_GO, _DONE = 0, 1


class CopyStream:
    """A stream next to the current one; on a CPU, where doubles are used, a thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._thread = None if self._stream is not None else ThreadPoolExecutor(1, "eplb_runtime copies")

    def begin(self, work: Callable[[], None]) -> Callable[[], object]:
        """Run ``work`` on the side stream, after its earlier work and what the current stream has to do now. Return a
        function that makes the current stream wait for its end. CPU: a thread runs it; the function waits."""
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


class CopyEngine(PointToPoint):
    """Rows between ranks of this node, the first of which is ``first``, by copy engines; the rest as messages."""

    def __init__(
        self, memory: NodeMemory, first: int, device: torch.device, group: dist.ProcessGroup, ranks: Sequence[int]
    ) -> None:
        super().__init__(group, ranks)
        self._memory, self._node = memory, range(first, first + memory.size)
        depth = min(MOST_DEPTH, memory.channels // LEAST_CHANNELS)
        self._queues = [_Queue(memory, CopyStream(device), depth, down * 2 * depth) for down in (0, 1)]

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
        by_copies = partial(self._queues[down].post, parents, children)
        return replace(super().stage(layer, down, number, *far), by_copies=[by_copies])


@dataclass
class _Exchange:
    """A stage under way: parents of this rank's replicas, children with what is copied into and from, and its first
    channel. ``arrived`` makes the current stream wait for this rank's own copying."""

    queue: "_Queue"
    parents: Sequence[int]
    children: Mapping[int, Sequence[tuple[Tensor, Tensor]]]
    channel: int
    arrived: Callable[[], object] | None = None
    over: bool = False

    def wait(self) -> None:
        """Make the current stream wait for the rows of this stage and of all stages that were posted before it."""
        while not self.over:
            self.queue.end_first()


@dataclass
class _Queue:
    """Stages of one kind, in the order in which they are posted."""

    memory: NodeMemory
    side: CopyStream
    depth: int
    first_channel: int
    posted: int = 0
    under_way: deque[_Exchange] = field(default_factory=deque)

    def post(self, parents: Sequence[int], children: Mapping[int, Sequence[tuple[Tensor, Tensor]]]) -> _Exchange:
        exchange = _Exchange(self, parents, children, self.first_channel + 2 * (self.posted % self.depth))
        self.posted += 1
        self.under_way.append(exchange)
        self._begin()
        return exchange

    def end_first(self) -> None:
        first = self.under_way.popleft()
        for parent in first.parents:
            self.memory.wait(parent, first.channel + _DONE)
        assert first.arrived is not None
        first.arrived()
        first.over = True
        self._begin()

    def _begin(self) -> None:
        for exchange in islice(self.under_way, self.depth):
            exchange.arrived = exchange.arrived or self.side.begin(partial(self._copy, exchange))

    def _copy(self, exchange: _Exchange) -> None:
        for parent in exchange.parents:
            self.memory.put(parent, exchange.channel + _GO)
        for child, copies in exchange.children.items():
            self.memory.wait(child, exchange.channel + _GO)
            for into, source in copies:
                into.copy_(source, non_blocking=True)
            self.memory.put(child, exchange.channel + _DONE)
