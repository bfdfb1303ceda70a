"""The search under the ``incremental`` policy: best swaps of homes, best changes of replica slots, one layer at a time.

A step relieves a rank that is busy in many scenarios: it swaps one of its homes with another rank's, or gives one of
its experts a replica elsewhere. Steps are ranked by how far the sum of squared rank loads would fall with the splits
held still; the best few are tried, the splits settled, and the best of them taken if the busiest ranks fall by more
than the step's price, and not in the odd scenario only. Loads are integers, so that every machine takes the same steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit
from .prices import NOW, Question, Track, crossing_cost, judge, price_of_moves, record
from .scenarios import LayerLoads, copy_state, has_copy_on, set_replica, settle, swap_homes

NEAR_BONUS = 1.02
"""A step inside the node is preferred while its gain is at most 2 % less."""
AWAY = 0.25
"""A scenario that a step makes worse counts so much: what it heaps up, the next split spreads."""
TRIED = 3
"""Steps tried in earnest for each busy rank."""
STUCK_RANKS = 6
"""So many busy ranks are tried before the search gives up."""
SETTLING_SWEEPS = 3
LEAST_FALL = 1e-6
ROUNDED = 1.0 + 1e-9
"""So far may a sum in another order differ."""
SURE = 1.2
"""A step's gain must be so many standard errors of its mean over the scenarios."""
GOOD_ENOUGH = 2.0**-10
"""A rank this little above the mean needs no relief."""


SWAP, REPLICA = 0, 1
"""Kinds of steps."""


class Best(NamedTuple):
    """The best steps so far, best first: gain, kind, and the three numbers that name the step."""

    gain_M: NDArray[np.float64]
    step_M4: NDArray[np.int64]


@jit(error_model="numpy")
def descend(
    layer: LayerLoads, spare: LayerLoads, other: LayerLoads, question: Question, track: Track, enough: float
) -> int:
    """Take improving steps from where ``layer`` stands, in place; ``spare`` and ``other`` are room to work in.

    Args:
        enough: a mean imbalance with which it stops.

    Returns:
        steps taken, at most one less than ``track`` has room for.
    """
    scenarios, experts = layer.load_WE.shape
    ranks = layer.load_WR.shape[1]
    tokens_EW, load_RW = np.empty((experts, scenarios)), np.empty((ranks, scenarios))
    excess_R, stuck_R = np.empty(ranks), np.zeros(ranks, dtype=np.bool_)
    best = Best(np.zeros(TRIED), np.zeros((TRIED, 4), dtype=np.int64))
    peak_W, tried_W, kept_W = np.empty(scenarios), np.empty(scenarios), np.empty(scenarios)
    kept_4 = np.zeros(4, dtype=np.int64)
    value, goal = judge(layer, peak_W)
    crossing = crossing_cost(layer, question)
    record(layer, question, track, int(NOW), value + crossing)
    goal += crossing + price_of_moves(layer, question)
    copy_state(layer, spare)
    stuck, step = 0, 0
    while step + 1 < track.value_N.size and stuck < STUCK_RANKS and value > enough:
        excess_of_ranks(layer, excess_R)
        busiest = _busiest(excess_R, stuck_R)
        if busiest < 0 or excess_R[busiest] <= 0.0:
            break
        read_tokens(layer, tokens_EW, load_RW)
        best.gain_M[:] = 0.0
        find_swaps(layer, busiest, tokens_EW, load_RW, question.ranks_per_node, best)
        find_replicas(layer, busiest, load_RW, question.ranks_per_node, best)
        reached = goal - LEAST_FALL
        found = False
        for index in range(TRIED):
            if best.gain_M[index] <= 0.0:
                break
            take(layer, best.step_M4[index])
            settle(layer, SETTLING_SWEEPS)
            tried_value, tried = judge(layer, tried_W)
            if tried < reached:
                tried_crossing = crossing_cost(layer, question)
                tried += tried_crossing + price_of_moves(layer, question)
                if tried < reached and is_sure(peak_W, tried_W):
                    reached, value, crossing, found = tried, tried_value, tried_crossing, True
                    kept_W[:] = tried_W
                    kept_4[:] = best.step_M4[index]
                    copy_state(layer, other)
            copy_state(spare, layer)
        if not found:
            stuck_R[busiest] = True
            stuck += 1
            continue
        goal = reached
        peak_W[:] = kept_W
        copy_state(other, layer)
        copy_state(other, spare)
        stuck_R[:] = False
        stuck = 0
        step += 1
        record(layer, question, track, step, value + crossing)
        track.step_N4[step] = kept_4
    return step


