"""All ranks come to a collective call before anything is done together: who cannot go on says so to all.

A rank that gave up alone would leave the others in the making of groups, and its next call would meet their first.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from .description import AttachError

_ALL, _GAVE_UP = "all", "gave up"


def meet(everyone: Sequence[int], what: str, timeout_seconds: float, problem: Exception | None = None) -> None:
    """Wait for these ranks, by way of the launcher's store.

    Args:
        what: they come to.
        problem: why this rank cannot go on; None: it can.

    Raises:
        AttachError: another rank cannot go on. This rank's own problem is raised as it is.
        RuntimeError: a rank did not come within the timeout.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    base = f"eplb_runtime/{what}/{everyone[0]}-{everyone[-1]}-{len(everyone)}"
    while True:
        call = f"{base}/{store.add(f'{base}/calls of {rank}', 1)}"
        state = f"{call}/state"
        # What the others have left without this rank is over; they are to come again.
        if not store.check([state]) or store.get(state) != _GAVE_UP.encode():
            break
    if problem is not None:
        store.compare_set(f"{call}/problem", "", f"rank {rank}: {problem}")
    store.set(f"{call}/{rank}", "here")
    if store.add(f"{call}/here", 1) == len(everyone):
        store.compare_set(state, "", _ALL)
    try:
        store.wait([state], timedelta(seconds=timeout_seconds))
    except RuntimeError:
        store.compare_set(state, "", _GAVE_UP)
    if problem is not None:
        raise problem
    if store.get(state) != _ALL.encode():
        missing = [str(other) for other in everyone if not store.check([f"{call}/{other}"])]
        raise RuntimeError(
            f"rank {', '.join(missing[:8])} did not come to {what} within {timeout_seconds:g} s: it is collective, "
            "every rank calls it"
        )
    if store.check([f"{call}/problem"]):
        raise AttachError(store.get(f"{call}/problem").decode())
