"""Layers are planned by themselves, so they can share the machine's cores; compiled code lets other threads run. Where
time is short, those with most to gain are planned first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

MOST_THREADS = 8


def free_cores() -> int:
    """Cores that this process may use and nobody does now, by the load of the last minute; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, min(MOST_THREADS, round(cores - busy)))


class Deadline:
    """When planning has to come to its end.

    Args:
        seconds: from now on.

    Attributes:
        left_out: layers for which no time was left; who leaves them out adds them.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.perf_counter() + seconds
        self.left_out: set[int] = set()

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self._until


def in_time(
    work: Callable[[int], Result], otherwise: Callable[[int], Result], order: Sequence[int], deadline: Deadline | None
) -> list[Result]:
    """`in_threads`, begun in this order; ``otherwise`` of what would begin after the deadline. The first is done in any
    case.

    Args:
        order: 0, 1, ... count - 1, the most urgent first.
    """
    if deadline is None:
        return in_threads(work, len(order))

    def one(place: int) -> Result:
        return otherwise(order[place]) if place and deadline.is_over else work(order[place])

    found = dict(zip(order, in_threads(one, len(order)), strict=True))
    return [found[index] for index in range(len(order))]


def in_threads(work: Callable[[int], Result], count: int) -> list[Result]:
    """``work`` of 0, 1, ... count - 1, in order; in as many threads as cores are free."""
    threads = min(free_cores(), count)
    if threads < 2:
        return [work(index) for index in range(count)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(count)))
