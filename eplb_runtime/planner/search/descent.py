"""Lower the busiest rank step by step: swap one of its homes for another rank's, or give one of its experts a replica.

A formula for each pair finds the swap and the few replicas that promise most, as if no other split changed. These are
tried, with all splits, and the best is taken if what it gains is more than its moves cost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit
from ..parameters import PARAMETERS
from .layer import FloatArray, IntArray, Layer, copy_split, fill_to_level, is_on, judge, set_replica, swap_homes

TRIED_REPLICAS, SWEEPS, SURE = PARAMETERS.tried_replicas, PARAMETERS.step_sweeps, PARAMETERS.step_sure
LEAST_FALL, LOSS_WEIGHT = PARAMETERS.least_fall, PARAMETERS.loss_weight
STUCK_RANKS, ENOUGH = PARAMETERS.stuck_ranks, PARAMETERS.enough
"""Compiled into what is below."""
SWAP, REPLICA = 0, 1
VALUE, HOMES, REPLICAS, KIND, SLOT, OTHER = range(6)
"""Columns of a track: imbalance after a step, homes and replicas moved by then; the step's kind, its slot, and the
other slot of a swap or the expert of a replica."""
NOT_HERE, AS_REPLICA, AS_HOME = 0, 1, 2
"""How a rank held an expert before the search."""


@jit(error_model="numpy")
def descend(layer: Layer, track_NX: FloatArray) -> int:
    """Take steps until none helps, `ENOUGH` is reached or the track is full.

    Args:
        layer: tokens are split; where the search ends it is in the state after the last step.
        track_NX: out, float64 ``[N + 1, 6]``, row n after n steps; the first has the homes and replicas moved by now.

    Returns:
        N, the steps taken.
    """
    scenarios = len(layer.load_WE)
    peak_W, tried_W, best_W = np.empty(scenarios), np.empty(scenarios), np.empty(scenarios)
    is_stuck_R, stuck, steps = np.zeros(layer.load_WR.shape[1], dtype=np.bool_), 0, 0
    step_M3, gain_M = np.empty((1 + TRIED_REPLICAS, 3), dtype=np.int64), np.empty(1 + TRIED_REPLICAS)
    token_WP, load_WR = np.empty_like(layer.token_WP), np.empty_like(layer.load_WR)
    best_token_WP, best_load_WR = np.empty_like(layer.token_WP), np.empty_like(layer.load_WR)
    homes, replicas = int(track_NX[0, HOMES]), int(track_NX[0, REPLICAS])
    value, goal = judge(layer, peak_W)
    home_price, replica_price = layer.prices[0], layer.prices[1]
    goal += home_price * homes + replica_price * replicas
    _note(track_NX[0], value, homes, replicas, 0, 0, 0)
    while steps + 1 < len(track_NX) and stuck < STUCK_RANKS and value > ENOUGH:
        rank = _busiest(layer, is_stuck_R)
        if rank < 0:
            break
        gain_M[:] = 0.0
        if layer.homes > 1:
            _find_swap(layer, rank, gain_M, step_M3)
        if layer.per_rank > layer.homes:
            _find_replicas(layer, rank, gain_M, step_M3)
        copy_split(layer.token_WP, layer.load_WR, token_WP, load_WR)
        taken, best_goal, best_value, best_homes, best_replicas = -1, goal - LEAST_FALL, value, homes, replicas
        for index in range(len(gain_M)):
            if gain_M[index] <= 0.0:
                continue
            kind, slot, other = step_M3[index, 0], step_M3[index, 1], step_M3[index, 2]
            before = layer.slot_P[slot]
            more_homes, more_replicas = _moves_of(layer, kind, slot, other)
            take(layer, kind, slot, other)
            fill_to_level(layer, SWEEPS, 0.0)
            new_value, new_goal = judge(layer, tried_W)
            new_goal += home_price * (homes + more_homes) + replica_price * (replicas + more_replicas)
            if new_goal < best_goal and _is_sure(peak_W - tried_W):
                taken, best_goal, best_value = index, new_goal, new_value
                best_homes, best_replicas = homes + more_homes, replicas + more_replicas
                best_W, tried_W = tried_W, best_W
                copy_split(layer.token_WP, layer.load_WR, best_token_WP, best_load_WR)
            take(layer, kind, slot, other if kind == SWAP else before)
            copy_split(token_WP, load_WR, layer.token_WP, layer.load_WR)
        if taken < 0:
            is_stuck_R[rank] = True
            stuck += 1
            continue
        kind, slot, other = step_M3[taken, 0], step_M3[taken, 1], step_M3[taken, 2]
        take(layer, kind, slot, other)
        copy_split(best_token_WP, best_load_WR, layer.token_WP, layer.load_WR)
        peak_W, best_W = best_W, peak_W
        value, goal, homes, replicas = best_value, best_goal, best_homes, best_replicas
        is_stuck_R[:] = False
        stuck = 0
        steps += 1
        _note(track_NX[steps], value, homes, replicas, kind, slot, other)
    return steps


@jit
def _note(row_X: FloatArray, value: float, homes: int, replicas: int, kind: int, slot: int, other: int) -> None:
    """Write a row of a track."""
    row_X[VALUE], row_X[HOMES], row_X[REPLICAS] = value, homes, replicas
    row_X[KIND], row_X[SLOT], row_X[OTHER] = kind, slot, other


@jit
def take(layer: Layer, kind: int, slot: int, other: int) -> None:
    """Take one step of a track."""
    if kind == SWAP:
        swap_homes(layer, slot, other)
    else:
        set_replica(layer, slot, other)


def after(begin_P: IntArray, track_NX: FloatArray) -> IntArray:
    """The placement at the end of a track that begins there."""
    slot_P = begin_P.copy()
    for kind, slot, other in track_NX[1:, [KIND, SLOT, OTHER]].astype(np.int64).tolist():
        if kind == SWAP:
            slot_P[[slot, other]] = slot_P[[other, slot]]
        else:
            slot_P[slot] = other
    return slot_P


def held_by(now_RS: IntArray, homes: int, experts: int) -> NDArray[np.int8]:
    """int8 ``[R, E]``: how each rank holds each expert, by its slots, homes first."""
    held_RE = np.full((len(now_RS), experts), NOT_HERE, dtype=np.int8)
    for slots_RS, how in ((now_RS[:, homes:], AS_REPLICA), (now_RS[:, :homes], AS_HOME)):
        rank, slot = np.nonzero(slots_RS != EMPTY)
        held_RE[rank, slots_RS[rank, slot]] = how
    return held_RE


def moved(layer: Layer) -> NDArray[np.int64]:
    """int64 ``[2]``: homes and replicas on ranks that did not hold them so."""
    slot_RS = layer.slot_P.reshape(-1, layer.per_rank)
    held_RS = np.take_along_axis(layer.held_RE, np.maximum(slot_RS, 0), axis=1)
    came_RK = (held_RS[:, layer.homes :] == NOT_HERE) & (slot_RS[:, layer.homes :] != EMPTY)
    return np.array([(held_RS[:, : layer.homes] != AS_HOME).sum(), came_RK.sum()])


@jit
def _moves_of(layer: Layer, kind: int, slot: int, other: int) -> tuple[int, int]:
    """Homes and replicas that a step moves, less those that it moves back."""
    held_RE, rank, old = layer.held_RE, slot // layer.per_rank, layer.slot_P[slot]
    if kind == REPLICA:
        back = 1 if old != EMPTY and held_RE[rank, old] == NOT_HERE else 0
        return 0, (1 if held_RE[rank, other] == NOT_HERE else 0) - back
    partner, comes = other // layer.per_rank, layer.slot_P[other]
    homes = 0
    homes += int(held_RE[partner, old] != AS_HOME) - int(held_RE[rank, old] != AS_HOME)
    homes += int(held_RE[rank, comes] != AS_HOME) - int(held_RE[partner, comes] != AS_HOME)
    return homes, 0


@jit(error_model="numpy")
def _busiest(layer: Layer, is_stuck_R: NDArray[np.bool_]) -> int:
    """The rank that is most above the even load, in the mean square over scenarios; -1: none is."""
    best, most = -1, 0.0
    for rank in range(layer.load_WR.shape[1]):
        if is_stuck_R[rank]:
            continue
        above = 0.0
        for scenario in range(len(layer.load_WR)):
            over = layer.load_WR[scenario, rank] - 1.0
            above += over * over if over > 1e-3 else 0.0
        if above > most:
            best, most = rank, above
    return best


@jit(error_model="numpy")
def _is_sure(gain_W: FloatArray) -> bool:
    """Return whether the mean gain over scenarios is above `SURE` standard errors."""
    mean, variance = gain_W.mean(), gain_W.var()
    return gain_W.size == 1 or (mean >= 0.0 and mean * mean * (gain_W.size - 1) >= SURE * SURE * variance)


@jit(error_model="numpy")
def _find_swap(layer: Layer, rank: int, gain_M: FloatArray, step_M3: IntArray) -> None:
    """Find the home of the rank and that of another rank whose exchange lowers the sum of squares most; first entry.

    d tokens from load x to load y lower the two squares by 2 d (x - y - d), at most by (x - y)^2 / 2.
    """
    scenarios, ranks = layer.load_WR.shape
    size, homes = layer.per_rank, layer.homes
    for partner in range(ranks):
        if partner == rank:
            continue
        most = 0.0
        for scenario in range(scenarios):
            gap = layer.load_WR[scenario, rank] - layer.load_WR[scenario, partner]
            most += 0.5 * gap * gap if gap > 0.0 else 0.125 * gap * gap
        if most <= gain_M[0]:
            continue
        for slot in range(rank * size, rank * size + homes):
            for other in range(partner * size, partner * size + homes):
                gain = 0.0
                for scenario in range(scenarios):
                    less = layer.token_WP[scenario, slot] - layer.token_WP[scenario, other]
                    gap = layer.load_WR[scenario, rank] - layer.load_WR[scenario, partner]
                    change = 2.0 * less * (gap - less)
                    gain += change if change > 0.0 else LOSS_WEIGHT * change
                if gain <= gain_M[0] or is_on(layer, partner, layer.slot_P[slot]):
                    continue
                if not is_on(layer, rank, layer.slot_P[other]):
                    gain_M[0] = gain
                    step_M3[0, 0], step_M3[0, 1], step_M3[0, 2] = SWAP, slot, other


@jit(error_model="numpy")
def _find_replicas(layer: Layer, rank: int, gain_M: FloatArray, step_M3: IntArray) -> None:
    """Find replica slots of other ranks, and experts of the rank for them, that lower the sum of squares most; from the
    second entry on, most first.

    A slot frees what its replica computes, which then burdens the least loaded rank that also holds that expert.
    """
    scenarios = len(layer.load_WR)
    last, gap_W, lost_W = len(gain_M) - 1, np.empty(scenarios), np.empty(scenarios)
    for slot in range(layer.slot_P.size):
        partner = slot // layer.per_rank
        if partner == rank or slot % layer.per_rank < layer.homes:
            continue
        most, old = 0.0, layer.slot_P[slot]
        for scenario in range(scenarios):
            freed = layer.token_WP[scenario, slot]
            lost_W[scenario] = 0.0
            if freed > 0.0:
                lowest = np.inf
                for elsewhere in layer.copies_EC[old, : layer.count_E[old]]:
                    if elsewhere != slot:
                        lowest = min(lowest, layer.load_WR[scenario, layer.rank_P[elsewhere]])
                lost_W[scenario] = 2.0 * freed * (lowest - layer.load_WR[scenario, partner] + freed)
            gap_W[scenario] = layer.load_WR[scenario, rank] - layer.load_WR[scenario, partner] + freed
            most += 0.5 * max(gap_W[scenario], 0.0) ** 2 - lost_W[scenario]
        if most <= gain_M[last]:
            continue
        for source in range(rank * layer.per_rank, (rank + 1) * layer.per_rank):
            expert = layer.slot_P[source]
            if expert == EMPTY or layer.count_E[expert] == layer.copies_EC.shape[1]:
                continue
            gain = 0.0
            for scenario in range(scenarios):
                gap = max(gap_W[scenario], 0.0)
                less = min(layer.token_WP[scenario, source], 0.5 * gap)
                gain += 2.0 * less * (gap - less) - lost_W[scenario]
            if gain > gain_M[last] and not is_on(layer, partner, expert):
                place = last
                while place > 1 and gain_M[place - 1] < gain:
                    gain_M[place], step_M3[place, 0] = gain_M[place - 1], step_M3[place - 1, 0]
                    step_M3[place, 1], step_M3[place, 2] = step_M3[place - 1, 1], step_M3[place - 1, 2]
                    place -= 1
                gain_M[place] = gain
                step_M3[place, 0], step_M3[place, 1], step_M3[place, 2] = REPLICA, slot, expert
