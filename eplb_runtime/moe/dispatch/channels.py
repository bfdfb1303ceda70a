"""Two micro-batches of a rank at once: a forward and a backward pass of DualPipeV, or two batches of a loop.

Collectives of one group must come in one order on all its ranks, and two threads have none between them. So backward
passes, and the second thing that `MicroBatchChannels.both` runs, exchange in groups of their own once these are open.
All ranks launch the exchanges of both in one order: a kernel that waits for its peers keeps what it has on the GPU, and
if one rank launched A before B and another B before A, both could wait for ever.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from ...load.counter import in_recompute as in_backward
from ...utils.worker import Worker

T = TypeVar("T")
U = TypeVar("U")
_NAMES = "the first", "the second"
_HOST_SECONDS = 1800.0  # as long as torch's process groups wait where their host says nothing


@dataclass(frozen=True)
class MicroBatchChannel:
    """The EP group on the tokens' device, and a group of the same ranks for what goes ahead of tokens."""

    tokens: dist.ProcessGroup
    counts: dist.ProcessGroup


class BackwardInsideError(RuntimeError):
    """A backward pass has begun in one of two things that may have none."""


class CollectiveOrder:
    """Interleaves two sequences of launches: the first of each, then the second of each, until one has ended; by their
    lengths, not their speed. One waits ``seconds`` for the other at most."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._changed = threading.Condition()
        self._launched: list[float] = [0, 0]

    @contextlib.contextmanager
    def launching(self, channel: int) -> Iterator[None]:
        """Inside, channel 0 or 1 launches its next exchange, which is counted at the end. Entering waits for the other
        channel's launches that come first; it raises RuntimeError if they do not come in time."""
        turn, other = self._launched[channel] + channel, 1 - channel
        with self._changed:
            if not self._changed.wait_for(lambda: self._launched[other] >= turn, self._seconds):
                raise RuntimeError(
                    f"of two batches at once, {_NAMES[other]} did not reach its exchange {self._launched[other] + 1} "
                    f"within {self._seconds:g} s; exchange {self._launched[channel] + 1} of {_NAMES[channel]} waited "
                    "for it"
                )
        try:
            yield
        finally:
            with self._changed:
                self._launched[channel] += 1
                self._changed.notify_all()

    def end(self, channel: int) -> None:
        """Record that a channel launches nothing any more, so that the other channel no longer waits for it."""
        with self._changed:
            self._launched[channel] = math.inf
            self._changed.notify_all()


