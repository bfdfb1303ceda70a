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

    Locked experts keep their counts. A greedy choice is optimal here: the t-th spare slot must go to the hottest copy
    or the maximum stays (the same argument as for apportionment by highest averages).
    """
    experts = layer.weight.size
    num_ranks, slots_per_rank = layer.expert.shape
    spare = num_ranks * slots_per_rank - layer.copies.sum()
    layer.unit[:] = layer.weight / layer.copies
    key = layer.unit.copy()
    for expert in range(experts):
        if layer.copies[expert] >= num_ranks:
            key[expert] = -1.0
    heap = np.argsort(-key, kind="mergesort")  # sorted: a heap already
    while spare > 0:
        expert = heap[0]
        spare -= 1
        layer.copies[expert] += 1
        layer.unit[expert] = layer.weight[expert] / layer.copies[expert]
        key[expert] = layer.unit[expert] if layer.copies[expert] < num_ranks else -1.0
        node = 0
        while True:
            child = 2 * node + 1
            if child >= experts:
                break
            if child + 1 < experts and _hotter(key, heap[child + 1], heap[child]):
                child += 1
            if not _hotter(key, heap[child], expert):
                break
            heap[node] = heap[child]
            node = child
        heap[node] = expert


@jit
def _hotter(key: FloatArray, one: int, other: int) -> bool:
    return bool(key[one] > key[other] or (key[one] == key[other] and one < other))


@jit
def _lighter(load: FloatArray, one: int, other: int) -> bool:
    return bool(load[one] < load[other] or (load[one] == load[other] and one < other))


@jit
def _sift_down(heap: NDArray[np.int64], size: int, load: FloatArray, rank: int) -> None:
    node = 0
    while True:
        child = 2 * node + 1
        if child >= size:
            break
        if child + 1 < size and _lighter(load, heap[child + 1], heap[child]):
            child += 1
        if not _lighter(load, heap[child], rank):
            break
        heap[node] = heap[child]
        node = child
    heap[node] = rank


@jit
def _sift_up(heap: NDArray[np.int64], size: int, load: FloatArray, rank: int) -> None:
    node = size
    while node > 0:
        parent = (node - 1) // 2
        if not _lighter(load, rank, heap[parent]):
            break
        heap[node] = heap[parent]
        node = parent
    heap[node] = rank


@jit
def place_heaviest_first(layer: PackedLayer) -> None:
    """Place every copy, heaviest first, on the lightest rank that has room and does not hold its expert.

    With two slots a rank this pairs the heaviest with the lightest copies, which is optimal for given counts as long
    as no pair is of one expert. If the last free slots are all on ranks that hold the expert already, it changes
    places with a copy elsewhere, where that hurts least.
    """
    num_ranks, slots_per_rank = layer.expert.shape
    layer.load[:] = 0.0
    layer.holds[:] = False
    filled = np.zeros(num_ranks, dtype=np.int32)
    heap = np.arange(num_ranks)
    size = num_ranks
    taken = np.empty(num_ranks, dtype=np.int64)
    for expert in np.argsort(-layer.unit, kind="mergesort"):
        num_taken = 0
        for _ in range(layer.copies[expert]):
            if size == 0:
                _place_by_exchange(layer, filled, int(expert))
                continue
            rank = heap[0]
            size -= 1
            if size > 0:
                _sift_down(heap, size, layer.load, int(heap[size]))
            layer.expert[rank, filled[rank]] = expert
            filled[rank] += 1
            layer.load[rank] += layer.unit[expert]
            layer.holds[rank, expert] = True
            taken[num_taken] = rank
            num_taken += 1
        for index in range(num_taken):
            rank = taken[index]
            if filled[rank] < slots_per_rank:
                _sift_up(heap, size, layer.load, rank)
                size += 1


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
def improve_by_another_copy(layer: PackedLayer, rank: int) -> bool:
    """Give an expert of ``rank`` one more copy, in the slot of an expert elsewhere that has copies to spare."""
    num_ranks, slots = layer.expert.shape
    best = layer.load[rank] * STRICTLY
    best_expert = best_rank = best_slot = -1
    for own_slot in range(slots):
        expert = layer.expert[rank, own_slot]
        if layer.copies[expert] >= num_ranks:
            continue
        unit = layer.weight[expert] / (layer.copies[expert] + 1)
        relief = layer.unit[expert] - unit
        for other_rank in range(num_ranks):
            if other_rank == rank or layer.holds[other_rank, expert]:
                continue
            for slot in range(slots):
                other = layer.expert[other_rank, slot]
                if layer.copies[other] < 2:
                    continue
                worst = layer.load[other_rank] + unit - layer.unit[other]
                if worst >= best:
                    continue
                burden = layer.weight[other] / (layer.copies[other] - 1) - layer.unit[other]
                for holder in range(num_ranks):
                    if holder != other_rank and (holder == rank or layer.holds[holder, other]):
                        load = layer.load[holder]
                        if layer.holds[holder, other]:
                            load += burden
                        if layer.holds[holder, expert]:
                            load -= relief
                        if load > worst:
                            worst = load
                            if worst >= best:
                                break
                if worst < best:
                    best, best_expert, best_rank, best_slot = worst, expert, other_rank, slot
    if best_rank < 0:
        return False
    replace(layer, best_rank, best_slot, best_expert)
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
