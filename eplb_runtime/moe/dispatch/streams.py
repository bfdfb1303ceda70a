"""Streams for two batches at once, and for what both of them use.

Not here: which thread runs what (`channels.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
U = TypeVar("U")


class TwoStreams:
    """Two streams of a device beside the caller's. They start after what the caller's has to do, and it goes on after
    both; meanwhile it has nothing to do. No host sync.

    So memory needs no `record_stream`. What was made before and is freed inside belongs to the caller's stream, on
    which nothing is made until both are through; what was made inside and is freed outside belongs to one of these two,
    on which nothing is made until it has waited for the caller's again; and inside, batches have nothing in common that
    is made or freed.

    Args:
        device: where.
        module: that of its kind, as `torch.cuda`; None: torch's.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self._device = device
        self._module: Any = module if module is not None else torch.get_device_module(device)
        self._made: tuple[Any, Any] | None = None

    def fork(
        self, one: Callable[[], T], other: Callable[[], U], swapped: bool
    ) -> tuple[Callable[[], T], Callable[[], U], Callable[[], None]]:
        """The same calls, each on a stream of its own and on any thread; and what has the current stream wait for both.

        Args:
            swapped: the first on the second stream.
        """
        caller = self._module.current_stream(self._device)
        first, second = self._pair()
        for stream in (first, second):
            stream.wait_stream(caller)

        def join() -> None:
            for stream in (first, second):
                caller.wait_stream(stream)

        return self._on(second if swapped else first, one), self._on(first if swapped else second, other), join

    def after_the_other(self) -> None:
        """The current stream, one of the two, goes on after what the other has to do now."""
        here, pair = self._module.current_stream(self._device), self._pair()
        for stream in pair:
            if here in pair and here != stream:
                here.wait_stream(stream)

    def in_order_with_this_one(self) -> Callable[[], AbstractContextManager[None]]:
        """A context, for any stream, in which it uses what the stream that is current now writes: it begins after what
        that has to do then, and that goes on after it."""
        writer = self._module.current_stream(self._device)

        @contextlib.contextmanager
        def in_order() -> Iterator[None]:
            here = self._module.current_stream(self._device)
            if here == writer:
                yield
                return
            here.wait_stream(writer)
            try:
                yield
            finally:
                writer.wait_stream(here)

        return in_order

    def one_after_another(self) -> StreamGuard:
        """For what both use."""
        return StreamGuard(self._device, self._module)

    def alone(self, work: Callable[[], T], swapped: bool) -> T:
        """One call on one of the streams, of which the current stream waits."""
        run, _, join = self.fork(work, lambda: None, swapped)
        try:
            return run()
        finally:
            join()

    def _pair(self) -> tuple[Any, Any]:
        if self._made is None:
            self._made = self._module.Stream(self._device), self._module.Stream(self._device)
        return self._made

    def _on(self, stream: Any, work: Callable[[], T]) -> Callable[[], T]:
        def on_stream() -> T:
            self._module.set_device(self._device)  # each thread has a current device of its own
            with self._module.stream(stream):
                return work()

        return on_stream


class StreamGuard:
    """What uses the same memory on several streams: each use waits for the one before, on the device alone.

    Args:
        device, module: as of `TwoStreams`.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._module = device, module
        self._lock = threading.Lock()
        self._last: Any = None
        self._event: Any = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the current stream uses it."""
        with self._lock:
            stream = self._module.current_stream(self._device)
            if self._last is not None and self._last != stream:
                stream.wait_event(self._event)
            try:
                yield
            finally:
                self._event = stream.record_event()
                self._last = stream