@jit(error_model="numpy")
def _busiest(excess_R: NDArray[np.float64], stuck_R: NDArray[np.bool_]) -> int:
    """The first rank with most excess of those that are not stuck; -1 where all are."""
    busiest = -1
    for rank in range(excess_R.size):
        if not stuck_R[rank] and (busiest < 0 or excess_R[rank] > excess_R[busiest]):
            busiest = rank
    return busiest


@jit(error_model="numpy")
def is_sure(before_W: NDArray[np.float64], after_W: NDArray[np.float64]) -> bool:
    """Whether the busiest ranks gain in more than the odd scenario: by so many standard errors of the mean gain."""
    scenarios = before_W.size
    if scenarios == 1:
        return True
    mean, squares = 0.0, 0.0
    for scenario in range(scenarios):
        gain = before_W[scenario] - after_W[scenario]
        mean += gain
        squares += gain * gain
    mean /= scenarios
    variance = max(squares / scenarios - mean * mean, 0.0)
    return mean >= 0.0 and mean * mean * (scenarios - 1) >= SURE * SURE * variance


@jit(error_model="numpy")
def excess_of_ranks(layer: LayerLoads, excess_R: NDArray[np.float64]) -> None:
    """How far each rank is above the mean, squared, summed over the scenarios."""
    scenarios, ranks = layer.load_WR.shape
    excess_R[:] = 0.0
    for scenario in range(scenarios):
        total = 0.0
        for rank in range(ranks):
            total += float(layer.load_WR[scenario, rank])
        mean = total / ranks
        if mean <= 0.0:
            continue
        for rank in range(ranks):
            above = float(layer.load_WR[scenario, rank]) / mean - 1.0
            if above > GOOD_ENOUGH:
                excess_R[rank] += above * above


@jit(error_model="numpy")
def read_tokens(layer: LayerLoads, tokens_EW: NDArray[np.float64], load_RW: NDArray[np.float64]) -> None:
    """Tokens of each expert at its home, and of each rank, scenarios innermost."""
    scenarios, experts = layer.load_WE.shape
    for expert in range(experts):
        row = layer.row_E[expert]
        for scenario in range(scenarios):
            tokens_EW[expert, scenario] = (
                layer.load_WE[scenario, expert] if row < 0 else layer.share_WNC[scenario, row, 0]
            )
    for rank in range(load_RW.shape[0]):
        for scenario in range(scenarios):
            load_RW[rank, scenario] = layer.load_WR[scenario, rank]


@jit(error_model="numpy")
def find_swaps(
    layer: LayerLoads,
    busiest: int,
    tokens_EW: NDArray[np.float64],
    load_RW: NDArray[np.float64],
    ranks_per_node: int,
    best: Best,
) -> None:
    """Homes of the busiest rank against homes of the others; a swap moves two slots, so it counts half."""
    homes = layer.homes_RH.shape[1]
    ranks, scenarios = load_RW.shape
    for rank in range(ranks):
        if rank == busiest:
            continue
        bonus = NEAR_BONUS if rank // ranks_per_node == busiest // ranks_per_node else 1.0
        most = 0.0  # no shift of tokens between the two gains more than half of what lies between them
        for scenario in range(scenarios):
            gap = load_RW[busiest, scenario] - load_RW[rank, scenario]
            most += 0.25 * gap * gap
        if most * bonus * ROUNDED < best.gain_M[-1]:
            continue
        for index in range(homes):
            here = int(layer.homes_RH[busiest, index])
            for other in range(homes):
                there = int(layer.homes_RH[rank, other])
                gain = 0.0
                for scenario in range(scenarios):
                    shift = tokens_EW[here, scenario] - tokens_EW[there, scenario]
                    gain_here = shift * (load_RW[busiest, scenario] - load_RW[rank, scenario] - shift)
                    gain += gain_here if gain_here > 0.0 else AWAY * gain_here
                gain *= bonus
                if gain <= best.gain_M[-1]:
                    continue
                if layer.row_E[here] >= 0 and has_copy_on(layer, here, rank):
                    continue
                if layer.row_E[there] >= 0 and has_copy_on(layer, there, busiest):
                    continue
                keep_best(best, gain, int(SWAP), here, there, there)


