"""Saves step, placement and measured load of a job, and restores them in a later run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..load.counter import HostCopy, aggregate, resume_load, saved_load, saved_windows
from ..placement import Placement, PlacementError
from .rebalancer import Rebalancer
from .runtime import Runtime

logger = logging.getLogger("eplb_runtime")

UNUSABLE = bytes(16)
"""Digest of a rank that was given nothing usable."""


class Restorer:
    """Saves and restores the placement and the load of one job, on one rank."""

    def __init__(self, runtime: Runtime, rebalancer: Rebalancer) -> None:
        self._runtime, self._rebalancer = runtime, rebalancer

    def measured(self) -> dict[str, Any]:
        """Load for the next decisions, in the form of `saved_load`; equal on every rank. Collective."""
        self._rebalancer.wait_for_decision()
        return saved_load(
            self._rebalancer.decisions.history,
            self._runtime.counter,
            lambda buckets: self._rebalancer.run(lambda group, _: aggregate(HostCopy(buckets), group))[0].numpy(),
        )

    def restore(self, state: Mapping[str, Any], barrier: Callable[[], None]) -> None:
        """`Balancer.load_state_dict`, when ``barrier`` returns on all ranks. Of an unusable placement the load is taken
        where it can be."""
        problem: PlacementError | None = None
        target: Placement | NDArray[np.int64] | None = None
        step, digest = 0, UNUSABLE
        try:
            target, step = self._target(state), int(state["step"])
            load = json.dumps(state.get("load"), sort_keys=True)
            known = target.digest() if isinstance(target, Placement) else "anew"
            digest = xxhash.xxh3_128(f"{step} {known} {load}".encode()).digest()
        except PlacementError as error:
            problem = error
        except (KeyError, TypeError, ValueError) as error:
            problem = PlacementError(f"not what state_dict() gave: {type(error).__name__}: {error}")
        barrier()
        agreed = self._rebalancer.compare(digest, "load_state_dict()", "usable saved state")
        if problem is None and target is not None:
            if not agreed.commit:
                raise RuntimeError(f"the saved placement cannot be restored: {agreed.cause}")
            try:
                placement = target if isinstance(target, Placement) else partial(self._anew, target)
                outcome = self._rebalancer.go_to(step, placement)
                if outcome.failed_phase is not None:
                    raise RuntimeError(f"the saved placement could not be restored: {outcome.cause}")
            except PlacementError as error:
                problem = error
        decisions, counter = self._rebalancer.decisions, self._runtime.counter
        # What all had counted goes on on one rank, where all know that they were given the same.
        share = int(self._runtime.job.is_planner) if problem is None else None
        try:
            resume_load(state.get("load") or {}, decisions.history, counter, share)
            self._rebalancer.load_begins_here()
        except (AttributeError, ValueError) as error:
            logger.warning("%s; forecasts start from scratch", error)
        try:
            decisions.resume_track_record(state.get("track_record") or [])
        except (AttributeError, ValueError) as error:
            logger.warning("%s; predictions are trusted again", error)
        if problem is not None:
            raise problem

    def _target(self, state: Mapping[str, Any]) -> Placement | NDArray[np.int64]:
        """The saved placement; if it is for other ranks or slots, the load to plan one for, int64 ``[T, L, E]``."""
        saved, here = Placement.from_json(state["placement"]), self._rebalancer.placement()
        same_model = (saved.num_layers, saved.num_experts) == (here.num_layers, here.num_experts)
        same_sizes = saved.slots_per_rank == here.slots_per_rank and saved.num_ranks == here.num_ranks
        if same_model and not same_sizes and self._runtime.config.policy != "static":
            with suppress(ValueError):  # said when forecasts are to go on from it
                load = saved_windows(state.get("load"), here.num_layers, here.num_experts)
                if load is not None:
                    return load
        saved.require_model(here.num_layers, here.num_experts, here.num_ranks, here.replica_slots)
        return saved

    def _anew(self, load: NDArray[np.int64]) -> Placement:
        """Plan a placement of these sizes for a load of other ranks. Collective."""
        target, planned = self._rebalancer.placed_anew(load)
        logger.info(
            "the placement was saved for other ranks or slots; experts are placed again for its load: imbalance %.3f",
            planned.imbalance_after,
        )
        return target
