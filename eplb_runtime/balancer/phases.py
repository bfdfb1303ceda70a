"""Breaks in a job: rollouts, in which the balancer is suspended and keeps no memory; and a later run that goes on with
step, placement and measured load of this one.

Loops of reinforcement learning free weights, gradients and optimizer state between training steps. What the balancer
keeps in addition is freed here as well; replicas take theirs again, and a migration what it needs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from ..distributed.consensus import barrier
from ..events import EventLog, Suspended, SuspensionEnded
from ..load.counter import HostCopy, aggregate, resume_load, saved_load
from ..placement import Placement, PlacementError
from ..utils.text import one_line
from .loop_state import LoopState
from .rebalancer import Rebalancer
from .runtime import Runtime

logger = logging.getLogger("eplb_runtime")

UNUSABLE = bytes(16)
"""Digest of a rank that was given nothing usable."""


class Phases:
    """Suspends and resumes one balancer. Both are collective over the job, between steps."""

    def __init__(self, runtime: Runtime, rebalancer: Rebalancer, events: EventLog, loop: LoopState) -> None:
        self._runtime = runtime
        self._rebalancer = rebalancer
        self._memory = loop.tensors.memory
        self._events = events
        self._loop = loop
        self._since = 0.0

    def suspend(self) -> int:
        """`Balancer.suspend`."""
        replicas = self._runtime.maps.replicas
        freed = self._memory.why_freed() if replicas is not None and not self._loop.suspended else ""
        if said := self._agreed("suspend()", f"{freed}, and free it after suspend() alone" if freed else ""):
            raise RuntimeError(f"suspend(): {said}")
        if self._loop.suspended:
            return 0
        if self._rebalancer.commit_in_flight():
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
        replicas = self._runtime.maps.replicas
        if replicas is not None and replicas.is_freed and (problem := self._why_not_here()):
            logger.warning(
                "closed while suspended, and the layers of experts have no memory to compute in: %s; load the weights "
                "and call balancer.resume() before the next forward",
                problem,
            )
        self._loop.suspended = False

    def resume_after_end(self) -> bool:
        """Take the memory that `end` could not take; returns whether there was any to take."""
        replicas = self._runtime.maps.replicas
        if replicas is None or not replicas.is_freed:
            return False
        if problem := self._why_not_here():
            raise RuntimeError(f"resume(): {problem}")
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


def measured_load(runtime: Runtime, rebalancer: Rebalancer) -> dict[str, Any]:
    """Return the load for the next decisions, in the form of `saved_load`; equal on every rank. Collective."""
    rebalancer.wait_for_decision()
    return saved_load(
        rebalancer.decisions.history,
        runtime.counter,
        lambda buckets: rebalancer.run(lambda group, _: aggregate(HostCopy(buckets), group))[0].numpy(),
    )


def restore(state: Mapping[str, Any], runtime: Runtime, rebalancer: Rebalancer, barrier: Callable[[], None]) -> None:
    """Restore as `Balancer.load_state_dict` says, when ``barrier`` returns on all ranks."""
    problem: PlacementError | None = None
    target, step, digest = rebalancer.placement(), 0, UNUSABLE
    try:
        saved, step = Placement.from_json(state["placement"]), int(state["step"])
        target, load = _fitting(saved, target), json.dumps(state.get("load"), sort_keys=True)
        digest = xxhash.xxh3_128(f"{step} {saved.digest()} {load}".encode()).digest()
    except PlacementError as error:
        problem = error
    except (KeyError, TypeError, ValueError) as error:
        problem = PlacementError(f"not what state_dict() gave: {type(error).__name__}: {error}")
    barrier()
    agreed = rebalancer.compare(digest, "load_state_dict()", "usable saved state")
    if problem is not None:
        raise problem
    if not agreed.commit:
        raise RuntimeError(f"the saved placement cannot be restored: {agreed.cause}")
    outcome = rebalancer.migrate_at(step, target)
    if outcome.failed_phase is not None:
        raise RuntimeError(f"the saved placement could not be restored: {outcome.cause}")
    decisions = rebalancer.decisions
    try:  # what all had counted goes on on one rank
        resume_load(state.get("load") or {}, decisions.history, runtime.counter, int(runtime.job.is_planner))
    except (AttributeError, ValueError) as error:
        logger.warning("%s; forecasts start from scratch", error)
    try:
        decisions.resume_track_record(state.get("track_record") or [])
    except (AttributeError, ValueError) as error:
        logger.warning("%s; predictions are trusted again", error)


def _fitting(saved: Placement, here: Placement) -> Placement:
    """Return a saved placement, or that of here if it is of the same model on other ranks or slots."""
    same_model = (saved.num_layers, saved.num_experts) == (here.num_layers, here.num_experts)
    if same_model and (saved.num_ranks, saved.slots_per_rank) != (here.num_ranks, here.slots_per_rank):
        what = "experts stay where they are, and the next decision looks at the load that was saved"
        logger.info("the placement was saved for other ranks or slots: %s", what)
        return here
    saved.require_model(here.num_layers, here.num_experts, here.num_ranks, here.replica_slots)
    return saved
