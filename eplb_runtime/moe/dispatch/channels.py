"""Two channels between the same ranks, so that two micro-batches of a rank can travel at once.

Collectives of one group must come in the same order on all its ranks. Two threads have no order between them, so each
exchanges in groups of its own. Backward passes, and the second micro-batch of `MicroBatchChannels.both`, use the second
channel once it is open. Only one of them runs at a time, so each channel's exchanges are in order on every rank.

On a device each channel has a stream of its own, too (`streams.py`), and all ranks launch the exchanges of both in one
order (`collective_order.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import get_ident
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from ...load.counter import in_recompute as in_backward
from ...utils.worker import Worker
from .collective_order import CollectiveOrder
from .streams import StreamGuard, TwoStreams

T = TypeVar("T")
U = TypeVar("U")
Shared = Literal["counts", "low latency"]
"""What two things at once have in common."""
_HOST_SECONDS = 1800.0
"""As long as torch's process groups wait where their host says nothing."""


@dataclass(frozen=True)
class MicroBatchChannel:
    """One way.

    Args:
        tokens: the EP group, on the tokens' device.
        counts: the same ranks, for what goes ahead of tokens.
    """

    tokens: dist.ProcessGroup
    counts: dist.ProcessGroup


class BackwardInsideError(RuntimeError):
    """A backward pass has begun in one of two things that may have none."""


