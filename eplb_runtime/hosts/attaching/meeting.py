"""All ranks come to a collective call before anything is done together: who cannot go on says so to all.

A rank that gave up alone would leave the others in the making of groups, and its next call would meet their first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from .description import AttachError

logger = logging.getLogger("eplb_runtime")

_ALL, _GAVE_UP = "all", "gave up"


def meet(
    everyone: Sequence[int],
    what: str,
    timeout_seconds: float,
    problem: Exception | None = None,
    *,
    patient: bool = False,
) -> None:
    """Wait for these ranks, by way of the launcher's store.

    Args:
        what: they come to.
        problem: why this rank cannot go on; None: it can.
        patient: after the timeout only warn, and wait as long as the host's process group does: ranks may come at very
            different times, when they load models.

    Raises:
        AttachError: another rank cannot go on. This rank's own problem is raised as it is.
        RuntimeError: a rank did not come within the timeout.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    base = f"eplb_runtime/{what}/{everyone[0]}-{everyone[-1]}-{len(everyone)}"
    while True:
        number = store.add(f"{base}/calls of {rank}", 1)
        call = f"{base}/{number}"
        state = f"{call}/state"
        # What the others have left without this rank is over; they are to come again.
        if not store.check([state]) or store.get(state) != _GAVE_UP.encode():
            break
    if problem is not None:
        store.compare_set(f"{call}/problem", "", f"rank {rank}: {problem}")
    store.set(f"{call}/{rank}", "here")
    if store.add(f"{call}/here", 1) == len(everyone):
        store.compare_set(state, "", _ALL)
    missing = _wait(store, call, everyone, timeout_seconds)
    if missing and patient:
        logger.warning("%s waits for rank %s, which has not come for %g s", what, missing, timeout_seconds)
        missing = _wait(store, call, everyone, max(0.001, _host_seconds(store) - timeout_seconds))
        timeout_seconds = _host_seconds(store)
    if missing:
        store.compare_set(state, "", _GAVE_UP)
    if problem is not None:
        raise problem
    if store.get(state) != _ALL.encode():
        absent = missing or _absent(store, call, everyone)  # where another rank has given up first
        raise RuntimeError(
            f"rank {absent} did not come to {what} within {timeout_seconds:g} s: it is collective, every rank calls it"
        )
    _forget(store, f"{base}/{number - 1}", rank, is_first=rank == everyone[0])
    if store.check([f"{call}/problem"]):
        raise AttachError(store.get(f"{call}/problem").decode())


def _wait(store: dist.Store, call: str, everyone: Sequence[int], seconds: float) -> str:
    """Until all have come; else who has not."""
    try:
        store.wait([f"{call}/state"], timedelta(seconds=seconds))
    except RuntimeError:
        return _absent(store, call, everyone)
    return ""


def _forget(store: dist.Store, call: str, rank: int, *, is_first: bool) -> None:
    """All ranks have come to a later call. One that was given up stays on record, for ranks that never came to it."""
    with suppress(RuntimeError):  # a store of the host's may keep all it was given
        store.delete_key(f"{call}/{rank}")
        if is_first and store.check([f"{call}/state"]) and store.get(f"{call}/state") == _ALL.encode():
            for key in ("problem", "here", "state"):
                store.delete_key(f"{call}/{key}")


def _absent(store: dist.Store, call: str, everyone: Sequence[int]) -> str:
    return ", ".join([str(other) for other in everyone if not store.check([f"{call}/{other}"])][:8])


def _host_seconds(store: dist.Store) -> float:
    """The timeout that the host gave its process group."""
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    return timeout.total_seconds()
