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

JUDGED = 10
"""Decisions after a plan in which it is judged, and plans that are judged at a time."""
FADING = 0.95
"""Weight that older plans keep at each decision; so after a bad time another try is made by and by."""
PRIOR = 0.1
"""Of an average plan that kept its promise: what is believed before anything is known."""
LEAST = 0.02
FORGOTTEN = 0.05


@dataclass
class _Promise:
    before: Placement
    after: Placement
    promised: float
    kept: float = 0.0
    judged: int = 0
    weight: float = 1.0


class TrackRecord:
    """Plans of a job, and what became of them."""

    def __init__(self, speed_R: NDArray[np.float64] | None = None) -> None:
        """Begin without any plans.

        Args:
            speed_R: float64 ``[R]``, as for `predicted_imbalance`.
        """
        self._speed_R = speed_R
        self._promises: list[_Promise] = []

    def add(self, before: Placement, after: Placement, promised: float) -> None:
        """Note a plan that is carried out.

        Args:
            promised: by how much imbalance is to fall, mean over layers.
        """
        self._promises.append(_Promise(before, after, promised))

    def observe(self, load: NDArray[np.float64]) -> None:
        """Judge the newest plans by what came.

        Args:
            load: float64 ``[L, E]``, tokens since the last decision; all zero: nothing came.
        """
        if not load.any():
            return
        for promise in self._promises:
            promise.weight *= FADING
        self._promises = [promise for promise in self._promises if promise.weight > FORGOTTEN]
        imbalances: dict[int, float] = {}

        def imbalance_of(placement: Placement) -> float:
            # One plan's placement is what the next one begins with.
            if id(placement) not in imbalances:
                imbalances[id(placement)] = float(predicted_imbalance(load, placement, self._speed_R).mean())
            return imbalances[id(placement)]

        for promise in self._promises[-JUDGED:]:
            if promise.judged < JUDGED:
                promise.kept += imbalance_of(promise.before) - imbalance_of(promise.after)
                promise.judged += 1

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
