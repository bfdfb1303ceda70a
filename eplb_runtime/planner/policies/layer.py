"""One layer during a search: the expert in each slot, and the split of its tokens over homes and replicas in every
scenario.

Loads are in units of the even rank load: each scenario's tokens add up to R (to the sum of speeds, where ranks differ),
so the busiest rank's load is the imbalance. A slow rank carries a virtual load of 1 - speed on top of its tokens.

Shape suffixes: W scenarios, E experts, R ranks, P slots, C replicas of an expert with its home, N nodes.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit
from ..parameters import PARAMETERS

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
SWEEPS = PARAMETERS.sweeps
"""Compiled into what is below."""


class Layer(NamedTuple):
    """The question about one layer, and the state of the search: arrays that change in place."""

    homes: int  # E/R, the first slots of each rank
    per_rank: int  # S
    now_P: IntArray  # the current placement; EMPTY in a replica slot without an expert
    home_E: IntArray  # the rank of each expert's home in it
    virtual_R: FloatArray  # the virtual load of each rank
    source_EN: FloatArray  # the share of each expert's tokens that comes from each node
    crossing_price: float  # imbalance that is worth as much as all tokens crossing nodes; 0: crossing is free
    prices: FloatArray  # imbalance that moving a home, and a replica, must be worth
    load_WE: FloatArray  # the load of each expert
    rank_P: IntArray  # the rank of each slot
    slot_P: IntArray = np.empty(0, dtype=np.int64)  # the expert in each slot, as in ``now_P``
    copies_CE: IntArray = np.empty((0, 0), dtype=np.int64)  # the slots of each expert, its home first
    count_E: IntArray = np.empty(0, dtype=np.int64)  # how many slots hold each expert
    token_PW: FloatArray = np.empty((0, 0))  # what each slot computes
    load_RW: FloatArray = np.empty((0, 0))  # what each rank computes, with its virtual load


def begun(layer: Layer, load_WE: FloatArray) -> Layer:
    """Return the layer with these scenarios and new arrays for a placement and its split, for `worth` to fill."""
    ranks, experts, slots = layer.virtual_R.size, layer.home_E.size, layer.now_P.size
    return layer._replace(
        load_WE=load_WE,
        slot_P=np.empty(slots, dtype=np.int64),
        copies_CE=np.empty((min(ranks, 1 + slots - experts), experts), dtype=np.int64),
        count_E=np.empty(experts, dtype=np.int64),
        token_PW=np.empty((slots, len(load_WE))),
        load_RW=np.empty((ranks, len(load_WE))),
    )


@jit
def worth(layer: Layer, slot_P: IntArray) -> tuple[float, FloatArray]:
    """Put a placement and its split into the layer, in place. Return its value (`judge`), mean and in each scenario."""
    ranks, scenarios = layer.load_RW.shape
    layer.count_E[:] = 0
    for first, last in ((0, layer.homes), (layer.homes, layer.per_rank)):
        for rank in range(ranks):
            for slot in range(rank * layer.per_rank + first, rank * layer.per_rank + last):
                expert = layer.slot_P[slot] = slot_P[slot]
                if expert == EMPTY:
                    continue
                layer.copies_CE[layer.count_E[expert], expert] = slot
                layer.count_E[expert] += 1
    for scenario in range(scenarios):
        for rank in range(ranks):
            layer.load_RW[rank, scenario] = layer.virtual_R[rank]
        for slot in range(layer.slot_P.size):
            expert, share = layer.slot_P[slot], 0.0
            if expert != EMPTY:
                share = layer.load_WE[scenario, expert] / layer.count_E[expert]
            layer.token_PW[slot, scenario] = share
            layer.load_RW[layer.rank_P[slot], scenario] += share
    fill_to_level(layer, SWEEPS)
    peak_W = np.empty(scenarios)
    return judge(layer, peak_W), peak_W


@jit
def copy_split(token_PW: FloatArray, load_RW: FloatArray, to_token_PW: FloatArray, to_load_RW: FloatArray) -> None:
    """Copy the first two arrays into the last two. (Loops: what copies arrays whole takes seconds to compile.)"""
    for one_XW, to_XW in ((token_PW, to_token_PW), (load_RW, to_load_RW)):
        for row in range(one_XW.shape[0]):
            for scenario in range(one_XW.shape[1]):
                to_XW[row, scenario] = one_XW[row, scenario]


@jit
def fill_to_level(layer: Layer, sweeps: int) -> None:
    """Split the tokens of experts with replicas anew, in place, so that the busiest rank has less: water-filling,
    expert by expert, ``sweeps`` times over all experts. (A call for each of two copies would cost three times the
    arithmetic.)"""
    scenarios, several = layer.load_RW.shape[1], np.flatnonzero(layer.count_E > 1)
    total_W, level_W = np.empty(scenarios), np.empty(scenarios)
    for _ in range(sweeps):
        for expert in several:
            if layer.count_E[expert] > 2:
                _split_in_many(layer, expert, total_W, level_W)
                continue
            one, other = layer.copies_CE[0, expert], layer.copies_CE[1, expert]
            one_W, other_W = layer.token_PW[one], layer.token_PW[other]
            first_W, second_W = layer.load_RW[layer.rank_P[one]], layer.load_RW[layer.rank_P[other]]
            for scenario in range(scenarios):
                total = one_W[scenario] + other_W[scenario]
                without_first = first_W[scenario] - one_W[scenario]
                without_second = second_W[scenario] - other_W[scenario]
                given = min(max(0.5 * (total + without_second - without_first), 0.0), total)
                one_W[scenario], other_W[scenario] = given, total - given
                first_W[scenario], second_W[scenario] = without_first + given, without_second + total - given


@jit
def _split_in_many(layer: Layer, expert: Any, total_W: FloatArray, level_W: FloatArray) -> None:
    """Split an expert's tokens; ``total_W`` and ``level_W`` are room for a number of each scenario."""
    slots, scenarios = layer.copies_CE[: layer.count_E[expert], expert], total_W.size
    total_W[:] = 0.0
    for slot in slots:
        rank = layer.rank_P[slot]
        for scenario in range(scenarios):
            total_W[scenario] += layer.token_PW[slot, scenario]
            layer.load_RW[rank, scenario] -= layer.token_PW[slot, scenario]
    for scenario in range(scenarios):
        level, filled = np.inf, slots.size + 1
        while True:  # ranks above the level take nothing; without them it falls
            under, below = 0, total_W[scenario]
            for slot in slots:
                load = layer.load_RW[layer.rank_P[slot], scenario]
                if load < level:
                    under += 1
                    below += load
            if under >= filled or under == 0:
                break
            level, filled = below / under, under
        level_W[scenario] = level
    for slot in slots:
        rank = layer.rank_P[slot]
        for scenario in range(scenarios):
            tokens = max(level_W[scenario] - layer.load_RW[rank, scenario], 0.0)
            layer.token_PW[slot, scenario] = tokens
            layer.load_RW[rank, scenario] += tokens


