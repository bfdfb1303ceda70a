"""Saves step, placement and measured load of a job, and restores them in a later run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from ..load.counter import HostCopy, aggregate, resume_load, saved_load
from ..placement import Placement, PlacementError
from .rebalancer import Rebalancer
from .runtime import Runtime

logger = logging.getLogger("eplb_runtime")

UNUSABLE = bytes(16)
"""Digest of a rank that was given nothing usable."""


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
    outcome = rebalancer.go_to(step, target)
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
