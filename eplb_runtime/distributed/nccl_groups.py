"""NCCL's part of the groups that experts travel over: all that a job may need, made at attach.

The watchdog of torch's NCCL groups ends the process after a timeout, and a new group reads in the environment alone
that it must not. Beside training nothing is written there: other threads read it, and a group that the host makes then
would have the setting too. So the groups for later connections exist from the start; they connect at their first call.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger("eplb_runtime")

SPARE = 4
"""Times that connections can be made anew. Each takes two threads from the start, which look at it now and then."""
_NAME = "TORCH_NCCL_BLOCKING_WAIT"


class NoGroupsLeft(RuntimeError):
    """Connections over NCCL were made anew as often as they can be."""


class NcclGroups:
    """Backends that are used one after another, the same on all ranks.

    Args:
        store: where their ranks meet.
        name: new, and equal on the ranks of a group only.
        ranks: global ones, in the order of the group.
        rank: this one's global number.
        timeout: of their watchdogs, which say it and do nothing.
    """

    def __init__(self, store: dist.Store, name: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        self._names = [f"{name}/{number}" for number in range(1 + SPARE)]
        self._next = 0
        with watchdog_that_ends_nothing():
            self._made = [nccl_backend(store, one, ranks, rank, timeout) for one in self._names]

    def take(self, control: dist.ProcessGroup) -> tuple[str, Any]:
        """The next one that no rank has used, and its name. Collective.

        Args:
            control: gloo, between all ranks of the job.

        Raises:
            NoGroupsLeft: on all of them.
            RuntimeError: a rank did not come in time.
        """
        number = torch.tensor([self._next])
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=control)  # a rank that failed early has used fewer
        taken = int(number)
        if taken >= len(self._made):
            raise NoGroupsLeft(
                f"connections over NCCL were made anew {SPARE} times, and no more are ready: experts stay where they "
                "are until the job starts again"
            )
        skipped, self._next = self._made[self._next : taken], taken + 1
        _end(skipped)
        return self._names[taken], self._made[taken]

    def close(self) -> None:
        """Give back those that were not used; the others go with their groups."""
        unused, self._made = self._made[self._next :], self._made[: self._next]
        _end(unused)


def _end(unused: Sequence[Any]) -> None:
    for backend in unused:
        try:
            backend.abort()
        except Exception as error:
            logger.debug("an unused NCCL group could not be ended: %s", error)


def nccl_backend(store: dist.Store, name: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> Any:
    """One backend; it connects at its first call."""
    ranks = list(ranks)
    options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
    options.is_high_priority_stream = False
    options._timeout = timeout
    options.global_ranks_in_group = ranks
    options.group_name = name  # type: ignore[assignment]
    prefixed = dist.PrefixStore(name, store)
    return dist.ProcessGroupNCCL(prefixed, ranks.index(rank), len(ranks), options)  # type: ignore[attr-defined]


@contextlib.contextmanager
def watchdog_that_ends_nothing() -> Iterator[None]:
    """Inside, NCCL groups are made whose watchdog leaves the process alone: who waits on them looks for himself."""
    before = os.environ.get(_NAME)
    os.environ[_NAME] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NAME]
        else:
            os.environ[_NAME] = before
