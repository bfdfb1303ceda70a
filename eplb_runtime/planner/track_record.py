"""How much of what plans promised came true: load that wanders makes every plan promise what it does not keep.

A plan promises that imbalance falls. Loads are counted by logical expert, so what would have been without the plan can
be computed afterwards, however often experts have moved since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
LARGEST = 1e15
"""Largest magnitude of a saved number; comparing with it refuses NaN."""
MOST_SAVED = 100
"""Plans of a saved record: more than are remembered."""


@dataclass
class _Promise:
    placements: tuple[Placement, Placement] | None
    promised: float
    kept: float = 0.0
    judged: int = 0
    weight: float = 1.0


class TrackRecord:
    """Plans of a job, and what became of them."""

    def __init__(self, horizon: int = JUDGED, speed_R: NDArray[np.float64] | None = None) -> None:
        """Begin without any plans; each promises its gain for ``horizon`` decisions, on ranks of these speeds."""
        self._horizon = max(1, horizon)
        self._speed_R = speed_R
        self._promises: list[_Promise] = []

    def add(self, before: Placement, after: Placement, promised: float) -> None:
        """Note a plan that is carried out, by which imbalance is to fall by ``promised``, mean over layers."""
        if promised >= LEAST_PROMISE:
            self._promises.append(_Promise((before, after), promised))

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
        for place, promise in enumerate(reversed(self._promises)):
            if place >= JUDGED or promise.judged == self._horizon:
                promise.placements = None  # they are large
            if promise.placements is not None and load.any():
                imbalance = [predicted_imbalance(load, one, self._speed_R).mean() for one in promise.placements]
                promise.kept += float(imbalance[0] - imbalance[1])
                promise.judged += 1

    def judgement(self, seconds: float) -> dict[str, float]:
        """Return how many of the plans that are remembered were judged, by how many loads, a load once for each plan;
        and what they promised and kept, where imbalance (mean over layers) costs so many seconds."""
        judged = self._judged()
        return {
            "judged_plans": len(judged),
            "judged_decisions": sum(promise.judged for promise in judged),
            "predicted_seconds": seconds * sum(promise.promised for promise in judged),
            "true_seconds": seconds * sum(promise.kept / promise.judged for promise in judged),
        }

    def saved(self) -> list[list[float]]:
        """Judged plans as JSON-able rows: promised gain, sum of true gains, number of them, weight."""
        return [[promise.promised, promise.kept, promise.judged, promise.weight] for promise in self._judged()]

    def resume(self, rows: Any) -> None:
        """Go on from what `saved` gave. Restored plans keep their judgement and are not judged further.

        Raises:
            ValueError: it is something else; nothing is changed then.
        """
        try:
            table = np.array(rows, dtype=np.float64).reshape(-1, 4)
        except (TypeError, ValueError, OverflowError):
            table = np.full((1, 4), np.nan)
        promised, kept, judged, weight = table.T
        usable = (promised >= LEAST_PROMISE) & (abs(kept) <= LARGEST) & (judged >= 1) & (judged <= LARGEST)
        if len(table) > MOST_SAVED or not (usable & (weight > 0) & (weight <= 1)).all():
            raise ValueError("the saved record of predictions is broken")
        self._promises = [_Promise(None, row[0], row[1], int(row[2]), row[3]) for row in table.tolist()]

    def _judged(self) -> list[_Promise]:
        return [promise for promise in self._promises if promise.judged]

    @property
    def trust(self) -> float:
        """The share of promised gains that came true lately, in ``[LEAST, 1]``; 1 where nothing is known."""
        judged = self._judged()
        promised = sum(promise.weight * promise.promised for promise in judged)
        if promised <= 0:
            return 1.0
        kept = sum(promise.weight * promise.kept / promise.judged for promise in judged)
        prior = PRIOR * promised / sum(promise.weight for promise in judged)
        return float(np.clip((kept + prior) / (promised + prior), LEAST, 1.0))
