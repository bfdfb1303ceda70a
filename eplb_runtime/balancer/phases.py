"""Breaks in a job: rollouts, in which the balancer is suspended and keeps no memory; and a later run that goes on.

Loops of reinforcement learning free weights, gradients and optimizer state between training steps. What the balancer
keeps in addition is freed here as well; replicas take theirs again, and a migration what it needs.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from ..distributed.consensus import barrier
from ..events import EventLog, Suspended, SuspensionEnded
from ..load.counter import resume_load
from ..placement import Placement, PlacementError
from ..utils.text import one_line
from .loop_state import LoopState
from .rebalancer import Rebalancer
from .runtime import Runtime

logger = logging.getLogger("eplb_runtime")


class Phases:
    """Suspends and resumes one balancer. Both are collective over the job, between steps."""

    def __init__(self, runtime: Runtime, rebalancer: Rebalancer, events: EventLog, loop: LoopState) -> None:
        self._runtime, self._rebalancer, self._events, self._loop = runtime, rebalancer, events, loop
        self._replicas, self._memory = runtime.maps.replicas, loop.tensors.memory
        self._since = 0.0

    def suspend(self) -> int:
        """Do what `Balancer.suspend` says: free memory outside the model. Returns its bytes, 0 if suspended before."""
        freed = self._memory.why_freed() if self._replicas is not None and not self._loop.suspended else ""
        self._meet("suspend()", freed and f"{freed}, and free it after suspend() alone")
        if self._loop.suspended:
            return 0
        if self._rebalancer.commit_in_flight():
            self._loop.on_moved()
        self._runtime.registry.note_state_here()
        self._loop.suspended, self._since = True, time.perf_counter()
        nbytes = self._rebalancer.free_memory()
        if self._replicas is not None:
            try:
                nbytes += self._replicas.free()
            except RuntimeError as error:  # homes that lie before them are cloned first
                logger.warning("suspended, but replicas keep some of their memory: %s", one_line(error))
        self._events.emit(Suspended(self._rebalancer.step, nbytes))
        return nbytes

    def resume(self) -> None:
        """Do what `Balancer.resume` says: take the memory of replicas again, and refresh them."""
        if self._loop.closed:  # homes lie before replicas, whose memory `end` could not take
            if self._replicas is not None and self._replicas.is_freed and (problem := self._why_not_here()):
                raise RuntimeError(f"resume(): {problem}")
            return
        suspended = self._loop.suspended
        self._meet("resume()", self._why_not_here(self._runtime.registry.why_state_lacks) if suspended else "")
        if not suspended:
            return
        self._loop.suspended, seconds = False, time.perf_counter() - self._since
        self._rebalancer.clock.exclude(seconds)
        self._events.emit(SuspensionEnded(self._rebalancer.step, seconds))
        self._rebalancer.refresh_replicas()

    def end(self) -> None:
        """End a suspension: take the memory of replicas again, as homes lie in it, too. A failure is logged."""
        if self._replicas is not None and self._replicas.is_freed and (problem := self._why_not_here()):
            logger.warning(
                "closed while suspended, and the layers of experts have no memory to compute in: %s; load the weights "
                "and call balancer.resume() before the next forward",
                problem,
            )
        self._loop.suspended = False

    def _why_not_here(self, why_state_lacks: Callable[[], str] = str) -> str:
        """Take memory of replicas again; returns why weights, optimizer state or replicas have none."""
        if (lacks := self._memory.why_freed() or why_state_lacks()) or self._replicas is None:
            return lacks
        try:
            self._replicas.allocate(self._rebalancer.placement())
        except Exception as error:
            return f"no memory for replicas: {one_line(error)}"
        return ""

    def _meet(self, what: str, problem: str) -> None:
        """Wait for all ranks, by the launcher's store alone. RuntimeError: one did not come, or has a problem. Then all
        of it stays suspended: the job may free weights again, and homes lie before replicas."""
        job, own = self._runtime.job, RuntimeError(problem) if problem else None
        try:
            said = barrier(list(job.ranks), what, self._runtime.config.timeout_seconds, own)
        except RuntimeError as error:
            said = f"rank {job.rank}: {problem}" if error is own else str(error)
        if said:
            if self._loop.suspended and self._replicas is not None and not self._memory.why_freed():
                self._replicas.free()
            raise RuntimeError(f"{what}: {said}")


def restore(state: Mapping[str, Any], runtime: Runtime, rebalancer: Rebalancer) -> None:
    """Migrate to the placement of a saved state, and go on from its step and load (`Balancer.load_state_dict`)."""
    problem: PlacementError | None = None
    target, step, digest = rebalancer.placement(), 0, bytes(16)  # nothing usable was given
    try:
        saved, step = Placement.from_json(state["placement"]), int(state["step"])
        target, load = _fitting(saved, target), json.dumps(state.get("load"), sort_keys=True)
        digest = xxhash.xxh3_128(f"{step} {saved.digest()} {load}".encode()).digest()
    except PlacementError as error:
        problem = error
    except (KeyError, TypeError, ValueError) as error:
        problem = PlacementError(f"not what state_dict() gave: {type(error).__name__}: {error}")
    runtime.barrier("load_state_dict()")
    agreed = rebalancer.compare(digest, "load_state_dict()", "usable saved state")
    if problem is not None:
        raise problem
    if not agreed.commit:
        raise RuntimeError(f"the saved placement cannot be restored: {agreed.cause}")
    outcome = rebalancer.migrate_to(target, step)
    if outcome.failed_phase is not None:
        raise RuntimeError(f"the saved placement could not be restored: {outcome.cause}")
    try:  # what all had counted goes on on one rank
        history, share = rebalancer.decisions.history, int(runtime.job.is_planner)
        resume_load(state.get("load") or {}, history, runtime.counter, share)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s; forecasts start from scratch", error)


def _fitting(saved: Placement, here: Placement) -> Placement:
    """Return a saved placement, or that of here if it is of the same model on other ranks or slots."""
    same_model = (saved.num_layers, saved.num_experts) == (here.num_layers, here.num_experts)
    if same_model and (saved.num_ranks, saved.slots_per_rank) != (here.num_ranks, here.slots_per_rank):
        what = "experts stay where they are, and the next decision looks at the load that was saved"
        logger.info("the placement was saved for other ranks or slots: %s", what)
        return here
    saved.require_model(here.num_layers, here.num_experts, here.num_ranks, here.replica_slots)
    return saved
