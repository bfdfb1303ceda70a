"""Lower the busiest rank step by step: swap one of its homes for another rank's, or give one of its experts a replica.

A formula for each pair finds the swap and the replica that promise most, as if no other split changed. Both are tried,
with all splits, and the better one is taken if what it gains is more than its moves cost.
"""

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit
from ..parameters import PARAMETERS
from .layer import FloatArray, IntArray, Layer, copy_split, fill_to_level, judge, set_replica, swap_homes

SWEEPS, SURE, STUCK_RANKS = PARAMETERS.step_sweeps, PARAMETERS.step_sure, PARAMETERS.stuck_ranks
"""Compiled into what is below."""
SWAP, REPLICA = 0, 1
VALUE, HOMES, REPLICAS, KIND, SLOT, OTHER = range(6)
"""Columns of a track: imbalance after a step, homes and replicas moved by then; the step's kind, its slot, and the
other slot of a swap or the expert of a replica."""


@jit
def descend(layer: Layer, track_NX: FloatArray) -> int:
    """Take steps that lower the imbalance by more than their moves cost, until none is found or the track is full.

    Args:
        layer: its tokens are split (`worth`). It is changed in place to the state after the last step.
        track_NX: out, float64 ``[N + 1, 6]``, row n after n steps.

    Returns:
        N, the steps taken.
    """
    scenarios = len(layer.load_WE)
    peak_W, tried_W, best_W = np.empty(scenarios), np.empty(scenarios), np.empty(scenarios)
    is_stuck_R, stuck, steps = np.zeros(layer.load_RW.shape[0], dtype=np.bool_), 0, 0
    token_PW, load_RW = np.empty_like(layer.token_PW), np.empty_like(layer.load_RW)
    best_token_PW, best_load_RW = np.empty_like(layer.token_PW), np.empty_like(layer.load_RW)
    copy_split(layer.token_PW, layer.load_RW, token_PW, load_RW)
    tried_X, best_X = np.empty(6), np.zeros(6)
    goal = _note(layer, peak_W, best_X)
    track_NX[0] = best_X
    while steps + 1 < len(track_NX) and stuck < STUCK_RANKS:
        rank = _busiest(layer, is_stuck_R)
        if rank < 0:
            break
        helps, best_goal = False, goal
        for kind in (SWAP, REPLICA):
            slot, other = _find_swap(layer, rank) if kind == SWAP else _find_replica(layer, rank)
            if slot < 0:
                continue
            before = layer.slot_P[slot]
            apply_step(layer, kind, slot, other)
            fill_to_level(layer, SWEEPS)
            new_goal = _note(layer, tried_W, tried_X)
            if new_goal < best_goal and _is_sure(peak_W - tried_W):
                helps, best_goal = True, new_goal
                tried_X[KIND], tried_X[SLOT], tried_X[OTHER] = kind, slot, other
                best_W, tried_W, best_X, tried_X = tried_W, best_W, tried_X, best_X
                copy_split(layer.token_PW, layer.load_RW, best_token_PW, best_load_RW)
            apply_step(layer, kind, slot, other if kind == SWAP else before)
            copy_split(token_PW, load_RW, layer.token_PW, layer.load_RW)
        if not helps:
            is_stuck_R[rank] = True
            stuck += 1
            continue
        apply_step(layer, int(best_X[KIND]), int(best_X[SLOT]), int(best_X[OTHER]))
        token_PW, load_RW, best_token_PW, best_load_RW = best_token_PW, best_load_RW, token_PW, load_RW
        copy_split(token_PW, load_RW, layer.token_PW, layer.load_RW)
        peak_W, best_W, goal = best_W, peak_W, best_goal
        is_stuck_R[:] = False
        stuck = 0
        steps += 1
        track_NX[steps] = best_X
    return steps


@jit
def _note(layer: Layer, peak_W: FloatArray, row_X: FloatArray) -> float:
    """Write imbalance and moves into a row of a track; return what is to be lowered, with the price of moves."""
    row_X[VALUE] = judge(layer, peak_W)
    row_X[HOMES], row_X[REPLICAS] = moved(layer)
    return float(row_X[VALUE] + layer.prices[0] * row_X[HOMES] + layer.prices[1] * row_X[REPLICAS])


@jit
def moved(layer: Layer) -> tuple[int, int]:
    """Return how many homes are on another rank than now, and how many replicas on a rank that has neither home nor
    replica of their expert now."""
    homes, replicas = 0, 0
    for slot in range(layer.slot_P.size):
        expert, rank = layer.slot_P[slot], layer.rank_P[slot]
        if expert == EMPTY or layer.home_E[expert] == rank:
            continue
        first = rank * layer.per_rank + layer.homes
        if slot < first:
            homes += 1
        elif expert not in layer.now_P[first : first + layer.per_rank - layer.homes]:
            replicas += 1
    return homes, replicas


@jit
def apply_step(layer: Layer, kind: int, slot: int, other: int) -> None:
    """Change the layer in place by one step: exchange two homes (``SWAP``), or put ``other`` into a replica slot."""
    if kind == SWAP:
        swap_homes(layer, slot, other)
    else:
        set_replica(layer, slot, other)


