"""Two ways over the same ranks, so that two batches of a rank can travel at once.

Collectives of one group must come in the same order on all its ranks. Two threads that exchange at once have no order
between them, so each has groups of its own. Backward passes and what `Lanes.both` runs beside go the second way, once
it is open; and since that is one thing at a time, every rank's exchanges of a way are in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import TypeVar

import torch
import torch.distributed as dist

from ..load.counter import in_recompute as in_backward
from ..worker import Worker

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Lane:
    """One way.

    Args:
        tokens: the EP group, on the tokens' device.
        counts: the same ranks, for what goes ahead of tokens.
    """

    tokens: dist.ProcessGroup
    counts: dist.ProcessGroup


class Lanes:
    """The ways of one rank's exchanges.

    Args:
        first: what there is at the start.

    Attributes:
        busy: while two things run at once.
    """

    def __init__(self, first: Lane) -> None:
        self._first = first
        self._second: Lane | None = None
        self._worker = Worker("eplb_runtime second lane")
        self._beside: int | None = None
        self.busy = False

    @property
    def is_open(self) -> bool:
        """Whether there is a second way."""
        return self._second is not None

    def open(self, second: Lane) -> None:
        """From here on, there are two. On every rank of the group, between forwards and backward passes."""
        self._second = second

    def here(self) -> Lane:
        """What this thread takes now."""
        if self._second is None:
            return self._first
        return self._second if in_backward() or get_ident() == self._beside else self._first

    def is_first(self, lane: Lane) -> bool:
        """Whether it is the way that there was at the start."""
        return lane is self._first

    def both(self, here: Callable[[], T], beside: Callable[[], U]) -> tuple[T, U]:
        """Run two things at once, of which one at most has a backward pass; on every rank of the group alike.

        Args:
            here: runs on this thread. It may not wait for the other, nor run backward passes.
            beside: runs on a thread that is kept; in this one's modes of gradients and of autocast.

        Raises:
            RuntimeError: two run at once already.
        """
        assert self._second is not None
        if self.busy:
            raise RuntimeError("two batches run at once already: a third would have no way of its own")
        self.busy = True
        try:
            running = self._worker.submit(self._in_the_modes_of_this_thread(beside))
            # Where `here` fails, ranks part; the other is not waited for: it may wait for ranks that will not come.
            first = here()
            return first, running.result()
        finally:
            self.busy = False

    def _in_the_modes_of_this_thread(self, work: Callable[[], U]) -> Callable[[], U]:
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def inside() -> U:
            self._beside = get_ident()
            with (
                torch.inference_mode(inference),
                torch.set_grad_enabled(gradients),
                torch.autocast("cpu", dtype=dtype, enabled=enabled),
            ):
                return work()

        return inside
