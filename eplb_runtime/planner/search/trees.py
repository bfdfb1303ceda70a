"""Copies for loads that stray, by arithmetic alone: each rank that could get too much is given ranks that help it.

A rank with one replica slot helps one other: it holds a copy of an expert of that rank, and what it has no use for
itself, the other can put there. So ranks form trees. From the lightest to the heaviest each takes helpers until it is
at the level wanted even if its load, and what its helpers can take, stray by as many standard deviations as it must
withstand; what is left over then it offers to a heavier one. The level is the lowest that has helpers enough. An expert
that stands alone on a rank cannot flee, and there are many of these: they must withstand more than the few heavy ones,
whose trees are large.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit

CARES = (3.0, 2.0)
"""Standard deviations that a rank withstands, one with less than `HEAVY` times the mean and one with more."""
HEAVY = 1.5
HIGHEST = 4.0
"""Of the mean, the highest level tried."""
HALVINGS = 9
NORMAL_SCORES = (-1.66296, -0.96165, -0.52983, -0.17052, 0.17052, 0.52983, 0.96165, 1.66296)
"""Eight equally likely deviations, together of variance one."""


@jit
def grow_trees(
    load_E: NDArray[np.float64],
    variance_E: NDArray[np.float64],
    ballast_R: NDArray[np.float64],
    most: int,
    home_E: NDArray[np.int32],
    replica_RK: NDArray[np.int32],
) -> None:
    """Fill the first replica slot of each rank that helps another.

    Args:
        load_E: tokens of each expert.
        variance_E: of these.
        ballast_R: what each rank counts beside its experts.
        most: copies of an expert, home included.
        home_E: int32, home ranks, which stay.
        replica_RK: int32, out; the other slots are left empty.
    """
    ranks, experts = len(replica_RK), load_E.size
    homes_RH, filled_R = np.empty((ranks, experts // ranks), dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    load_R, variance_R = ballast_R.copy(), np.zeros(ranks)
    for expert in range(experts):
        rank = home_E[expert]
        homes_RH[rank, filled_R[rank]] = expert
        filled_R[rank] += 1
        load_R[rank] += load_E[expert]
        variance_R[rank] += variance_E[expert]
    mean = load_R.sum() / ranks
    if mean <= 0.0:
        replica_RK[:] = EMPTY
        return
    share_E = load_E / mean
    load_R /= mean
    variance_R /= mean * mean
    order_R = np.argsort(load_R, kind="mergesort")
    low, high = 1.0, float(HIGHEST)
    for _ in range(HALVINGS):
        level = 0.5 * (low + high)
        if _grow(level, most, share_E, load_R, variance_R, order_R, homes_RH, replica_RK):
            high = level
        else:
            low = level
    _grow(high, most, share_E, load_R, variance_R, order_R, homes_RH, replica_RK)


@jit
def _grow(
    level: float,
    most: int,
    share_E: NDArray[np.float64],
    load_R: NDArray[np.float64],
    variance_R: NDArray[np.float64],
    order_R: NDArray[np.int64],
    homes_RH: NDArray[np.int64],
    replica_RK: NDArray[np.int32],
) -> bool:
    """Give ranks helpers, so that all keep to this level of the mean; whether there are enough."""
    ranks = load_R.size
    room_R, spread_R = level - load_R, variance_R.copy()
    left_E, copies_E = share_E.copy(), np.ones(share_E.size, dtype=np.int64)
    helper_N, offer_N = np.empty(ranks, dtype=np.int64), np.empty(ranks)  # ascending by what they offer
    used, enough = 0, True
    replica_RK[:] = EMPTY
    for rank in order_R:
        care = CARES[0] if load_R[rank] < HEAVY else CARES[1]
        need = care * np.sqrt(spread_R[rank]) - room_R[rank]
        while need > 0.0:
            expert = _most_left(homes_RH[rank], left_E, copies_E, most)
            if used == 0 or expert == EMPTY:
                enough = False
                break
            place = min(np.searchsorted(offer_N[:used], need), used - 1)
            helper = helper_N[place]
            for index in range(place, used - 1):
                helper_N[index], offer_N[index] = helper_N[index + 1], offer_N[index + 1]
            used -= 1
            amount, spread = _offer(room_R[helper], spread_R[helper], level)
            replica_RK[helper, 0] = expert
            copies_E[expert] += 1
            left_E[expert] -= amount
            room_R[rank] += amount
            spread_R[rank] += spread
            need = care * np.sqrt(spread_R[rank]) - room_R[rank]
        if need > 0.0:
            continue
        amount = _offer(room_R[rank], spread_R[rank], level)[0]
        place = np.searchsorted(offer_N[:used], amount)
        for index in range(used, place, -1):
            helper_N[index], offer_N[index] = helper_N[index - 1], offer_N[index - 1]
        helper_N[place], offer_N[place] = rank, amount
        used += 1
    return enough


@jit
def _most_left(expert_H: NDArray[np.int64], left_E: NDArray[np.float64], copies_E: NDArray[np.int64], most: int) -> int:
    """The expert with most tokens that no helper takes, of those that may have one copy more."""
    best = EMPTY
    for expert in expert_H:
        if copies_E[expert] < most and (best == EMPTY or left_E[expert] > left_E[best]):
            best = expert
    return best


@jit
def _offer(room: float, spread: float, level: float) -> tuple[float, float]:
    """Mean and variance of what a rank can take from another: its room, but nothing below 0 or above the level."""
    deviation, total, squares = np.sqrt(spread), 0.0, 0.0
    for score in NORMAL_SCORES:
        taken = min(max(room + deviation * score, 0.0), level)
        total += taken
        squares += taken * taken
    mean = total / len(NORMAL_SCORES)
    return mean, max(squares / len(NORMAL_SCORES) - mean * mean, 0.0)
