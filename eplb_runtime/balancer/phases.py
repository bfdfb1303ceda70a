"""Phases of a job: training, and rollouts in which the balancer is suspended and keeps no memory.

Loops of reinforcement learning free weights, gradients and optimizer state between training steps. What the balancer
keeps in addition is freed here as well; replicas take theirs again, and a migration what it needs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..distributed.consensus import barrier
from ..events import EventLog, Suspended, SuspensionEnded
from ..utils.text import one_line
from .loop_state import LoopState
from .rebalancer import Rebalancer
from .runtime import Runtime

logger = logging.getLogger("eplb_runtime")


class Phases:
    """Suspends and resumes one balancer. Both are collective over the job, between steps."""

    def __init__(self, runtime: Runtime, rebalancer: Rebalancer, events: EventLog, loop: LoopState) -> None:
        self._runtime = runtime
        self._rebalancer = rebalancer
        self._memory = loop.tensors.memory
        self._events = events
        self._loop = loop
        self._since = 0.0
        self._is_without_replicas = False

    def suspend(self) -> int:
        """`Balancer.suspend`."""
        replicas = self._runtime.maps.replicas
        freed = self._memory.why_freed() if replicas is not None and not self._loop.suspended else ""
        if said := self._agreed("suspend()", f"{freed}, and free it after suspend() alone" if freed else ""):
            raise RuntimeError(f"suspend(): {said}")
        if self._loop.suspended:
            return 0
        if self._rebalancer.finish():
            self._loop.on_moved()
        self._runtime.registry.note_state_here()
        self._loop.suspended, self._since = True, time.perf_counter()
        nbytes = self._rebalancer.free_memory()
        if replicas is not None:
            try:
                nbytes += replicas.free()
            except RuntimeError as error:  # homes that lie before them are cloned first
                logger.warning("suspended, but replicas keep some of their memory: %s", one_line(error))
        self._events.emit(Suspended(self._rebalancer.step, nbytes))
        return nbytes

    def resume(self) -> bool:
        """`Balancer.resume`. Returns whether replicas are to be refreshed, which all ranks do."""
        suspended = self._loop.suspended
        problem = self._why_not_here(self._runtime.registry.why_state_lacks) if suspended else ""
        if said := self._agreed("resume()", problem):
            self._free_replicas()
            raise RuntimeError(f"resume(): {said}")
        if not suspended:
            return False
        self._loop.suspended, seconds = False, time.perf_counter() - self._since
        self._rebalancer.clock.exclude(seconds)
        self._events.emit(SuspensionEnded(self._rebalancer.step, seconds))
        return self._runtime.maps.replicas is not None

    def end(self) -> None:
        """Take the memory of replicas again if the balancer ends while it is suspended: homes lie before it."""
        if self._loop.suspended and self._runtime.maps.replicas is not None:
            problem = self._why_not_here()
            self._is_without_replicas = bool(problem)
            if problem:
                logger.warning(
                    "closed while suspended, and the layers of experts have no memory to compute in: %s; load the "
                    "weights and call balancer.resume() before the next forward",
                    problem,
                )
        self._loop.suspended = False

    def resume_after_end(self) -> bool:
        """Take the memory that `end` could not take; returns whether there was any to take."""
        if not self._is_without_replicas:
            return False
        if problem := self._why_not_here():
            raise RuntimeError(f"resume(): {problem}")
        self._is_without_replicas = False
        return True

    def _why_not_here(self, why_state_lacks: Callable[[], str] = str) -> str:
        """Take memory of replicas again; returns why weights, optimizer state or replicas have none."""
        replicas = self._runtime.maps.replicas
        if (lacks := self._memory.why_freed() or why_state_lacks()) or replicas is None:
            return lacks
        try:
            replicas.take(self._rebalancer.placement())
        except Exception as error:
            return f"no memory for replicas: {one_line(error)}"
        return ""

    def _free_replicas(self) -> None:
        replicas = self._runtime.maps.replicas
        if self._loop.suspended and replicas is not None and not self._memory.why_freed():
            replicas.free()

    def _agreed(self, what: str, problem: str) -> str:
        """Wait for all ranks, by the launcher's store alone; returns the problem of a rank, or "". If one does not
        come, all of it stays suspended: the job may free weights again, and homes lie before replicas."""
        job, own = self._runtime.job, RuntimeError(problem) if problem else None
        try:
            return barrier(list(job.ranks), what, self._runtime.config.timeout_seconds, own)
        except RuntimeError as error:
            if error is own:
                return f"rank {job.rank}: {problem}"
            self._free_replicas()
            raise
