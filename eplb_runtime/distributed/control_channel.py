"""One rank's channel to the others: work on the control group, one thing after another on a thread of its own, and new
connections after a failure. What is done in it is collective, in the same order on every rank.

New control and migration groups are made by all ranks at the end of one step, agreed on by words in the launcher's
store under ``connections/N/``, N the attempt. A rank whose connections are whole asks the store nothing.

1. A rank that lost the others closes its old connections, so that they fail in their next decision, and counts itself
   in ``here``. Training goes on.
2. When all ranks are in ``here``, the first word of ``step`` is the boundary at which they meet, a few ahead. Ranks
   that train together are at most one boundary apart, so all read it before they come there.
3. There all ranks meet in ``go``, make the groups and the transport, and meet in ``hold``: all use them, or none does.

An attempt in vain, or whose boundary has passed, is followed by the next; after `MOST_TRIES` a warning says so.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from ..utils.text import one_line
from ..utils.worker import Worker
from .consensus import Agreement, Phase, Probe, Verdict, arrive, close_connections, outcome_of
from .process_groups import ProcessGroups, host_timeout
from .store import StoreError
from .transports.base import Transport

logger = logging.getLogger("eplb_runtime")
T = TypeVar("T")
Work = Callable[[dist.ProcessGroup, Agreement], T]
"""Work on the control group, given it and the agreement over it."""
MakeTransport = Callable[[dist.ProcessGroup, float], Transport]
"""Makes a transport on a migration group and warms it up, in so many seconds; leaves nothing where it fails."""

A_LITTLE_SECONDS = 1.0
"""Extra wait after a timeout for work that may be almost done."""
MOST_TRIES, LEAD_STEPS = 5, 2
"""Attempts to connect again, and how many boundaries ahead ranks meet."""


class ConnectionLost(RuntimeError):
    """The ranks have lost each other; nothing is agreed on until all have new connections."""


class ControlChannel:
    """The control group of one rank.

    Attributes:
        worker: its thread, on which ``begin`` is called first.
        agreement: comparisons of ranks on the control group of now.
        reconnecting: whether the old connections are not to be used any more, and no new ones hold yet.
        tries: attempts since the connections broke.
    """

    def __init__(self, groups: ProcessGroups, make_transport: MakeTransport, begin: Callable[[], None], probe: Probe):
        self._groups, self._make_transport, self._probe = groups, make_transport, probe
        self._seconds, self._attempt, self._here = groups.timeout_seconds, 1, 0
        self.reconnecting, self.tries = False, 0
        self.worker = Worker("eplb_runtime", begin)
        self.agreement = self._new_agreement()

    def _new_agreement(self) -> Agreement:
        groups, seconds = self._groups, host_timeout(self._groups.backend).total_seconds()
        return Agreement(groups.control, groups.store, self._probe, seconds)

    def require(self, what: str) -> None:
        """Raise ConnectionLost, which names ``what``, while the ranks connect again."""
        if self.reconnecting:
            raise ConnectionLost(f"{what} cannot work while the ranks connect again (see the log): try again later")

    def _do(self, work: Work[T], group: dist.ProcessGroup, agreement: Agreement) -> T:
        """Do work on the thread. If it fails, this rank hangs up: no other waits for it, or gets later messages."""
        try:
            return work(group, agreement)
        except Exception:
            close_connections(group)
            raise

    def submit(self, work: Work[T]) -> Future[T]:
        """Queue work on the channel's thread, and return its future. A failure closes the group's connections."""
        return self.worker.submit(partial(self._do, work, self._groups.control, self.agreement))

    def result(self, work: Future[T], key: str) -> T:
        """Return the result of work that `submit` queued; ConnectionLost: there is none. A rank whose wait times out
        records a refusal under ``key``, so that no rank acts on the work; if a commit is there, it waits 1 s more."""
        if not wait([work], self._seconds).done:
            late = Verdict(False, f"rank {self._groups.job.rank} has waited {self._seconds:g} s for it", True)
            verdict = self.agreement.record(key, late)
            if not (verdict.commit and wait([work], A_LITTLE_SECONDS).done):
                raise ConnectionLost(verdict.cause or late.cause)
        try:
            return work.result()
        except Exception as error:
            logger.debug("work on the control group failed", exc_info=True)
            raise ConnectionLost(one_line(error, with_type=True)) from error

    def run(self, work: Work[T], seconds: float | None = None) -> T:
        """Do work on the channel's thread after what is queued there, and return its result. ConnectionLost: it failed
        (then the control group's connections are closed), or was not done in time, or the ranks connect again."""
        self.require("a comparison of ranks")
        try:
            seconds = self._seconds if seconds is None else seconds
            work_here = partial(self._do, work, self._groups.control, self.agreement)
            return self.worker.do(work_here, seconds + A_LITTLE_SECONDS)
        except Exception as error:
            is_named = not isinstance(error, RuntimeError | TimeoutError)
            raise ConnectionLost(one_line(error, with_type=is_named)) from error

    def broadcast_notice(self, notice: Callable[[Agreement], object]) -> None:
        """Queue ``notice`` on the channel's thread, without waiting for it; nothing if closed or reconnecting."""
        if not self.reconnecting and not self.worker.closed:
            self.submit(lambda _, agreement: notice(agreement))

    def begin_reconnecting(self) -> None:
        """Set ``reconnecting``, zero ``tries``, and close the broken connections; nothing while it is set already."""
        if not self.reconnecting:
            self.reconnecting, self.tries = True, 0
            self._groups.close_connections()

    def reconnect(self, boundary: int) -> Transport | None:
        """Try to connect again at the end of a step. If all ranks meet at this ``boundary``, switch to new groups,
        clear ``reconnecting``, and return a transport; else None. `ProcessGroups.release_unused` ends old groups."""
        if not self.reconnecting or self.tries > MOST_TRIES:
            return None
        try:
            return self._connect() if boundary == self._step_of_meeting(boundary) else None
        except StoreError as error:  # it is asked again at the next boundary
            logger.debug("the ranks could not connect yet: %s", error)
            return None

    def _key(self, word: str) -> str:
        return f"connections/{self._attempt}/{word}"

    def _step_of_meeting(self, boundary: int) -> int | None:
        """Return the boundary at which all ranks meet; None: not all are known to have lost their connections."""
        store = self._groups.store
        while store.word_of(self._key("hold")) or int(store.word_of(self._key("step")) or boundary) < boundary:
            self._attempt += 1
        if joins := self._here != self._attempt:
            self.tries += 1
            if self.tries > MOST_TRIES:
                logger.warning("the ranks could not connect in %d tries: nothing is rebalanced any more", MOST_TRIES)
                return None
        here = store.add(self._key("here"), int(joins))
        self._here = self._attempt
        if here < len(self._groups.job.ranks):
            return None
        return int(store.compare_set(self._key("step"), str(boundary + LEAD_STEPS)))

    def _connect(self) -> Transport | None:
        """Meet the others, make groups and the transport, and take them over if all ranks could."""
        # On a busy machine no try would be through in a short timeout: each has more time than the one before.
        groups, problem = self._groups, ""
        seconds = min(groups.setup_seconds, groups.timeout_seconds * self.tries)
        with ExitStack() as undo:
            if cause := self._meet("go", "", seconds):
                groups.store.compare_set(self._key("hold"), cause)
            else:
                undo.callback(groups.release_unused)
                try:
                    made = groups.make_again(self._attempt, seconds)
                    transport = self._make_transport(made[1], seconds)
                    undo.callback(transport.close)
                    self._probe(Phase.CONNECTED, self._attempt)
                except Exception as error:
                    problem = one_line(error, with_type=True)
                if not (cause := self._meet("hold", problem, 3 * seconds)):
                    undo.pop_all()
                    groups.take_over(made)
                    self.reconnecting, self.agreement = False, self._new_agreement()
                    return transport
        logger.info("the ranks could not connect: %s", cause)
        return None

    def _meet(self, word: str, problem: str, seconds: float) -> str:
        """Wait for all ranks. Returns why they cannot go on, the same on all of them; "": they can."""
        store, job, key = self._groups.store, self._groups.job, self._key(word)
        arrive(store, key, job.ranks, job.rank, problem and f"rank {job.rank}: {problem}")
        return outcome_of(store, key, job.ranks, seconds)[0]
