"""All ranks come to a collective call before anything is done together: who cannot go on says so to all.

A rank that gave up alone would leave the others in the making of groups, and its next call would meet their first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from ...distributed.setting_up import SETUP_SECONDS
from ...distributed.store import JobStore
from ...utils.errors import one_line
from .description import AttachError

logger = logging.getLogger("eplb_runtime")

_ALL, _GAVE_UP = "all", "gave up"


def meet(
    everyone: Sequence[int],
    what: str,
    timeout_seconds: float,
    problem: BaseException | None = None,
    *,
    patient: bool = False,
) -> None:
    """Wait for these ranks, by way of the launcher's store.

    Args:
        what: they come to.
        problem: why this rank cannot go on; None: it can. One that was interrupted waits for nobody.
        patient: after the timeout only warn, and wait as long as the host's process group does: ranks may come at very
            different times, when they load models.

    Raises:
        AttachError: another rank cannot go on. This rank's own problem is raised as it is.
        RuntimeError: a rank did not come within the timeout, or the store does not answer.
    """
    world, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    base = f"eplb_runtime/{what}/{everyone[0]}-{everyone[-1]}-{len(everyone)}"
    store = JobStore(world, base, max(timeout_seconds, SETUP_SECONDS))
    try:
        host_seconds = world.timeout.total_seconds() if patient else 0.0  # type: ignore[attr-defined]
        _meet(store, everyone, rank, what, timeout_seconds, problem, host_seconds)
    finally:
        store.close()


def _meet(
    store: JobStore,
    everyone: Sequence[int],
    rank: int,
    what: str,
    seconds: float,
    problem: BaseException | None,
    host_seconds: float,
) -> None:
    """`meet` in a store of its own; host_seconds: how long the host's process group waits, if this waits as long."""
    while True:
        call = store.add(f"calls of {rank}", 1)
        # What the others have left without this rank is over; they are to come again.
        if store.look(f"{call}/state") != _GAVE_UP:
            break
    if problem is not None:
        said = str(problem) if isinstance(problem, Exception) else one_line(problem, with_type=True)
        store.compare_set(f"{call}/problem", f"rank {rank}: {said}")
    store.compare_set(f"{call}/{rank}", "here")
    if store.add(f"{call}/here", 1) == len(everyone):
        store.compare_set(f"{call}/state", _ALL)
    if problem is not None and not isinstance(problem, Exception):
        raise problem
    missing = _wait(store, call, everyone, seconds)
    if missing and host_seconds:
        logger.warning("%s waits for rank %s, which has not come for %g s", what, missing, seconds)
        missing = _wait(store, call, everyone, max(0.001, host_seconds - seconds))
        seconds = host_seconds
    if missing:
        store.compare_set(f"{call}/state", _GAVE_UP)
    if problem is not None:
        raise problem
    if store.look(f"{call}/state") != _ALL:
        absent = missing or _absent(store, call, everyone)  # where another rank has given up first
        raise RuntimeError(
            f"rank {absent} did not come to {what} within {seconds:g} s: it is collective, every rank calls it"
        )
    _forget(store, call - 1, rank, is_first=rank == everyone[0])
    if said := store.look(f"{call}/problem"):
        raise AttachError(said)


def _wait(store: JobStore, call: int, everyone: Sequence[int], seconds: float) -> str:
    """Until all have come; else who has not."""
    return "" if store.wait(f"{call}/state", seconds) else _absent(store, call, everyone)


def _forget(store: JobStore, call: int, rank: int, *, is_first: bool) -> None:
    """All ranks have come to a later call. One that was given up stays on record, for ranks that never came to it."""
    store.delete(f"{call}/{rank}")
    if is_first and store.look(f"{call}/state") == _ALL:
        for key in ("problem", "here", "state"):
            store.delete(f"{call}/{key}")


def _absent(store: JobStore, call: int, everyone: Sequence[int]) -> str:
    return ", ".join([str(other) for other in everyone if not store.look(f"{call}/{other}")][:8])
