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
FADING, FORGOTTEN = 0.95, 0.05
"""Weight that older plans keep at each decision, so that after a bad time another try is made; less is forgotten."""
PRIOR = 0.1
"""Of an average plan that kept its promise: what is believed before anything is known."""
LEAST = 0.02
"""Of the trust."""
LARGEST, MOST_SAVED = 1e15, 100
"""Magnitude of a saved number, and plans of a saved record."""


@dataclass
class _Promise:
    """Imbalance by which a plan is to fall, the sum of what it fell by, and how many loads judged it."""

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

    def note(self, plan: Plan) -> None:
        """Note a plan if it is to be carried out, with the imbalance, mean over layers, that it promises."""
        if plan.decision == "rebalance" and plan.current is not None and plan.imbalance_before is not None:
            promised = float((plan.imbalance_before - plan.imbalance_after).mean())
            if promised >= LEAST_PROMISE:
                self._promises.append(_Promise((plan.current, plan.placement), promised))

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
                before, after = (predicted_imbalance(load, one, self._speed_R).mean() for one in promise.placements)
                promise.kept += float(before - after)
                promise.judged += 1

    def judgement(self, seconds: float) -> dict[str, float]:
        """Return how many of the plans that are remembered were judged, by how many loads, a load once for each plan;
        and what they promised and kept, where imbalance (mean over layers) costs so many seconds."""
        rows = self.saved()
        return {
            "judged_plans": len(rows),
            "judged_decisions": int(sum(judged for _, _, judged, _ in rows)),
            "predicted_seconds": seconds * sum(promised for promised, _, _, _ in rows),
            "true_seconds": seconds * sum(kept / judged for _, kept, judged, _ in rows),
        }

    def saved(self) -> list[list[float]]:
        """Judged plans as JSON-able rows: promised gain, sum of true gains, number of them, weight."""
        return [[one.promised, one.kept, one.judged, one.weight] for one in self._promises if one.judged]

    def resume(self, rows: Any) -> None:
        """Go on from what `saved` gave. Restored plans keep their judgement and are not judged further.

        Raises:
            ValueError: it is something else; nothing is changed then.
        """
        try:
            table = np.array(rows, dtype=np.float64).reshape(-1, 4)
        except (TypeError, ValueError, OverflowError):
            table = np.full((1, 4), np.nan)
        least = [LEAST_PROMISE, -LARGEST, 1.0, np.nextafter(0.0, 1.0)]
        if len(table) > MOST_SAVED or not ((table >= least) & (table <= [LARGEST, LARGEST, LARGEST, 1.0])).all():
            raise ValueError("the saved record of predictions is broken")
        self._promises = [_Promise(None, row[0], row[1], int(row[2]), row[3]) for row in table.tolist()]

    @property
    def trust(self) -> float:
        """The share of promised gains that came true lately, in ``[LEAST, 1]``; 1 where nothing is known."""
        rows = self.saved()
        if not rows:
            return 1.0
        promised_N, kept_N, judged_N, weight_N = np.array(rows).T
        promised = float(weight_N @ promised_N)
        prior = PRIOR * promised / float(weight_N.sum())
        return float(np.clip((weight_N @ (kept_N / judged_N) + prior) / (promised + prior), LEAST, 1.0))