@jit
def judge(layer: Layer, peak_W: FloatArray) -> float:
    """Return the mean of ``peak_W``, which this fills: each scenario's imbalance, plus the price of crossing tokens."""
    peak_W[:] = 0.0
    for rank in range(layer.load_RW.shape[0]):
        for scenario in range(peak_W.size):
            peak_W[scenario] = max(peak_W[scenario], layer.load_RW[rank, scenario])
    for scenario in range(peak_W.size if layer.crossing_price > 0.0 else 0):
        peak_W[scenario] += layer.crossing_price * _crossing(layer, scenario)
    return float(peak_W.mean())


@jit
def _crossing(layer: Layer, scenario: int) -> float:
    """Share of the scenario's tokens that are computed on another node than they come from."""
    nodes = layer.source_EN.shape[1]
    per_node = layer.slot_P.size // nodes
    at_home, total, here_N = 0.0, 0.0, np.empty(nodes)
    for expert in range(layer.count_E.size):
        here_N[:] = 0.0
        for slot in layer.copies_CE[: layer.count_E[expert], expert]:
            here_N[slot // per_node] += layer.token_PW[slot, scenario]
        load = layer.load_WE[scenario, expert]
        total += load
        for node in range(nodes):
            at_home += min(here_N[node], load * layer.source_EN[expert, node])
    return 1.0 - at_home / total if total > 0.0 else 0.0


@jit
def swap_homes(layer: Layer, one: int, other: int) -> None:
    """Exchange the experts of two home slots in the layer, in place; their tokens in these slots go along."""
    first, second = layer.slot_P[one], layer.slot_P[other]
    layer.slot_P[one], layer.slot_P[other] = second, first
    layer.copies_CE[0, first], layer.copies_CE[0, second] = other, one
    for scenario in range(layer.token_PW.shape[1]):
        goes, comes = layer.token_PW[one, scenario], layer.token_PW[other, scenario]
        layer.token_PW[one, scenario], layer.token_PW[other, scenario] = comes, goes
        layer.load_RW[layer.rank_P[one], scenario] += comes - goes
        layer.load_RW[layer.rank_P[other], scenario] += goes - comes


@jit
def set_replica(layer: Layer, slot: int, expert: int) -> None:
    """Put an expert, or EMPTY, into a replica slot of the layer, in place. A new replica has no tokens yet; the tokens
    of the replica that was there go to its expert's home."""
    old = layer.slot_P[slot]
    if old != EMPTY:
        home, last = layer.copies_CE[0, old], layer.count_E[old] - 1
        for index in range(1, last + 1):
            if layer.copies_CE[index, old] == slot:
                layer.copies_CE[index, old] = layer.copies_CE[last, old]
                break
        layer.count_E[old] = last
        for scenario in range(layer.token_PW.shape[1]):
            tokens = layer.token_PW[slot, scenario]
            layer.token_PW[slot, scenario] = 0.0
            layer.token_PW[home, scenario] += tokens
            layer.load_RW[layer.rank_P[slot], scenario] -= tokens
            layer.load_RW[layer.rank_P[home], scenario] += tokens
    layer.slot_P[slot] = expert
    if expert != EMPTY:
        layer.copies_CE[layer.count_E[expert], expert] = slot
        layer.count_E[expert] += 1
