"""Measurements on the user's machine: planner, dispatch, migration, training. Others: ``tests/benchmarks``."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor


def timed(
    ways: Sequence[Callable[[], object]], repeats: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Call ``ways`` in turns, after a warm-up call of each, and return their times. Collective with a ``group``.

    Returns:
        Seconds of a call, float64 ``[repeats, ways]``; with a ``group`` those of its slowest rank.
    """
    synchronize = torch.get_device_module(device).synchronize
    seconds = torch.zeros(repeats, len(ways), dtype=torch.float64)
    for repeat in range(-1, repeats):
        for index, work in enumerate(ways):
            if group is not None:
                dist.barrier(group=group)
            synchronize(device)
            began = time.perf_counter()
            work()
            synchronize(device)
            if repeat >= 0:
                seconds[repeat, index] = time.perf_counter() - began
    return seconds if group is None else slowest(seconds, group)


def slowest(seconds: Tensor | Sequence[float], group: dist.ProcessGroup | None = None) -> Tensor:
    """Return each number's largest value over ranks, float64. Collective over gloo; None: the default group."""
    over_ranks = torch.as_tensor(seconds, dtype=torch.float64).clone()
    dist.all_reduce(over_ranks, op=dist.ReduceOp.MAX, group=group)
    return over_ranks


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the median of ``one / other``, pair by pair."""
    return median(a / b for a, b in zip(one, other, strict=True))
