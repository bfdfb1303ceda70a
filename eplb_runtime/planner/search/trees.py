"""Replicas for a load of which one window is known: ranks help each other so far as the next window may stray.

A search would fit the placement to that very window. Instead a rank with one replica slot helps one other: it holds an
expert of that rank, and what is left of its room the other offers on. So ranks form trees. From the lightest to the
heaviest each takes helpers until it keeps to a level even if loads stray; the lowest level with enough helpers counts.
"""

from __future__ import annotations

import numpy as np

from ...placement import EMPTY
from ...utils.jit import jit
from .layer import FloatArray, IntArray

JITTER, MOST_THAT_STRAYS = 0.3, 4.0
"""Standard deviation of the next window, as a share of an expert's load; what is beyond so many even rank loads counts
as steady: helpers for more would be missed elsewhere."""
CARES = (3.0, 2.0)
"""Standard deviations that a rank withstands: below `HEAVY` even loads, and above, where trees are large."""
HEAVY = 1.5
HIGHEST, HALVINGS = 4.0, 9
"""The highest level tried, in even rank loads, and the steps to the lowest that does."""
SCORES = (-1.66296, -0.96165, -0.52983, -0.17052, 0.17052, 0.52983, 0.96165, 1.66296)
"""Eight equally likely deviations, together of variance one."""


@jit(error_model="numpy")
def grow_trees(load_E: FloatArray, homes: int, per_rank: int, slot_P: IntArray) -> None:
    """Fill the first replica slot of each rank that helps another, in place; the others are emptied.

    Args:
        load_E: in units of the even rank load.
        slot_P: homes are placed.
    """
    low, high = 1.0, float(HIGHEST)
    for _ in range(HALVINGS):
        level = 0.5 * (low + high)
        if _grow(load_E, homes, per_rank, level, slot_P):
            high = level
        else:
            low = level
    _grow(load_E, homes, per_rank, high, slot_P)


@jit(error_model="numpy")
def _grow(load_E: FloatArray, homes: int, per_rank: int, level: float, slot_P: IntArray) -> bool:
    """Give ranks helpers, so that all keep to this level; return whether there are enough."""
    slot_RS = slot_P.reshape(-1, per_rank)
    slot_RS[:, homes:] = EMPTY
    load_R, variance_R = np.zeros(len(slot_RS)), np.zeros(len(slot_RS))
    for rank in range(len(slot_RS)):
        for expert in slot_RS[rank, :homes]:
            load_R[rank] += load_E[expert]
            variance_R[rank] += (JITTER * min(load_E[expert], MOST_THAT_STRAYS)) ** 2
    room_R, left_E = level - load_R, load_E.copy()
    offer_R = np.full(len(slot_RS), -1.0)  # below 0: helps already, or has yet to be looked at
    for rank in np.argsort(load_R, kind="mergesort"):
        care = CARES[0] if load_R[rank] < HEAVY else CARES[1]
        while care * np.sqrt(variance_R[rank]) > room_R[rank]:
            need, helper = care * np.sqrt(variance_R[rank]) - room_R[rank], int(np.argmax(offer_R))
            for other in range(len(slot_RS)):  # the smallest offer that is enough, or else the largest
                if need <= offer_R[other] < offer_R[helper]:
                    helper = other
            expert = slot_RS[rank, 0]
            for other in slot_RS[rank, :homes]:
                if left_E[other] > left_E[expert]:
                    expert = other
            if offer_R[helper] < 0.0:
                return False
            slot_RS[helper, homes] = expert
            amount, variance = _offer(room_R[helper], variance_R[helper], level)
            offer_R[helper] = -1.0
            left_E[expert] -= amount
            room_R[rank] += amount
            variance_R[rank] += variance
        offer_R[rank] = _offer(room_R[rank], variance_R[rank], level)[0]
    return True


@jit(error_model="numpy")
def _offer(room: float, variance: float, level: float) -> tuple[float, float]:
    """Mean and variance of what a rank can take from another: its room, but nothing below 0 or above the level."""
    total, squares = 0.0, 0.0
    for score in SCORES:
        taken = min(max(room + np.sqrt(variance) * score, 0.0), level)
        total += taken
        squares += taken * taken
    mean = total / len(SCORES)
    return mean, max(squares / len(SCORES) - mean * mean, 0.0)
