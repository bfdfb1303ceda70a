"""One layer during a search: the expert in each slot, and the split of its tokens over homes and replicas in every
scenario.

Loads are in units of the even rank load: each scenario's tokens add up to R (to the sum of speeds, where ranks differ),
so the busiest rank's load is the imbalance. A slow rank carries a virtual load of 1 - speed besides its tokens.

Shape suffixes: W scenarios, E experts, R ranks, P slots, C replicas of an expert with its home, N nodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SPREAD_WEIGHT = 0.1
"""Weight of the variance of rank loads in the goal of a search. It leads over plateaus, where several ranks are the
busiest and one step cannot lower the maximum."""


class Layer(NamedTuple):
    """The state of one layer; arrays change in place.

    Args:
        slot_P: int64, the expert in each slot; EMPTY in a replica slot without one.
        homes: E/R, the first slots of each rank.
        per_rank: S.
        load_EW: the load of each expert.
        virtual_R: the virtual load of each rank.
        copies_EC: int64, the slots of each expert, its home first.
        count_E: int64, how many slots hold each expert.
        token_PW: what each slot computes.
        load_RW: what each rank computes, with its virtual load.
        source_EN: the share of each expert's tokens that comes from each node.
        rank_P: int64, the rank of each slot.
        crossing_price: imbalance that is worth as much as all tokens crossing nodes; 0: crossing is free.
    """

    slot_P: IntArray
    homes: int
    per_rank: int
    load_EW: FloatArray
    virtual_R: FloatArray
    copies_EC: IntArray
    count_E: IntArray
    token_PW: FloatArray
    load_RW: FloatArray
    source_EN: FloatArray
    rank_P: IntArray
    crossing_price: float


@jit(error_model="numpy")
def split_evenly(layer: Layer) -> None:
    """Find the slots of each expert, and split its tokens evenly over them. Replicas beyond C are dropped."""
    most, ranks = layer.copies_EC.shape[1], len(layer.load_RW)
    layer.count_E[:] = 0
    for first, last in ((0, layer.homes), (layer.homes, layer.per_rank)):
        for rank in range(ranks):
            for slot in range(rank * layer.per_rank + first, rank * layer.per_rank + last):
                expert = layer.slot_P[slot]
                if expert == EMPTY:
                    continue
                if layer.count_E[expert] == most:
                    layer.slot_P[slot] = EMPTY
                    continue
                layer.copies_EC[expert, layer.count_E[expert]] = slot
                layer.count_E[expert] += 1
    layer.token_PW[:] = 0.0
    for rank in range(ranks):
        layer.load_RW[rank] = layer.virtual_R[rank]
    for slot in range(layer.slot_P.size):
        expert = layer.slot_P[slot]
        if expert != EMPTY:
            layer.token_PW[slot] = layer.load_EW[expert] / layer.count_E[expert]
            layer.load_RW[layer.rank_P[slot]] += layer.token_PW[slot]


@jit(error_model="numpy")
def fill_to_level(layer: Layer, sweeps: int, tolerance: float) -> None:
    """Split the tokens of replicated experts so that the busiest rank has less: water-filling, expert by expert.

    Args:
        sweeps: at most so many passes over all replicated experts.
        tolerance: the end, when a pass lowers the busiest ranks of all scenarios by a smaller share than this.
    """
    several, before, peak_W = np.flatnonzero(layer.count_E > 1), np.inf, np.empty(layer.load_RW.shape[1])
    for _ in range(sweeps):
        for expert in several:
            if layer.count_E[expert] == 2:
                _split_in_two(layer, expert)
            else:
                for scenario in range(peak_W.size):
                    _split_in_many(layer, expert, scenario)
        if tolerance > 0.0:
            _peaks(layer, peak_W)
            if before - peak_W.sum() < tolerance * peak_W.sum():
                break
            before = peak_W.sum()


@jit(error_model="numpy")
def _split_in_two(layer: Layer, expert: Any) -> None:
    one, other = layer.copies_EC[expert, 0], layer.copies_EC[expert, 1]
    tokens_W, other_tokens_W = layer.token_PW[one], layer.token_PW[other]
    load_W, other_load_W = layer.load_RW[layer.rank_P[one]], layer.load_RW[layer.rank_P[other]]
    for scenario in range(tokens_W.size):
        total = tokens_W[scenario] + other_tokens_W[scenario]
        without = load_W[scenario] - tokens_W[scenario]
        other_without = other_load_W[scenario] - other_tokens_W[scenario]
        given = min(max(0.5 * (total + other_without - without), 0.0), total)
        tokens_W[scenario], other_tokens_W[scenario] = given, total - given
        load_W[scenario], other_load_W[scenario] = without + given, other_without + total - given


@jit(error_model="numpy")
def _split_in_many(layer: Layer, expert: Any, scenario: int) -> None:
    slots = layer.copies_EC[expert, : layer.count_E[expert]]
    total = 0.0
    for slot in slots:
        total += layer.token_PW[slot, scenario]
        layer.load_RW[layer.rank_P[slot], scenario] -= layer.token_PW[slot, scenario]
    level, filled = np.inf, slots.size + 1
    while True:  # ranks above the level take nothing; without them it falls
        under, below = 0, total
        for slot in slots:
            load = layer.load_RW[layer.rank_P[slot], scenario]
            if load < level:
                under += 1
                below += load
        if under >= filled or under == 0:
            break
        level, filled = below / under, under
    for slot in slots:
        tokens = max(level - layer.load_RW[layer.rank_P[slot], scenario], 0.0)
        layer.token_PW[slot, scenario] = tokens
        layer.load_RW[layer.rank_P[slot], scenario] += tokens


@jit(error_model="numpy")
def judge(layer: Layer, peak_W: FloatArray) -> tuple[float, float]:
    """Return what the layer is worth and the goal of the search, both to be lowered.

    Args:
        peak_W: out, the imbalance in each scenario, with what crossing tokens cost.

    Returns:
        the mean of ``peak_W``; the same with the variance of rank loads.
    """
    _peaks(layer, peak_W)
    if layer.crossing_price > 0.0:
        for scenario in range(peak_W.size):
            peak_W[scenario] += layer.crossing_price * _crossing(layer, scenario)
    worth = peak_W.mean()
    return worth, worth + SPREAD_WEIGHT * ((layer.load_RW - 1.0) ** 2).mean()


@jit(error_model="numpy")
def _peaks(layer: Layer, peak_W: FloatArray) -> None:
    peak_W[:] = layer.load_RW[0]
    for rank in range(1, len(layer.load_RW)):
        for scenario in range(peak_W.size):
            peak_W[scenario] = max(peak_W[scenario], layer.load_RW[rank, scenario])


@jit(error_model="numpy")
def _crossing(layer: Layer, scenario: int) -> float:
    """Share of the scenario's tokens that are computed on another node than they come from."""
    nodes = layer.source_EN.shape[1]
    per_node = layer.slot_P.size // nodes
    at_home, total, here_N = 0.0, 0.0, np.empty(nodes)
    for expert in range(layer.count_E.size):
        here_N[:] = 0.0
        for slot in layer.copies_EC[expert, : layer.count_E[expert]]:
            here_N[slot // per_node] += layer.token_PW[slot, scenario]
        load = layer.load_EW[expert, scenario]
        total += load
        for node in range(nodes):
            at_home += min(here_N[node], load * layer.source_EN[expert, node])
    return 1.0 - at_home / total if total > 0.0 else 0.0


@jit
def is_on(layer: Layer, rank: int, expert: int) -> bool:
    """Return whether a slot of the rank holds the expert."""
    found = False
    for slot in layer.copies_EC[expert, : layer.count_E[expert]]:
        found = found or layer.rank_P[slot] == rank
    return found


@jit
def swap_homes(layer: Layer, one: int, other: int) -> None:
    """Exchange the experts of two home slots; each takes along the tokens that it has there."""
    first, second = layer.slot_P[one], layer.slot_P[other]
    layer.slot_P[one], layer.slot_P[other] = second, first
    layer.copies_EC[first, 0], layer.copies_EC[second, 0] = other, one
    for scenario in range(layer.load_RW.shape[1]):
        goes, comes = layer.token_PW[one, scenario], layer.token_PW[other, scenario]
        layer.token_PW[one, scenario], layer.token_PW[other, scenario] = comes, goes
        layer.load_RW[layer.rank_P[one], scenario] += comes - goes
        layer.load_RW[layer.rank_P[other], scenario] += goes - comes


@jit
def set_replica(layer: Layer, slot: int, expert: int) -> None:
    """Put an expert, or EMPTY, into a replica slot. It begins without tokens; those of the replica that was there go to
    that expert's home."""
    old = layer.slot_P[slot]
    if old != EMPTY:
        home, last = layer.copies_EC[old, 0], layer.count_E[old] - 1
        for index in range(1, last + 1):
            if layer.copies_EC[old, index] == slot:
                layer.copies_EC[old, index] = layer.copies_EC[old, last]
                break
        layer.count_E[old] = last
        for scenario in range(layer.load_RW.shape[1]):
            tokens = layer.token_PW[slot, scenario]
            layer.token_PW[slot, scenario] = 0.0
            layer.token_PW[home, scenario] += tokens
            layer.load_RW[layer.rank_P[slot], scenario] -= tokens
            layer.load_RW[layer.rank_P[home], scenario] += tokens
    layer.slot_P[slot] = expert
    if expert != EMPTY:
        layer.copies_EC[expert, layer.count_E[expert]] = slot
        layer.count_E[expert] += 1
