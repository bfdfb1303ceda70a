"""Packing experts' copies onto ranks: the compiled moves that the free and hierarchical policies are built from.

Everything here works on one layer in one ``PackedLayer`` of arrays, splits an expert's tokens evenly over its copies,
and is deterministic: ties go to the lower id, and "random" kicks come from a fixed integer generator. What to try, and
how long, is decided in ``free.py``; how many copies of each expert is searched for in ``pairing.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...utils.jit import jit

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]

STRICTLY = 1.0 - 1e-9
"""A move must lower the load by more than rounding could; else descents could go round in circles."""


class PackedLayer(NamedTuple):
    """One layer's packing of E experts on R ranks of S slots. Its arrays change in place."""

    weight: FloatArray
    """``[E]`` tokens of each expert."""
    copies: IntArray
    """``[E]`` copies of each expert."""
    unit: FloatArray
    """``[E]`` tokens of one copy: weight / copies."""
    expert: IntArray
    """``[R, S]`` the expert in each slot."""
    load: FloatArray
    """``[R]`` tokens of each rank."""
    holds: BoolArray
    """``[R, E]`` whether a rank holds an expert."""


@jit
def empty_layer(weight: FloatArray, num_ranks: int, slots_per_rank: int) -> PackedLayer:
    """A layer with one copy of each expert and nothing placed yet."""
    experts = weight.size
    return PackedLayer(
        weight,
        np.ones(experts, dtype=np.int32),
        weight.copy(),
        np.full((num_ranks, slots_per_rank), -1, dtype=np.int32),
        np.zeros(num_ranks),
        np.zeros((num_ranks, experts), dtype=np.bool_),
    )


@jit
def spread_copies(layer: PackedLayer) -> None:
    """Give each spare slot to the expert with the hottest copies, at most one copy a rank: the least possible maximum.

    A greedy choice is optimal here: the t-th spare slot must go to the hottest copy or the maximum stays (the same
    argument as for apportionment by highest averages).
    """
    num_ranks, slots_per_rank = layer.expert.shape
    key = np.where(layer.copies < num_ranks, layer.weight / layer.copies, -1.0)
    for _ in range(num_ranks * slots_per_rank - layer.copies.sum()):
        expert = int(np.argmax(key))
        layer.copies[expert] += 1
        key[expert] = layer.weight[expert] / layer.copies[expert] if layer.copies[expert] < num_ranks else -1.0
    layer.unit[:] = layer.weight / layer.copies


@jit
def place_heaviest_first(layer: PackedLayer) -> None:
    """Place every copy, heaviest first, on the lightest rank that has room and does not hold its expert.

    If the last free slots are all on ranks that hold the expert already, it changes places with a copy elsewhere, where
    that hurts least.
    """
    num_ranks, slots_per_rank = layer.expert.shape
    layer.load[:] = 0.0
    layer.holds[:] = False
    filled = np.zeros(num_ranks, dtype=np.int32)
    for expert in np.argsort(-layer.unit, kind="mergesort"):
        for _ in range(layer.copies[expert]):
            best = -1
            for rank in range(num_ranks):
                is_open = filled[rank] < slots_per_rank and not layer.holds[rank, expert]
                if is_open and (best < 0 or layer.load[rank] < layer.load[best]):
                    best = rank
            if best < 0:
                _place_by_exchange(layer, filled, int(expert))
                continue
            layer.expert[best, filled[best]] = expert
            filled[best] += 1
            layer.load[best] += layer.unit[expert]
            layer.holds[best, expert] = True


@jit
def _place_by_exchange(layer: PackedLayer, filled: IntArray, expert: int) -> None:
    """Put ``expert`` in the place of some copy that can go to a rank with room. Such a copy exists: a full rank
    without ``expert`` holds more experts than a rank with room, so one that the latter lacks."""
    num_ranks, slots_per_rank = layer.expert.shape
    open_rank = -1
    for rank in range(num_ranks):
        if filled[rank] < slots_per_rank and (open_rank < 0 or layer.load[rank] < layer.load[open_rank]):
            open_rank = rank
    best = np.inf
    best_rank = -1
    best_slot = -1
    for rank in range(num_ranks):
        if layer.holds[rank, expert]:
            continue
        for slot in range(filled[rank]):
            other = layer.expert[rank, slot]
            if not layer.holds[open_rank, other]:
                change = layer.unit[expert] - layer.unit[other]
                worse = max(layer.load[rank] + change, layer.load[open_rank] + layer.unit[other])
                if worse < best:
                    best, best_rank, best_slot = worse, rank, slot
    other = layer.expert[best_rank, best_slot]
    layer.expert[best_rank, best_slot] = expert
    layer.holds[best_rank, other] = False
    layer.holds[best_rank, expert] = True
    layer.load[best_rank] += layer.unit[expert] - layer.unit[other]
    layer.expert[open_rank, filled[open_rank]] = other
    layer.holds[open_rank, other] = True
    layer.load[open_rank] += layer.unit[other]
    filled[open_rank] += 1


