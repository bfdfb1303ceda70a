"""A stream of a transport's own, beside the one that trains; on a CPU what is given to it is done at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from .base import TransportError

LEFT_SECONDS = 5.0
"""Longest wait for work that is still on a stream, as when a rank gives up."""


class SideStream:
    """Where writes and copies run in order; on a CPU they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.pointer = 0 if self._stream is None else self._stream.cuda_stream

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            yield

    def after_current(self) -> None:
        """What comes from here on runs after what the current stream has to do now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def mark(self) -> Callable[[], bool]:
        """Asks whether all so far is done."""
        if self._stream is None:
            return lambda: True
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.query


def wait_until(done: Callable[[], bool], deadline: float, what: str) -> None:
    """Ask again and again until it is done; TransportError: the deadline passed."""
    while not done():
        if time.monotonic() > deadline:
            raise TransportError(f"{what} was not done in time")
        time.sleep(0.0002)
