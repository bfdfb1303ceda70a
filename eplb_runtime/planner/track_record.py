"""How much of what plans promised came true: load that wanders makes every plan promise what it does not keep.

A plan promises that imbalance falls. Loads are counted by logical expert, so what would have been without the plan can
be computed afterwards, however often experts have moved since.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..placement import Placement
from .evaluate import predicted_imbalance
from .types import Plan

JUDGED = 10
"""Plans that are judged at a time."""
LEAST_PROMISE = 0.01
"""A plan that promises less is made for something else (tokens that cross nodes), and is not judged by imbalance."""
FADING = 0.95
"""Weight that older plans keep at each decision; so after a bad time another try is made by and by."""
PRIOR = 0.1
"""Of an average plan that kept its promise: what is believed before anything is known."""
LEAST = 0.02
FORGOTTEN = 0.05


@dataclass
class _Promise:
    before: Placement | None
    after: Placement | None
    promised: float
    kept: float = 0.0
    judged: int = 0
    weight: float = 1.0


class TrackRecord:
    """Plans of a job, and what became of them."""

    def __init__(self, horizon: int = JUDGED, speed_R: NDArray[np.float64] | None = None) -> None:
        """Begin without any plans.

        Args:
            horizon: decisions for which a plan promises its gain.
            speed_R: float64 ``[R]``, as for `predicted_imbalance`.
        """
        self._horizon = max(1, horizon)
        self._speed_R = speed_R
        self._promises: list[_Promise] = []

    def add(self, before: Placement, after: Placement, promised: float) -> None:
        """Note a plan that is carried out.

        Args:
            promised: by how much imbalance is to fall, mean over layers.
        """
        if promised < LEAST_PROMISE:
            return
        self._promises.append(_Promise(before, after, promised))

    def note(self, plan: Plan) -> None:
        """Note a plan if it is to be carried out, with what it promises."""
        if plan.decision == "rebalance" and plan.current is not None and plan.imbalance_before is not None:
            self.add(plan.current, plan.placement, float((plan.imbalance_before - plan.imbalance_after).mean()))

    def observe(self, load: NDArray[np.float64]) -> None:
        """Judge the newest plans by what came.

        Args:
            load: float64 ``[L, E]``, tokens since the last decision; all zero: nothing came.
        """
        for promise in self._promises:
            promise.weight *= FADING
        self._promises = [promise for promise in self._promises if promise.weight > FORGOTTEN]
        for promise in self._promises[:-JUDGED]:
            promise.before = promise.after = None  # placements are large
        if not load.any():
            return
        for promise in self._promises:
            if promise.before is None or promise.after is None:
                continue
            before, after = (
                float(predicted_imbalance(load, placement, self._speed_R).mean())
                for placement in (promise.before, promise.after)
            )
            promise.kept += before - after
            promise.judged += 1
            if promise.judged == self._horizon:
                promise.before = promise.after = None

    @property
    def trust(self) -> float:
        """The share of promised gains that came true lately, in ``[LEAST, 1]``; 1 where nothing is known."""
        judged = [promise for promise in self._promises if promise.judged]
        promised = sum(promise.weight * promise.promised for promise in judged)
        if promised <= 0:
            return 1.0
        kept = sum(promise.weight * promise.kept / promise.judged for promise in judged)
        prior = PRIOR * promised / sum(promise.weight for promise in judged)
        return float(np.clip((kept + prior) / (promised + prior), LEAST, 1.0))