@jit(error_model="numpy")
def find_replicas(
    layer: LayerLoads, busiest: int, load_RW: NDArray[np.float64], ranks_per_node: int, best: Best
) -> None:
    """Experts of the busiest rank into replica slots elsewhere, in place of what stands there."""
    ranks, slots = layer.replica_RK.shape
    homes, scenarios = layer.homes_RH.shape[1], load_RW.shape[1]
    freed_W, loss_W = np.empty(scenarios), np.empty(scenarios)
    mine_XW = np.empty((homes + slots, scenarios))
    expert_X = _of_rank(layer, busiest, mine_XW)
    for rank in range(ranks):
        if rank == busiest:
            continue
        bonus = NEAR_BONUS if rank // ranks_per_node == busiest // ranks_per_node else 1.0
        for slot in range(slots):
            _cost_of_leaving(layer, rank, slot, load_RW, freed_W, loss_W)
            most = 0.0  # if every expert had just the tokens that bring both ranks to one level
            for scenario in range(scenarios):
                gap = load_RW[busiest, scenario] - load_RW[rank, scenario] + freed_W[scenario]
                most += (0.5 * gap * gap if gap > 0.0 else 0.0) - loss_W[scenario]
            if most * bonus * ROUNDED < best.gain_M[-1]:
                continue
            for index in range(expert_X.size):
                expert = int(expert_X[index])
                if expert == EMPTY:
                    continue
                gain = 0.0
                for scenario in range(scenarios):
                    gap = load_RW[busiest, scenario] - load_RW[rank, scenario] + freed_W[scenario]
                    if gap > 0.0:
                        shift = min(mine_XW[index, scenario], 0.5 * gap)
                        gain += 2.0 * shift * (gap - shift)
                    gain -= loss_W[scenario]
                gain *= bonus
                if gain > best.gain_M[-1] and not has_copy_on(layer, expert, rank):
                    keep_best(best, gain, int(REPLICA), expert, rank, slot)


@jit(error_model="numpy")
def _of_rank(layer: LayerLoads, rank: int, tokens_XW: NDArray[np.float64]) -> NDArray[np.int32]:
    """int32 ``[H + K]``: experts of a rank that may have one copy more, or -1; and their tokens there."""
    homes, slots = layer.homes_RH.shape[1], layer.replica_RK.shape[1]
    expert_X = np.empty(homes + slots, dtype=np.int32)
    for index in range(homes + slots):
        expert = layer.homes_RH[rank, index] if index < homes else layer.replica_RK[rank, index - homes]
        row = -1 if expert == EMPTY else layer.row_E[expert]
        if row >= 0 and layer.count_N[row] >= layer.ranks_NC.shape[1]:
            expert = EMPTY
        expert_X[index] = expert
        if expert == EMPTY:
            continue
        place = 0
        while row >= 0 and layer.ranks_NC[row, place] != rank:
            place += 1
        for scenario in range(tokens_XW.shape[1]):
            tokens_XW[index, scenario] = (
                layer.load_WE[scenario, expert] if row < 0 else layer.share_WNC[scenario, row, place]
            )
    return expert_X


@jit(error_model="numpy")
def _cost_of_leaving(
    layer: LayerLoads,
    rank: int,
    slot: int,
    load_RW: NDArray[np.float64],
    freed_W: NDArray[np.float64],
    loss_W: NDArray[np.float64],
) -> None:
    """Tokens that leave with a replica slot's expert, and what that costs where they go: its lightest other rank."""
    freed_W[:] = 0.0
    loss_W[:] = 0.0
    expert = layer.replica_RK[rank, slot]
    if expert == EMPTY:
        return
    row = layer.row_E[expert]
    place = 1
    while layer.ranks_NC[row, place] != rank:
        place += 1
    for scenario in range(freed_W.size):
        freed = float(layer.share_WNC[scenario, row, place])
        if freed <= 0.0:
            continue
        least_loaded = np.inf
        for copy in range(layer.count_N[row]):
            if copy != place:
                least_loaded = min(least_loaded, load_RW[layer.ranks_NC[row, copy], scenario])
        freed_W[scenario] = freed
        loss_W[scenario] = 2.0 * freed * (least_loaded - load_RW[rank, scenario] + freed)


@jit(error_model="numpy")
def keep_best(best: Best, gain: float, kind: int, first: int, second: int, third: int) -> None:
    """Into the list by gain; among equals the earlier stays ahead."""
    place = best.gain_M.size - 1
    while place > 0 and best.gain_M[place - 1] < gain:
        best.gain_M[place] = best.gain_M[place - 1]
        best.step_M4[place] = best.step_M4[place - 1]
        place -= 1
    best.gain_M[place] = gain
    best.step_M4[place, 0], best.step_M4[place, 1] = kind, first
    best.step_M4[place, 2], best.step_M4[place, 3] = second, third


@jit(error_model="numpy")
def take(layer: LayerLoads, step_4: NDArray[np.int64]) -> None:
    """A step: its kind; of a swap the two experts; of a replica the expert, the rank and the slot."""
    if step_4[0] == SWAP:
        swap_homes(layer, step_4[1], step_4[2])
    else:
        set_replica(layer, step_4[2], step_4[3], step_4[1])
