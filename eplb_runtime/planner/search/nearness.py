"""Bring experts nearer to where their tokens come from, once the ranks are balanced.

Steps as in ``descent``, but found by the tokens that would no longer cross between nodes: two homes of different nodes
change places, or a replica slot gets an expert of which no copy stands on its node. A step is taken when imbalance and
crossing tokens together, at their price, fall by more than the step costs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit
from .descent import LEAST_FALL, REPLICA, SETTLING_SWEEPS, SWAP, Best, keep_best, take
from .prices import Question, Track, crossing_cost, judge, price_of_moves, record
from .scenarios import LayerLoads, copy_state, has_copy_on, settle, tokens_at_home

TRIED = 6
"""Steps tried in earnest at a time."""
MOST_STEPS = 96
CROWDING = 0.5
"""What a step would heap on a rank beyond the busiest counts so much when steps are ranked: the split spreads some."""


@jit(error_model="numpy")
def draw_near(
    layer: LayerLoads, spare: LayerLoads, other: LayerLoads, question: Question, track: Track, step: int
) -> int:
    """Take steps while one pays, in place; what they reach is written behind ``step`` of the track.

    Returns:
        Steps by then.
    """
    scenarios, ranks = layer.load_WR.shape
    experts = layer.home_E.size
    best = Best(np.zeros(TRIED), np.zeros((TRIED, 4), dtype=np.int64))
    kept_4 = np.zeros(4, dtype=np.int64)
    peak_W, share_E, load_R = np.empty(scenarios), np.empty(experts), np.empty(ranks)
    value, goal = judge(layer, peak_W)
    goal += crossing_cost(layer, question) + price_of_moves(layer, question)
    copy_state(layer, spare)
    for _ in range(MOST_STEPS):
        if step + 2 >= track.value_N.size:
            break
        _shares(layer, share_E, load_R)
        best.gain_M[:] = 0.0
        _find_swaps(layer, question, share_E, load_R, best)
        _find_replicas(layer, question, share_E, best)
        reached, found = goal - LEAST_FALL, False
        for index in range(TRIED):
            if best.gain_M[index] <= 0.0:
                break
            take(layer, best.step_M4[index])
            settle(layer, SETTLING_SWEEPS)
            tried_value, tried = judge(layer, peak_W)
            crossing = crossing_cost(layer, question)
            tried += crossing + price_of_moves(layer, question)
            if tried < reached:
                reached, value, found = tried, tried_value + crossing, True
                kept_4[:] = best.step_M4[index]
                copy_state(layer, other)
            copy_state(spare, layer)
        if not found:
            break
        goal = reached
        copy_state(other, layer)
        copy_state(other, spare)
        step += 1
        record(layer, question, track, step, value)
        track.step_N4[step] = kept_4
    return step


@jit(error_model="numpy")
def _shares(layer: LayerLoads, share_E: NDArray[np.float64], load_R: NDArray[np.float64]) -> None:
    """Of all tokens, mean over the scenarios: what each expert computes at its home, and each rank in all."""
    share_E[:] = 0.0
    load_R[:] = 0.0
    scenarios = layer.load_WR.shape[0]
    for scenario in range(scenarios):
        total = max(float(layer.load_WE[scenario].sum()), 1.0) * scenarios
        for expert in range(share_E.size):
            share_E[expert] += tokens_at_home(layer, scenario, expert) / total
        for rank in range(load_R.size):
            load_R[rank] += layer.load_WR[scenario, rank] / total


@jit(error_model="numpy")
def _find_swaps(
    layer: LayerLoads, question: Question, share_E: NDArray[np.float64], load_R: NDArray[np.float64], best: Best
) -> None:
    peak, ranks = load_R.max(), load_R.size
    for here in range(share_E.size):
        rank_here = int(layer.home_E[here])
        node_here = rank_here // question.ranks_per_node
        for there in range(here):
            rank_there = int(layer.home_E[there])
            node_there = rank_there // question.ranks_per_node
            if node_here == node_there:
                continue
            nearer = share_E[here] * (question.source_EN[here, node_there] - question.source_EN[here, node_here])
            nearer += share_E[there] * (question.source_EN[there, node_here] - question.source_EN[there, node_there])
            if nearer * question.crossing_price <= best.gain_M[-1]:
                continue
            shift = share_E[here] - share_E[there]
            crowded = max(load_R[rank_here] - shift, load_R[rank_there] + shift) - peak
            gain = nearer * question.crossing_price - CROWDING * ranks * max(crowded, 0.0)
            if gain > best.gain_M[-1] and not (
                has_copy_on(layer, here, rank_there) or has_copy_on(layer, there, rank_here)
            ):
                keep_best(best, gain, int(SWAP), here, there, there)


@jit(error_model="numpy")
def _find_replicas(layer: LayerLoads, question: Question, share_E: NDArray[np.float64], best: Best) -> None:
    ranks, slots = layer.replica_RK.shape
    nodes = question.source_EN.shape[1]
    copies_NE = np.zeros((nodes, share_E.size), dtype=np.int64)
    for expert in range(share_E.size):
        copies_NE[layer.home_E[expert] // question.ranks_per_node, expert] += 1
    for rank in range(ranks):
        for slot in range(slots):
            if layer.replica_RK[rank, slot] != EMPTY:
                copies_NE[rank // question.ranks_per_node, layer.replica_RK[rank, slot]] += 1
    for rank in range(ranks):
        node = rank // question.ranks_per_node
        for slot in range(slots):
            standing, loss = layer.replica_RK[rank, slot], 0.0
            if standing != EMPTY and copies_NE[node, standing] == 1:
                loss = share_E[standing] * question.source_EN[standing, node]
            for expert in range(share_E.size):
                if copies_NE[node, expert] > 0:
                    continue
                row = layer.row_E[expert]
                if row >= 0 and layer.count_N[row] >= layer.ranks_NC.shape[1]:
                    continue
                gain = (share_E[expert] * question.source_EN[expert, node] - loss) * question.crossing_price
                if gain > best.gain_M[-1]:
                    keep_best(best, gain, int(REPLICA), expert, rank, slot)
