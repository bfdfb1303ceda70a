"""One layer during a search: the expert in each slot, and the split of its tokens over homes and replicas in every
scenario.

Loads are in units of the even rank load: each scenario's tokens add up to R (to the sum of speeds, where ranks differ),
so the busiest rank's load is the imbalance. A slow rank carries a virtual load of 1 - speed on top of its tokens.

Shape suffixes: W scenarios, E experts, R ranks, P slots, C replicas of an expert with its home, N nodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit
from ..parameters import PARAMETERS

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Layer(NamedTuple):
    """The question about one layer, and the state of the search: arrays that change in place."""

    homes: int  # E/R, the first slots of each rank
    per_rank: int  # S
    now_P: IntArray  # the current placement; EMPTY in a replica slot without an expert
    held_RE: NDArray[np.int8]  # how each rank holds each expert now
    virtual_R: FloatArray  # the virtual load of each rank
    source_EN: FloatArray  # the share of each expert's tokens that comes from each node
    crossing_price: float  # imbalance that is worth as much as all tokens crossing nodes; 0: crossing is free
    prices: FloatArray  # imbalance that moving a home, and a replica, must be worth
    load_WE: FloatArray  # the load of each expert
    rank_P: IntArray  # the rank of each slot
    slot_P: IntArray = np.empty(0, dtype=np.int64)  # the expert in each slot, as in ``now_P``
    copies_EC: IntArray = np.empty((0, 0), dtype=np.int64)  # the slots of each expert, its home first
    count_E: IntArray = np.empty(0, dtype=np.int64)  # how many slots hold each expert
    token_WP: FloatArray = np.empty((0, 0))  # what each slot computes
    load_WR: FloatArray = np.empty((0, 0))  # what each rank computes, with its virtual load


def begun(layer: Layer, load_WE: FloatArray) -> Layer:
    """A layer of these scenarios; nothing is placed."""
    (ranks, experts), slots = layer.held_RE.shape, layer.now_P.size
    return layer._replace(
        load_WE=load_WE,
        slot_P=np.empty(slots, dtype=np.int64),
        copies_EC=np.empty((experts, min(ranks, 1 + slots - ranks * layer.homes)), dtype=np.int64),
        count_E=np.empty(experts, dtype=np.int64),
        token_WP=np.empty((len(load_WE), slots)),
        load_WR=np.empty((len(load_WE), ranks)),
    )


def worth(layer: Layer, slot_P: IntArray) -> tuple[float, FloatArray]:
    """Put a placement into the layer; return what it is worth, the mean and in each scenario."""
    layer.slot_P[:] = slot_P
    split_evenly(layer)
    fill_to_level(layer, PARAMETERS.sweeps)
    peak_W = np.empty(len(layer.load_WE))
    return judge(layer, peak_W), peak_W


@jit(error_model="numpy")
def split_evenly(layer: Layer) -> None:
    """Find the slots of each expert, and split its tokens evenly over them."""
    ranks = layer.load_WR.shape[1]
    layer.count_E[:] = 0
    for first, last in ((0, layer.homes), (layer.homes, layer.per_rank)):
        for rank in range(ranks):
            for slot in range(rank * layer.per_rank + first, rank * layer.per_rank + last):
                expert = layer.slot_P[slot]
                if expert == EMPTY:
                    continue
                layer.copies_EC[expert, layer.count_E[expert]] = slot
                layer.count_E[expert] += 1
    layer.token_WP[:] = 0.0
    for scenario in range(len(layer.load_WE)):
        for rank in range(ranks):
            layer.load_WR[scenario, rank] = layer.virtual_R[rank]
        for slot in range(layer.slot_P.size):
            expert = layer.slot_P[slot]
            if expert != EMPTY:
                share = layer.load_WE[scenario, expert] / layer.count_E[expert]
                layer.token_WP[scenario, slot] = share
                layer.load_WR[scenario, layer.rank_P[slot]] += share


@jit
def copy_split(token_WP: FloatArray, load_WR: FloatArray, to_token_WP: FloatArray, to_load_WR: FloatArray) -> None:
    """Copy the split of a layer. (Loops: what copies arrays whole takes seconds to compile.)"""
    for scenario in range(len(token_WP)):
        for slot in range(token_WP.shape[1]):
            to_token_WP[scenario, slot] = token_WP[scenario, slot]
        for rank in range(load_WR.shape[1]):
            to_load_WR[scenario, rank] = load_WR[scenario, rank]


@jit(error_model="numpy")
def fill_to_level(layer: Layer, sweeps: int) -> None:
    """Split the tokens of replicated experts so that the busiest rank has less: water-filling, expert by expert, in so
    many passes over all of them."""
    several = np.flatnonzero(layer.count_E > 1)
    for scenario in range(len(layer.load_WE)):
        token_P, load_R = layer.token_WP[scenario], layer.load_WR[scenario]
        for _ in range(sweeps):
            for expert in several:
                if layer.count_E[expert] == 2:
                    _split_in_two(layer, expert, token_P, load_R)
                else:
                    _split_in_many(layer, expert, token_P, load_R)


@jit(error_model="numpy")
def _split_in_two(layer: Layer, expert: Any, token_P: FloatArray, load_R: FloatArray) -> None:
    one, other = layer.copies_EC[expert, 0], layer.copies_EC[expert, 1]
    first, second = layer.rank_P[one], layer.rank_P[other]
    total = token_P[one] + token_P[other]
    without_first, without_second = load_R[first] - token_P[one], load_R[second] - token_P[other]
    given = min(max(0.5 * (total + without_second - without_first), 0.0), total)
    token_P[one], token_P[other] = given, total - given
    load_R[first], load_R[second] = without_first + given, without_second + total - given


@jit(error_model="numpy")
def _split_in_many(layer: Layer, expert: Any, token_P: FloatArray, load_R: FloatArray) -> None:
    slots = layer.copies_EC[expert, : layer.count_E[expert]]
    total = 0.0
    for slot in slots:
        total += token_P[slot]
        load_R[layer.rank_P[slot]] -= token_P[slot]
    level, filled = np.inf, slots.size + 1
    while True:  # ranks above the level take nothing; without them it falls
        under, below = 0, total
        for slot in slots:
            if load_R[layer.rank_P[slot]] < level:
                under += 1
                below += load_R[layer.rank_P[slot]]
        if under >= filled or under == 0:
            break
        level, filled = below / under, under
    for slot in slots:
        token_P[slot] = max(level - load_R[layer.rank_P[slot]], 0.0)
        load_R[layer.rank_P[slot]] += token_P[slot]


@jit(error_model="numpy")
def judge(layer: Layer, peak_W: FloatArray) -> float:
    """Return what the layer is worth, to be lowered: the mean of ``peak_W``, which is filled with the imbalance in each
    scenario, with what crossing tokens cost."""
    for scenario in range(len(layer.load_WR)):
        peak_W[scenario] = layer.load_WR[scenario].max()
        if layer.crossing_price > 0.0:
            peak_W[scenario] += layer.crossing_price * _crossing(layer, scenario)
    return float(peak_W.mean())


@jit(error_model="numpy")
def _crossing(layer: Layer, scenario: int) -> float:
    """Share of the scenario's tokens that are computed on another node than they come from."""
    nodes = layer.source_EN.shape[1]
    per_node = layer.slot_P.size // nodes
    at_home, total, here_N = 0.0, 0.0, np.empty(nodes)
    for expert in range(layer.count_E.size):
        here_N[:] = 0.0
        for slot in layer.copies_EC[expert, : layer.count_E[expert]]:
            here_N[slot // per_node] += layer.token_WP[scenario, slot]
        load = layer.load_WE[scenario, expert]
        total += load
        for node in range(nodes):
            at_home += min(here_N[node], load * layer.source_EN[expert, node])
    return 1.0 - at_home / total if total > 0.0 else 0.0


@jit
def swap_homes(layer: Layer, one: int, other: int) -> None:
    """Exchange the experts of two home slots; each takes along the tokens that it has there."""
    first, second = layer.slot_P[one], layer.slot_P[other]
    layer.slot_P[one], layer.slot_P[other] = second, first
    layer.copies_EC[first, 0], layer.copies_EC[second, 0] = other, one
    for scenario in range(len(layer.token_WP)):
        goes, comes = layer.token_WP[scenario, one], layer.token_WP[scenario, other]
        layer.token_WP[scenario, one], layer.token_WP[scenario, other] = comes, goes
        layer.load_WR[scenario, layer.rank_P[one]] += comes - goes
        layer.load_WR[scenario, layer.rank_P[other]] += goes - comes


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
        for scenario in range(len(layer.token_WP)):
            tokens = layer.token_WP[scenario, slot]
            layer.token_WP[scenario, slot] = 0.0
            layer.token_WP[scenario, home] += tokens
            layer.load_WR[scenario, layer.rank_P[slot]] -= tokens
            layer.load_WR[scenario, layer.rank_P[home]] += tokens
    layer.slot_P[slot] = expert
    if expert != EMPTY:
        layer.copies_EC[expert, layer.count_E[expert]] = slot
        layer.count_E[expert] += 1
