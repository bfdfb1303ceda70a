"""One layer under a budget of few moves: for each number of moves the best placement that a beam search finds.

A prefix of a long search is no answer to "at most two moves": its first steps prepare later ones. Here placements are
kept by how many slots they move, a few for each number, and each is taken further by the most promising steps of every
rank above the mean: a replica is one move, a swap of homes two, and what a rank held before costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit
from .descent import SETTLING_SWEEPS, Best, excess_of_ranks, find_replicas, find_swaps, is_sure, read_tokens, take
from .prices import NOW, Question, Track, crossing_cost, empty_track, judge, record
from .scenarios import LayerLoads, copy_state, empty_layer, place_experts, settle

MOST_MOVES = 8
"""Of a layer; beyond, a prefix of the long search leaves little."""
WORK, MOST_WIDTH, MOST_TRIED, LEAST_TRIED = 2**13, 16, 64, 12
"""Placements for each number of moves, and steps tried from each: many where experts x ranks x scenarios are few."""
MIXER, MIXED = 2654435761, 2**31
"""Of the numbers that tell placements apart."""


class Frontier(NamedTuple):
    """The best placement found with at most 0, 1, ... N - 1 moves.

    Args:
        value_N: float64, as ``Track.value_N``; inf where no placement with so many moves is better than with fewer.
        moved_N2, seconds_N: as in ``Track``.
        home_NE: int32, home ranks.
        replica_NRK: int32, replica slots.
    """

    value_N: NDArray[np.float64]
    moved_N2: NDArray[np.int64]
    seconds_N: NDArray[np.float64]
    home_NE: NDArray[np.int32]
    replica_NRK: NDArray[np.int32]


class Beam(NamedTuple):
    """Placements by their number of moves (M) and place among these (B); a goal of inf: none.

    Args:
        goal_MB: float64, what to lower.
        key_MB: int64, equal for equal placements.
        is_open_MB: bool, not yet taken further.
        home_MBE: int32, home ranks.
        replica_MBRK: int32, replica slots.
    """

    goal_MB: NDArray[np.float64]
    key_MB: NDArray[np.int64]
    is_open_MB: NDArray[np.bool_]
    home_MBE: NDArray[np.int32]
    replica_MBRK: NDArray[np.int32]


@jit(error_model="numpy")
def search_few_moves(
    load_WE: NDArray[np.int64], ballast_WR: NDArray[np.int64], question: Question, max_copies: int, most_moves: int
) -> Frontier:
    """Search from where the layer stands, with at most ``most_moves`` moves.

    Args:
        load_WE, ballast_WR: as in ``scenarios.LayerLoads``.
        max_copies: of one expert, home included.
    """
    scenarios, experts = load_WE.shape
    ranks, slots = question.start_replica_RK.shape
    width = min(max(WORK // (experts * ranks * scenarios), 1), MOST_WIDTH)
    tried = min(max(4 * width, LEAST_TRIED), MOST_TRIED)
    layer = empty_layer(load_WE, ballast_WR, slots, max_copies)
    spare = empty_layer(load_WE, ballast_WR, slots, max_copies)
    found = Frontier(
        np.full(most_moves + 1, np.inf),
        np.zeros((most_moves + 1, 2), dtype=np.int64),
        np.zeros(most_moves + 1),
        np.empty((most_moves + 1, experts), dtype=np.int32),
        np.empty((most_moves + 1, ranks, slots), dtype=np.int32),
    )
    beam = Beam(
        np.full((most_moves + 1, width), np.inf),
        np.zeros((most_moves + 1, width), dtype=np.int64),
        np.zeros((most_moves + 1, width), dtype=np.bool_),
        np.empty((most_moves + 1, width, experts), dtype=np.int32),
        np.empty((most_moves + 1, width, ranks, slots), dtype=np.int32),
    )
    tokens_EW, load_RW = np.empty((experts, scenarios)), np.empty((ranks, scenarios))
    excess_R, start_W, peak_W = np.empty(ranks), np.empty(scenarios), np.empty(scenarios)
    best = Best(np.zeros(tried), np.zeros((tried, 4), dtype=np.int64))
    track = empty_track(1)
    place_experts(layer, question.start_home_E, question.start_replica_RK)
    value, goal = judge(layer, start_W)
    crossing = crossing_cost(layer, question)
    record(layer, question, track, int(NOW), value + crossing)
    _keep_end(found, layer, track, int(NOW))
    _keep(beam, layer, int(NOW), goal + crossing)
    for moves in range(most_moves):
        for _ in range(2 * width):
            chosen = -1
            for place in range(width):
                if beam.is_open_MB[moves, place]:
                    chosen = place
                    break
            if chosen < 0:
                break
            beam.is_open_MB[moves, chosen] = False
            place_experts(layer, beam.home_MBE[moves, chosen], beam.replica_MBRK[moves, chosen])
            copy_state(layer, spare)
            excess_of_ranks(layer, excess_R)
            read_tokens(layer, tokens_EW, load_RW)
            best.gain_M[:] = -np.inf
            for rank in range(ranks):
                if excess_R[rank] > 0.0:
                    find_swaps(layer, rank, tokens_EW, load_RW, question.ranks_per_node, best)
                    find_replicas(layer, rank, load_RW, question.ranks_per_node, best)
            for index in range(tried):
                if best.gain_M[index] == -np.inf:
                    break
                take(layer, best.step_M4[index])
                record(layer, question, track, int(NOW), 0.0)
                moved = track.moved_N2[0, 0] + track.moved_N2[0, 1]
                if moved >= moves and moved <= most_moves:
                    settle(layer, SETTLING_SWEEPS)
                    value, goal = judge(layer, peak_W)
                    crossing = crossing_cost(layer, question)
                    track.value_N[0] = value + crossing
                    if is_sure(start_W, peak_W):
                        _keep_end(found, layer, track, moved)
                    _keep(beam, layer, moved, goal + crossing)
                copy_state(spare, layer)
    least = found.value_N[0]
    for moves in range(1, most_moves + 1):
        if found.value_N[moves] < least:
            least = found.value_N[moves]
        else:
            found.value_N[moves] = np.inf
    return found


@jit(error_model="numpy")
def _keep_end(found: Frontier, layer: LayerLoads, track: Track, moved: int) -> None:
    """Write down what stands, if nothing with so many moves is as good."""
    if track.value_N[0] >= found.value_N[moved]:
        return
    found.value_N[moved], found.seconds_N[moved] = track.value_N[0], track.seconds_N[0]
    found.moved_N2[moved] = track.moved_N2[0]
    found.home_NE[moved] = layer.home_E
    found.replica_NRK[moved] = layer.replica_RK


@jit(error_model="numpy")
def _keep(beam: Beam, layer: LayerLoads, moved: int, goal: float) -> None:
    """Into the beam by goal, in place of the worst, unless the placement is there already."""
    goal_B, width = beam.goal_MB[moved], beam.goal_MB.shape[1]
    if goal >= goal_B[width - 1]:
        return
    key, ranks = 0, layer.replica_RK.shape[0]
    for expert in range(layer.home_E.size):
        key += ((expert * ranks + int(layer.home_E[expert])) * 2 + 1) * MIXER % MIXED
    for rank in range(ranks):
        for slot in range(layer.replica_RK.shape[1]):
            if layer.replica_RK[rank, slot] != EMPTY:
                key += ((int(layer.replica_RK[rank, slot]) * ranks + rank) * 2 + 2) * MIXER % MIXED
    for place in range(width):
        if goal_B[place] < np.inf and beam.key_MB[moved, place] == key:
            return
    place = width - 1
    while place > 0 and goal_B[place - 1] > goal:
        goal_B[place] = goal_B[place - 1]
        beam.key_MB[moved, place] = beam.key_MB[moved, place - 1]
        beam.is_open_MB[moved, place] = beam.is_open_MB[moved, place - 1]
        beam.home_MBE[moved, place] = beam.home_MBE[moved, place - 1]
        beam.replica_MBRK[moved, place] = beam.replica_MBRK[moved, place - 1]
        place -= 1
    goal_B[place], beam.key_MB[moved, place], beam.is_open_MB[moved, place] = goal, key, True
    beam.home_MBE[moved, place] = layer.home_E
    beam.replica_MBRK[moved, place] = layer.replica_RK
