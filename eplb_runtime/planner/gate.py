"""The gate: which of the placements that a policy offers is worth its moves.

Whole placements are judged, since the busiest link of a transfer is no sum over layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..placement import Placement
from .cost import HYSTERESIS, CostModel
from .evaluate import moves_between
from .terms import Settled
from .traffic import worth_by_scenario
from .types import MOVE_LAYER, Offer, PlanRequest, travelling

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Judged:
    """A placement that a policy offers, and what it would bring.

    Args:
        moves: from the current placement, as in ``Plan.moves``.
        worth_WL: float64 ``[W + V, L]``, imbalance in each scenario, and the price of tokens that cross nodes.
        saved, spent: predicted seconds over the horizon; nan when unknown.
    """

    placement: Placement
    moves: NDArray[np.int32]
    worth_WL: FloatArray
    saved: float
    spent: float

    @property
    def offer(self) -> Offer:
        """As it is listed in ``Plan.offers``."""
        moved = travelling(self.moves, self.placement.slots_per_rank)
        return Offer(moved, float(self.worth_WL.mean()), self.saved, self.spent)

    @property
    def moving_layers(self) -> int:
        return len(np.unique(self.moves[:, MOVE_LAYER]))


def judge_all(request: PlanRequest, path: Sequence[Placement], cost: CostModel | None, lost: bool) -> list[Judged]:
    """What each placement of ``path`` would bring.

    Args:
        path: what a policy returned.
        lost: experts stand only on ranks that are gone: the current placement has no imbalance, nothing is saved.
    """
    judged = []
    first: FloatArray | None = None
    for placement in path:
        moves = moves_between(request.current, placement, request.topology, request.speed_R)
        worth_WL = worth_by_scenario(request, placement)
        first = worth_WL if first is None else first
        saved = spent = float("nan")
        if cost is not None and request.current is not None and not lost and cost.step_seconds > 0:
            saved = float(cost.seconds_per_imbalance(request.num_layers) * (first - worth_WL).mean(axis=0).sum())
            spent = 0.0
            if len(moves):
                spent = cost.transfer_seconds(moves, request.topology, request.slots_per_rank) + cost.stall_seconds
        judged.append(Judged(placement, moves, worth_WL, saved, spent))
    return judged


def choose(request: PlanRequest, judged: Sequence[Judged], settled: Settled) -> int:
    """The number of the placement to go to; the first is the current one.

    ``"payoff"``: the one with the largest ``trust * saved - HYSTERESIS * spent``, the earlier of equals. ``"always"``:
    the earliest whose shortfall against the last, the mean over scenarios and layers, is within its standard error.
    ``"off"``: the last.
    """
    if settled.gate == "payoff":
        return int(np.argmax([settled.trust * one.saved - HYSTERESIS * one.spent for one in judged]))
    if settled.gate == "off":
        return len(judged) - 1
    last_W = judged[-1].worth_WL.mean(axis=1)
    for number, one in enumerate(judged):
        shortfall_W = one.worth_WL.mean(axis=1) - last_W
        error = 0.0
        if len(shortfall_W) > 1:  # mixes are made of the scenarios: they say nothing new of their mean
            error = float(shortfall_W.std(ddof=1)) / np.sqrt(len(request.scenarios))
        if shortfall_W.mean() <= error:
            return number
    return len(judged) - 1
