"""Layers are planned by themselves, so they can share the machine's cores; compiled code lets other threads run."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

MOST_THREADS = 8


def free_cores() -> int:
    """Cores that this process may use and nobody does now, by the load of the last minute; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, min(MOST_THREADS, round(cores - busy)))


def in_threads(work: Callable[[int], Result], count: int) -> list[Result]:
    """``work`` of 0, 1, ... count - 1, in order; in as many threads as cores are free."""
    threads = min(free_cores(), count)
    if threads < 2:
        return [work(index) for index in range(count)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(count)))