def after(begin_P: IntArray, track_NX: FloatArray) -> IntArray:
    """Return a copy of ``begin_P`` after the steps of a track, int64 ``[P]``."""
    slot_P = begin_P.copy()
    for kind, slot, other in track_NX[1:, [KIND, SLOT, OTHER]].astype(np.int64).tolist():
        if kind == SWAP:
            slot_P[[slot, other]] = slot_P[[other, slot]]
        else:
            slot_P[slot] = other
    return slot_P


@jit
def _busiest(layer: Layer, is_stuck_R: NDArray[np.bool_]) -> int:
    """The rank that is most above the even load, in the mean square over scenarios; -1: none is."""
    best, most = -1, 0.0
    ranks, scenarios = layer.load_RW.shape
    for rank in range(ranks):
        if is_stuck_R[rank]:
            continue
        above = 0.0
        for scenario in range(scenarios):
            over = layer.load_RW[rank, scenario] - 1.0
            above += over * over if over > 1e-3 else 0.0
        if above > most:
            best, most = rank, above
    return best


@jit
def _is_sure(gain_W: FloatArray) -> bool:
    """Return whether the mean gain over scenarios is above `SURE` standard errors."""
    mean, variance = gain_W.mean(), gain_W.var()
    return gain_W.size == 1 or (mean >= 0.0 and mean * mean * (gain_W.size - 1) >= SURE * SURE * variance)


@jit
def _find_swap(layer: Layer, rank: int) -> tuple[int, int]:
    """Return a home slot of the rank and one of another rank whose exchange lowers the sum of squares most; -1: none.

    d tokens from load x to load y lower the two squares by 2 d (x - y - d), at most by (x - y)^2 / 2.
    """
    ranks, scenarios = layer.load_RW.shape
    size, homes = layer.per_rank, layer.homes if layer.homes > 1 or layer.virtual_R.any() else 0
    best, found, other = 0.0, -1, -1
    for partner in range(ranks if homes else 0):
        if partner == rank:
            continue
        most = 0.0
        for scenario in range(scenarios):
            most += 0.5 * (layer.load_RW[rank, scenario] - layer.load_RW[partner, scenario]) ** 2
        if most <= best:
            continue
        own_S = layer.slot_P[rank * size : (rank + 1) * size]
        their_S = layer.slot_P[partner * size : (partner + 1) * size]
        for mine in range(rank * size, rank * size + homes):
            for theirs in range(partner * size, partner * size + homes):
                gain = 0.0
                for scenario in range(scenarios):
                    less = layer.token_PW[mine, scenario] - layer.token_PW[theirs, scenario]
                    gap = layer.load_RW[rank, scenario] - layer.load_RW[partner, scenario]
                    gain += 2.0 * less * (gap - less)
                if gain > best and layer.slot_P[mine] not in their_S and layer.slot_P[theirs] not in own_S:
                    best, found, other = gain, mine, theirs
    return found, other


@jit
def _find_replica(layer: Layer, rank: int) -> tuple[int, int]:
    """Return a replica slot of another rank, and an expert of the rank for it, that lower the sum of squares most; -1:
    none.

    A slot frees what its replica computes, which then burdens the least loaded rank that also holds that expert.
    """
    scenarios, size = layer.load_RW.shape[1], layer.per_rank
    gap_W, lost_W, best, found, taken = np.empty(scenarios), np.empty(scenarios), 0.0, -1, EMPTY
    for slot in range(layer.slot_P.size):
        partner = slot // size
        if partner == rank or slot % size < layer.homes:
            continue
        most, old = 0.0, layer.slot_P[slot]
        for scenario in range(scenarios):
            freed = layer.token_PW[slot, scenario]
            lost_W[scenario] = 0.0
            if freed > 0.0:
                lowest = np.inf
                for elsewhere in layer.copies_CE[: layer.count_E[old], old]:
                    if elsewhere != slot:
                        lowest = min(lowest, layer.load_RW[layer.rank_P[elsewhere], scenario])
                lost_W[scenario] = 2.0 * freed * (lowest - layer.load_RW[partner, scenario] + freed)
            gap_W[scenario] = layer.load_RW[rank, scenario] - layer.load_RW[partner, scenario] + freed
            most += 0.5 * max(gap_W[scenario], 0.0) ** 2 - lost_W[scenario]
        if most <= best:
            continue
        for source in range(rank * size, (rank + 1) * size):
            expert = layer.slot_P[source]
            if expert == EMPTY:
                continue
            gain = 0.0
            for scenario in range(scenarios):
                gap = max(gap_W[scenario], 0.0)
                less = min(layer.token_PW[source, scenario], 0.5 * gap)
                gain += 2.0 * less * (gap - less) - lost_W[scenario]
            if gain > best and expert not in layer.slot_P[partner * size : (partner + 1) * size]:
                best, found, taken = gain, slot, expert
    return found, taken