@jit
def swap(layer: PackedLayer, rank: int, slot: int, other_rank: int, other_slot: int) -> None:
    """Let two slots of different ranks change contents."""
    one = layer.expert[rank, slot]
    other = layer.expert[other_rank, other_slot]
    layer.expert[rank, slot] = other
    layer.expert[other_rank, other_slot] = one
    layer.holds[rank, one] = False
    layer.holds[rank, other] = True
    layer.holds[other_rank, other] = False
    layer.holds[other_rank, one] = True
    change = layer.unit[one] - layer.unit[other]
    layer.load[rank] -= change
    layer.load[other_rank] += change


@jit
def improve_by_one_swap(layer: PackedLayer, rank: int) -> bool:
    """Make the one swap with another rank after which the hotter of the two is coolest, if that is cooler than now."""
    num_ranks, slots = layer.expert.shape
    here = layer.load[rank]
    best = here * STRICTLY
    best_slot = best_rank = best_other = -1
    for other_rank in range(num_ranks):
        there = layer.load[other_rank]
        if other_rank == rank or (here + there) * 0.5 >= best:
            continue
        low = here - best
        high = best - there
        for slot in range(slots):
            expert = layer.expert[rank, slot]
            if layer.holds[other_rank, expert]:
                continue
            unit = layer.unit[expert]
            for other in range(slots):
                change = unit - layer.unit[layer.expert[other_rank, other]]
                if low < change < high and not layer.holds[rank, layer.expert[other_rank, other]]:
                    best = max(here - change, there + change)
                    best_slot, best_rank, best_other = slot, other_rank, other
                    low = here - best
                    high = best - there
    if best_rank < 0:
        return False
    swap(layer, rank, best_slot, best_rank, best_other)
    return True


@jit
def improve_by_two_swaps(layer: PackedLayer, rank: int) -> bool:
    """As ``improve_by_one_swap``, with two copies of each of the two ranks at once."""
    num_ranks, slots = layer.expert.shape
    here = layer.load[rank]
    best = here * STRICTLY
    best_first = best_second = best_rank = best_other = best_another = -1
    for other_rank in range(num_ranks):
        there = layer.load[other_rank]
        if other_rank == rank or (here + there) * 0.5 >= best:
            continue
        low = here - best
        high = best - there
        for first in range(slots):
            if layer.holds[other_rank, layer.expert[rank, first]]:
                continue
            for second in range(first):
                if layer.holds[other_rank, layer.expert[rank, second]]:
                    continue
                unit = layer.unit[layer.expert[rank, first]] + layer.unit[layer.expert[rank, second]]
                for other in range(slots):
                    part = unit - layer.unit[layer.expert[other_rank, other]]
                    if part <= low or layer.holds[rank, layer.expert[other_rank, other]]:
                        continue
                    for another in range(other):
                        change = part - layer.unit[layer.expert[other_rank, another]]
                        if low < change < high and not layer.holds[rank, layer.expert[other_rank, another]]:
                            best = max(here - change, there + change)
                            best_first, best_second, best_rank = first, second, other_rank
                            best_other, best_another = other, another
                            low = here - best
                            high = best - there
    if best_rank < 0:
        return False
    swap(layer, rank, best_first, best_rank, best_other)
    swap(layer, rank, best_second, best_rank, best_another)
    return True


@jit
def replace(layer: PackedLayer, rank: int, slot: int, expert: int) -> None:
    """Put a further copy of ``expert`` where a copy of another expert stands."""
    other = layer.expert[rank, slot]
    unit = layer.weight[expert] / (layer.copies[expert] + 1)
    other_unit = layer.weight[other] / (layer.copies[other] - 1)
    layer.load[rank] -= layer.unit[other]
    layer.holds[rank, other] = False
    for holder in range(layer.load.size):
        if layer.holds[holder, expert]:
            layer.load[holder] += unit - layer.unit[expert]
        if layer.holds[holder, other]:
            layer.load[holder] += other_unit - layer.unit[other]
    layer.load[rank] += unit
    layer.holds[rank, expert] = True
    layer.expert[rank, slot] = expert
    layer.copies[expert] += 1
    layer.copies[other] -= 1
    layer.unit[expert] = unit
    layer.unit[other] = other_unit


@jit
def recompute(layer: PackedLayer) -> None:
    """Derive units, loads and holders anew from the slots and the counts."""
    layer.unit[:] = layer.weight / layer.copies
    layer.holds[:] = False
    layer.load[:] = 0.0
    for rank in range(layer.expert.shape[0]):
        for slot in range(layer.expert.shape[1]):
            expert = layer.expert[rank, slot]
            layer.holds[rank, expert] = True
            layer.load[rank] += layer.unit[expert]