class MicroBatchChannels:
    """The ways of one rank's exchanges.

    Args:
        first: what there is at the start.
        device: of the tokens.
        in_order: whether both ways' exchanges must be launched in one order on all ranks; on a device they are anyway.
        streams: of two things at once; None: those of the device, none on a CPU.
        seconds: how long one of two things waits for the other's launches at most; as long as for other ranks.

    Attributes:
        busy: while two things run at once.
        ahead: called before two things begin, on the thread that has them run.
    """

    def __init__(
        self,
        first: MicroBatchChannel,
        device: torch.device | None = None,
        in_order: bool = False,
        streams: TwoStreams | None = None,
        seconds: float = _HOST_SECONDS,
    ) -> None:
        self._first = first
        self._second: MicroBatchChannel | None = None
        self._worker = Worker("eplb_runtime second channel")
        self._second_thread: int | None = None
        self.busy = False
        self._forwards_only = False
        self.ahead: Callable[[], None] = lambda: None
        self._device_type = "cpu" if device is None else device.type
        on_device = device is not None and device.type != "cpu"
        self._streams = TwoStreams(device) if streams is None and on_device and device is not None else streams
        self._in_order = in_order or on_device
        self._seconds = seconds
        self._order: CollectiveOrder | None = None
        self._shared: dict[str, StreamGuard] = {}

    @property
    def first(self) -> MicroBatchChannel:
        """Return the channel that is there from the start."""
        return self._first

    @property
    def is_open(self) -> bool:
        """Return whether there is a second way."""
        return self._second is not None

    @property
    def has_streams(self) -> bool:
        """Return whether two things at once have streams of their own."""
        return self._streams is not None

    def open(self, second: MicroBatchChannel) -> None:
        """From here on, there are two. On every rank of the group, between forwards and backward passes."""
        self._second = second

    def current(self) -> MicroBatchChannel:
        """What this thread takes now. A device's backward passes run on threads of torch's, and go the second way
        there."""
        if self._second is None:
            return self._first
        return self._second if in_backward() or get_ident() == self._second_thread else self._first

    def is_first(self, channel: MicroBatchChannel) -> bool:
        """Return whether it is the way that there was at the start."""
        return channel is self._first

    def launching(self) -> AbstractContextManager[None]:
        """Inside, an exchange is launched: where two things run at once, when it is this one's turn on every rank. Not
        within another."""
        order = self._order
        return contextlib.nullcontext() if order is None else order.launching(self._number())

    @property
    def is_ordered(self) -> bool:
        """Return whether two things run at once now, and launch in one order."""
        return self._order is not None

    def after_the_other(self) -> None:
        """Within `launching`: what this one queues next comes after all that the other computes before its next
        exchange. The host waits until that is queued, and the device until it is done."""
        if (order := self._order) is not None:
            order.until_the_other_asks(self._number())
            if self._streams is not None:
                self._streams.after_the_other()

    def _number(self) -> int:
        return 0 if self.is_first(self.current()) else 1

    def before_backward(self) -> None:
        """A backward pass has come to a layer.

        Raises:
            BackwardInsideError: two things run at once that have none.
        """
        if self._forwards_only:
            raise BackwardInsideError(
                "a backward pass inside at_once: its tokens would go the way of the second batch's, and ranks would "
                "take one for the other; return the losses, and call backward() on one after the other when at_once "
                "has ended"
            )

    def shared(self, what: Shared) -> AbstractContextManager[None]:
        """Inside, memory is used that both of two things at once write."""
        shared = self._shared.get(what)
        return contextlib.nullcontext() if shared is None else shared()

    def both(
        self, current: Callable[[], T], second: Callable[[], U], swapped: bool = False, forwards_only: bool = False
    ) -> tuple[T, U]:
        """Run two things at once, of which one at most has a backward pass; on every rank of the group alike.

        Args:
            current: runs on this thread. It may not wait for the other, nor run backward passes.
            second: runs on a thread that is kept; in this one's modes of gradients and of autocast. It may not wait for
                the other either where launches are in order.
            swapped: each on the other's stream. A backward pass runs on the stream of its forward, so the caller says
                which that was.
            forwards_only: neither may have a backward pass; one that has raises (`before_backward`).

        Raises:
            RuntimeError: two run at once already.
        """
        assert self._second is not None
        if self.busy:
            raise RuntimeError("two batches run at once already: a third would have no way of its own")
        self.busy, self._forwards_only = True, forwards_only
        join: Callable[[], None] = lambda: None  # noqa: E731
        try:
            self.ahead()
            order = self._order = CollectiveOrder(self._seconds) if self._in_order else None
            if self._streams is not None:
                self._shared = {what: self._streams.one_after_another() for what in get_args(Shared)}
                current, second, join = self._streams.fork(current, second, swapped)
            current, second = _ends(current, order, 0), _ends(second, order, 1)
            running = self._worker.submit(self._in_the_modes_of_this_thread(second))
            # Where `current` fails, ranks part; the other is not waited for: it may wait for ranks that will not come.
            try:
                first = current()
            except BackwardInsideError:
                wait([running])  # on every rank alike: its forwards end, and a backward pass of it is refused, too
                raise
            return first, running.result()
        finally:
            join()
            self._order, self._shared = None, {}
            self.busy = self._forwards_only = False

    def in_order_with_this_stream(self) -> Callable[[], AbstractContextManager[None]]:
        """A context in which either of two things uses what the stream that is current now writes meanwhile."""
        return contextlib.nullcontext if self._streams is None else self._streams.in_order_with_this_one()

    def alone(self, work: Callable[[], T], swapped: bool = False) -> T:
        """Run one thing on the stream that it would have as the first of `both`, so that its backward pass can be one
        of two things at once."""
        return work() if self._streams is None else self._streams.alone(work, swapped)

    def _in_the_modes_of_this_thread(self, work: Callable[[], U]) -> Callable[[], U]:
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        autocasts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", self._device_type})
        ]

        def inside() -> U:
            self._second_thread = get_ident()
            with contextlib.ExitStack() as modes:
                modes.enter_context(torch.inference_mode(inference))
                modes.enter_context(torch.set_grad_enabled(gradients))
                for kind, dtype, enabled in autocasts:
                    modes.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                return work()

        return inside


def _ends(work: Callable[[], T], order: CollectiveOrder | None, way: int) -> Callable[[], T]:
    """The same work; when it is over, the other way waits for its launches no more."""
    if order is None:
        return work

    def with_an_end() -> T:
        try:
            return work()
        finally:
            order.end(way)

    return with_an_end
