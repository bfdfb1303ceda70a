"""One rank's channel to the others: work on the control group, one thing after another on a thread of its own, and new
connections after a failure (`reconnect`). What is done in it is collective, in the same order on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import torch.distributed as dist

from ..utils.worker import Worker
from .consensus import Agreement, Verdict
from .points import Probe
from .private_groups import hang_up
from .process_groups import ProcessGroups, host_timeout
from .reconnect import Link, Reconnection
from .transports.base import Transport

logger = logging.getLogger("eplb_runtime")
T = TypeVar("T")
Work = Callable[[dist.ProcessGroup, Agreement], T]
"""Work on the control group, given that group and the agreement over it."""

A_LITTLE_SECONDS = 1.0
"""Extra wait after a timeout for work that may be almost done."""


class ConnectionLost(RuntimeError):
    """The ranks have lost each other; nothing is agreed on until all have new connections."""


class ControlChannel:
    """The control group of one rank.

    Args:
        make_transport: as of `Reconnection`.
        begin: called first on the channel's thread.

    Attributes:
        agreement: comparisons of ranks on the control group of now.
        worker: the channel's thread.
        reconnection: new connections; the old ones are not to be used while it is under way.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        make_transport: Callable[[dist.ProcessGroup, float], Transport],
        begin: Callable[[], None],
        probe: Probe,
    ) -> None:
        self._groups = groups
        self._probe = probe
        self._seconds = groups.timeout_seconds
        self.worker = Worker("eplb_runtime", begin)
        self.reconnection = Reconnection(groups, make_transport, probe)
        self.agreement = self._new_agreement()

    def _new_agreement(self) -> Agreement:
        seconds = host_timeout(self._groups.backend).total_seconds()
        return Agreement(self._groups.control, self._groups.store, self._probe, seconds)

    def require(self, what: str) -> None:
        """Raise ConnectionLost while the ranks connect again."""
        if self.reconnection.under_way:
            raise ConnectionLost(
                f"{what} cannot work while the ranks connect again (see the log): try again some steps later"
            )

    def _whole(self, work: Work[T]) -> Callable[[], T]:
        """Return work on the control group of now. If it fails, this rank hangs up: the others come back from their
        part of it at once, and later work of this rank does not mix with that."""
        group, agreement = self._groups.control, self.agreement

        def whole() -> T:
            try:
                return work(group, agreement)
            except Exception:
                hang_up(group)
                raise

        return whole

    def submit(self, work: Work[T]) -> Future[T]:
        """Begin work on the control group of now, and return its future."""
        return self.worker.submit(self._whole(work))

    def result(self, work: Future[T], key: str) -> T:
        """Return what `submit` began, but do not wait for long. A rank whose wait times out records that under ``key``,
        so that no rank acts on it any more; if the others have agreed by then, this rank's own thread is almost done.
        Raises ConnectionLost: there is no result."""
        if not wait([work], self._seconds).done:
            late = Verdict(False, f"rank {self._groups.job.rank} has waited {self._seconds:g} s for it", True)
            verdict = self.agreement.record(key, late)
            if not (verdict.commit and wait([work], A_LITTLE_SECONDS).done):
                raise ConnectionLost(verdict.cause or late.cause)
        try:
            return work.result()
        except ConnectionLost:
            raise
        except Exception as error:
            logger.debug("work on the control group failed", exc_info=True)
            raise ConnectionLost(f"{type(error).__name__}: {error}") from error

    def run(self, work: Work[T], seconds: float | None = None) -> T:
        """Do work on the control group once what was begun has left it, and return its result; ConnectionLost: it
        failed, or was not done in time."""
        self.require("a comparison of ranks")
        try:
            seconds = self._seconds if seconds is None else seconds
            return self.worker.do(self._whole(work), seconds + A_LITTLE_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            raise ConnectionLost(str(error)) from error
        except Exception as error:
            raise ConnectionLost(f"{type(error).__name__}: {error}") from error

    def broadcast_notice(self, notice: Callable[[Agreement], object]) -> None:
        """Queue a small collective on the control group, without waiting for it."""
        if not self.reconnection.under_way and not self.worker.closed:
            self.submit(lambda _, agreement: notice(agreement))

    def reconnect(self, boundary: int) -> Link | None:
        """Use new connections if all ranks meet at this boundary; None: there are none yet."""
        if (link := self.reconnection.at_boundary(boundary)) is not None:
            self.agreement = self._new_agreement()
        return link
