"""Planning around ranks that are gone, in the free layout: every expert gets a slot on a rank that is there.

Slots of ranks that are gone keep their experts; nobody reads them. Experts that are lost with such ranks get slots
elsewhere in place of spare copies, one move each; where none is lost, or there is no current placement, the ranks that
are there are planned for as if they were all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..placement import Placement
from ..topology import Topology
from .types import PlanError, PlanRequest


def without_gone_ranks(request: PlanRequest, policy: Callable[[PlanRequest], Placement]) -> Placement:
    """The placement of ``policy`` where ranks have speed 0.

    Raises:
        PlanError: the ranks that are there have fewer slots than there are experts.
    """
    assert request.speed_R is not None
    there_R, slots, experts = request.speed_R > 0, request.slots_per_rank, request.num_experts
    ranks, left = len(there_R), int(there_R.sum())
    if left * slots < experts:
        raise PlanError(
            f"{left} available ranks x {slots} slots hold {left * slots} of {experts} experts: give at least "
            f"{-(-experts // left)} slots per rank, or bring ranks back"
        )
    there_P = np.repeat(there_R, slots)
    current = request.current
    if current is None:
        map_LP = np.tile(np.arange(ranks * slots, dtype=np.int32) % experts, (request.num_layers, 1))
    else:
        map_LP = current.physical_to_logical.copy()
    lost = current is not None and _lost(map_LP[:, there_P], experts).any()
    if lost:
        map_LP[:, there_P] = _with_lost(map_LP[:, there_P], request.forecast, left)
    else:
        part = None if current is None else Placement(map_LP[:, there_P], experts, left)
        smaller = replace(request, topology=Topology(left), current=part, speed_R=None)
        map_LP[:, there_P] = policy(smaller).physical_to_logical
    return Placement(map_LP, experts, ranks, epoch=0 if current is None else current.epoch)


def lost_experts(placement: Placement, speed_R: NDArray[np.float64] | None) -> int:
    """Experts over all layers that stand on no rank with a speed above 0."""
    if speed_R is None or speed_R.all():
        return 0
    there_P = np.repeat(speed_R > 0, placement.slots_per_rank)
    return int(_lost(placement.physical_to_logical[:, there_P], placement.num_experts).sum())


def _lost(map_LP: NDArray[np.int32], experts: int) -> NDArray[np.bool_]:
    """bool ``[L, E]``: experts that stand in none of these slots."""
    return np.stack([np.bincount(row, minlength=experts) == 0 for row in map_LP])


def _with_lost(map_LP: NDArray[np.int32], load_LE: NDArray[np.float64], ranks: int) -> NDArray[np.int32]:
    """Each lost expert, the heaviest first, in the slot of a spare copy that leaves the heaviest rank lightest.

    Tokens are split evenly over copies. A rank never gets an expert twice.
    """
    result = map_LP.copy()
    rank_P = np.arange(result.shape[1]) // (result.shape[1] // ranks)
    for row_P, load_E in zip(result, load_LE, strict=True):
        count_E = np.bincount(row_P, minlength=len(load_E))
        lost = np.flatnonzero(count_E == 0)
        for expert in lost[np.argsort(-load_E[lost], kind="stable")]:
            unit_E = load_E / np.maximum(count_E, 1)
            load_R = np.bincount(rank_P, unit_E[row_P], minlength=ranks)
            peak, best = np.inf, -1
            for slot in np.flatnonzero(count_E[row_P] > 1):
                spare = row_P[slot]
                after_R = load_R.copy()
                # The spare copy's tokens go to the copies that stay.
                after_R[rank_P[slot]] += load_E[expert] - unit_E[spare]
                more = load_E[spare] / (count_E[spare] - 1) - unit_E[spare]
                others = np.flatnonzero(row_P == spare)
                np.add.at(after_R, rank_P[others[others != slot]], more)
                if after_R.max() < peak:
                    peak, best = after_R.max(), int(slot)
            count_E[row_P[best]] -= 1
            count_E[expert] = 1
            row_P[best] = expert
    return result