class TwoStreams:
    """Two streams of a device next to the caller's; on a CPU none. No host sync, and no `record_stream`: memory of
    either side is not used again before the other side has been waited for. ``module``: `torch.cuda` or its like."""

    def __init__(self, device: torch.device | None = None, module: Any = None) -> None:
        self.device = device or torch.device("cpu")
        self.on_device = module is not None or self.device.type != "cpu"
        self._module: Any = module or (torch.get_device_module(self.device) if self.on_device else None)
        self._made: tuple[Any, Any] = None, None
        self._lock = threading.Lock()
        self._last: dict[str, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def begin(self) -> Iterator[tuple[Any, Any]]:
        """Give the two streams (made at the first call), or two None on a CPU. They wait for what the current stream
        has to do; at the end the current stream waits for both."""
        if self.on_device:
            if self._made[0] is None:
                self._made = self._module.Stream(self.device), self._module.Stream(self.device)
            for stream in self._made:
                stream.wait_stream(self.current())
        try:
            yield self._made
        finally:
            for stream in filter(None, self._made):
                self.current().wait_stream(stream)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make ``stream`` this thread's current stream inside; its device stays the thread's. No effect on a CPU."""
        if self.on_device:
            self._module.set_device(self.device)  # each thread has a current device of its own
        with self._module.stream(stream) if self.on_device else nullcontext():
            yield

    @contextlib.contextmanager
    def in_turn(self, what: str) -> Iterator[None]:
        """Inside, this stream uses the memory called ``what``: on the device it waits for the last use by another
        stream, and leaves an event for the next use. Other threads wait at a lock meanwhile."""
        with self._lock:
            stream = self.current()
            before, written = self._last.get(what, (stream, None))
            if before != stream:
                stream.wait_event(written)
            try:
                yield
            finally:
                self._last[what] = stream, None if stream is None else stream.record_event()

    def current(self) -> Any:
        """Return this thread's current stream of the device; None on a CPU."""
        return self._module.current_stream(self.device) if self.on_device else None


class MicroBatchChannels:
    """The ways of one rank's exchanges: ``first`` is there at the start, `open` adds ``second``.

    Args:
        device: of the tokens.
        streams: of two things at once; None: those of the device.
        seconds: how long one of two things waits for the other's launches at most.
    """

    def __init__(
        self,
        first: MicroBatchChannel,
        device: torch.device | None = None,
        streams: TwoStreams | None = None,
        seconds: float = _HOST_SECONDS,
    ) -> None:
        self.first, self.streams, self._seconds = first, streams or TwoStreams(device), seconds
        self.second: MicroBatchChannel | None = None
        self._ahead: Callable[[], None] = lambda: None
        self._worker = Worker("eplb_runtime second channel")
        self._second_thread: int | None = None
        self._order: CollectiveOrder | None = None
        self._forwards_only, self._gradients = False, None

    @property
    def busy(self) -> bool:
        """Return whether `both` is running two things."""
        return self._order is not None

    def open(self, second: MicroBatchChannel, ahead: Callable[[], None] = lambda: None) -> None:
        """Set the channel ``second``, for backward passes and second batches. Call it on every rank of the group,
        between forwards and backward passes. ``ahead`` is kept; `both` calls it first, on its caller's thread."""
        self.second, self._ahead = second, ahead

    def current(self) -> MicroBatchChannel:
        """Return ``second`` inside a backward pass or on the second batch's thread, if it is open; else ``first``."""
        if self.second is None:
            return self.first
        return self.second if in_backward() or threading.get_ident() == self._second_thread else self.first

    def launching(self) -> AbstractContextManager[None]:
        """Return a context in which one exchange is launched. While `both` runs, entering waits for this thread's turn
        in the order that all ranks keep; else it does nothing. Not within another."""
        order = self._order
        return nullcontext() if order is None else order.launching(int(self.current() is not self.first))

    def add_gradients_here(self) -> None:
        """Remember this thread's current stream as the one that adds gradients, for `adding`."""
        self._gradients = self.streams.current()

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Inside, gradients are written: this stream waits for the stream of `add_gradients_here` before, and that
        stream for this one after. Nothing happens if it is the same stream, or none was remembered."""
        here, other = self.streams.current(), self._gradients
        if other is None or here == other:
            yield
            return
        here.wait_stream(other)
        try:
            yield
        finally:
            other.wait_stream(here)

    def shared(self, what: Literal["counts", "low latency"]) -> AbstractContextManager[None]:
        """Return a context for memory that both things at once write: while `both` runs they take turns at ``what``."""
        return self.streams.in_turn(what) if self.busy else nullcontext()

    def before_backward(self) -> None:
        """Raise BackwardInsideError if `both` runs with ``forwards_only``; else do nothing."""
        if self._forwards_only:
            raise BackwardInsideError(
                "a backward pass inside at_once would mix up the token exchanges of the two batches: return the "
                "losses, and call backward() on one after the other when at_once has ended"
            )

    def both(
        self, current: Callable[[], T], second: Callable[[], U], swapped: bool = False, forwards_only: bool = False
    ) -> tuple[T, U]:
        """Return the results of ``current``, run on this thread, and ``second``, run at the same time on a worker
        thread that is kept; each has a stream of its own. Call it alike on every rank of the group. First calls
        ``ahead`` of `open`. ``second``, which alone may have a backward pass, has this thread's modes of gradients,
        inference and autocast. If ``current`` raises, ``second`` is not waited for (after BackwardInsideError it is).
        Raises RuntimeError if two things run already.

        Args:
            swapped: each on the other's stream: a backward pass must run on its forward's, which the caller knows.
            forwards_only: neither may have a backward pass, which would raise BackwardInsideError.
        """
        assert self.second is not None
        if self.busy:
            raise RuntimeError("two batches run at once already, and a third has no channel")
        self._ahead()
        kinds = filter(torch.amp.is_autocast_available, sorted({"cpu", self.streams.device.type}))
        modes: list[Callable[[], AbstractContextManager[Any]]] = [
            partial(torch.inference_mode, torch.is_inference_mode_enabled()),
            partial(torch.set_grad_enabled, torch.is_grad_enabled()),
            *(partial(torch.autocast, k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds),
        ]
        order = self._order = CollectiveOrder(self._seconds)
        self._forwards_only = forwards_only

        def run(number: int, work: Callable[[], Any]) -> Any:
            with contextlib.ExitStack() as around:
                around.callback(order.end, number)
                if number:
                    self._second_thread = threading.get_ident()
                    for mode in modes:
                        around.enter_context(mode())
                around.enter_context(self.streams.on(pair[number ^ swapped]))
                return work()

        try:
            with self.streams.begin() as pair:
                running = self._worker.submit(lambda: run(1, second))
                # Where `current` fails, ranks part; the other is not waited for: it may wait for ranks in vain.
                try:
                    first = run(0, current)
                except BackwardInsideError:
                    wait([running])  # on every rank alike: its forwards end, and a backward pass is refused there, too
                    raise
                return first, running.result()
        finally:
            self._order, self._forwards_only = None, False

    def alone(self, work: Callable[[], T], swapped: bool = False) -> T:
        """Return the result of ``work``, run on the first of the two streams (``swapped``: the second), so that its
        backward pass can be one of two things at once."""
        with self.streams.begin() as pair, self.streams.on(pair[swapped]):
            return work()
