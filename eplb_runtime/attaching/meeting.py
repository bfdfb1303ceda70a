"""All ranks come to ``attach`` before anything is made together: who cannot go on says so to all.

A rank that gave up alone would leave the others in the making of groups, and its next attach would meet their first.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ..ranks import Ranks, job_ranks
from .description import AttachError


def meet(ranks: Ranks, problem: Exception | None, what: str, timeout_seconds: float) -> None:
    """Wait for all ranks of the job, by way of the launcher's store.

    Args:
        problem: why this rank cannot go on; None: it can.
        what: they come to.

    Raises:
        AttachError: another rank cannot go on. This rank's own problem is raised as it is.
        RuntimeError: a rank did not come within the timeout.
    """
    if not dist.is_initialized():
        if problem is not None:
            raise problem
        return  # said where groups are made
    everyone, rank = job_ranks(ranks), dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    base = f"eplb_runtime/{what}/{everyone[0]}-{everyone[-1]}-{len(everyone)}"
    call = f"{base}/{store.add(f'{base}/calls of {rank}', 1)}"
    if problem is not None:
        store.compare_set(f"{call}/problem", "", f"rank {rank}: {problem}")
    store.set(f"{call}/{rank}", "")
    if store.add(f"{call}/here", 1) == len(everyone):
        store.set(f"{call}/all", "")
    try:
        store.wait([f"{call}/all"], timedelta(seconds=timeout_seconds))
    except RuntimeError:
        missing = [str(other) for other in everyone if not store.check([f"{call}/{other}"])]
        raise problem or RuntimeError(
            f"rank {', '.join(missing[:8])} did not call {what} within {timeout_seconds:g} s: it is collective"
        ) from None
    if problem is not None:
        raise problem
    if store.check([f"{call}/problem"]):
        raise AttachError(store.get(f"{call}/problem").decode())
