"""The best static placement in the free layout: copies anywhere, tokens split evenly over an expert's copies.

Counts first, then packing heaviest first, then descent by swaps on the hottest rank, then kicks out of the local
minimum; it stops when the lower bound is reached. No rank holds an expert twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ...placement import Placement
from ...utils.jit import jit
from ..search.bounds import floor
from ..search.packing import (
    FloatArray,
    IntArray,
    PackedLayer,
    empty_layer,
    improve_by_another_copy,
    improve_by_one_swap,
    improve_by_two_swaps,
    place_heaviest_first,
    recompute,
    replace,
    spread_copies,
    swap,
)
from ..search.pairing import search_counts
from ..search.settle import settle
from ..types import PlanError

if TYPE_CHECKING:
    from ..types import PlanRequest

TOLERANCE = 2e-4
"""A maximum this close above the lower bound, as a share, is as good as the bound."""

KICKS = 14
KICK_SWAPS = 3
WORK = 400_000
"""Slot comparisons after which a layer is not kicked again: keeps plans of large shapes short."""

PAIRING_WORK, PAIRING_WORK_LARGE, LARGE = 640_000, 50_000, 1024
"""Copies looked at in the search over counts; fewer with more slots than ``LARGE``, where the gain is small."""

WANDER = 1.01
"""A kicked layer goes on from where it is until it is this much worse than the best."""


def free(request: PlanRequest) -> Placement:
    """The policy ``free``: ``balance`` of the forecast, settled near the current placement and within the budget."""
    return settle(request, balance(request.forecast, request.topology.num_ranks, request.slots_per_rank))


def balance(load: ArrayLike, num_ranks: int, slots_per_rank: int) -> IntArray:
    """Plan every layer on its own, without regard to any current placement or group.

    Args:
        load: ``[L, E]``, tokens of each expert, finite and not negative.
        num_ranks: R.
        slots_per_rank: S; R x S is at least E, at most R x E.

    Returns:
        int32 ``[L, R * S]``, the expert of each slot.

    Raises:
        PlanError: the slots are fewer than the experts, or more than one of each expert on each rank.
    """
    weight = np.ascontiguousarray(load, dtype=np.float64)
    experts = weight.shape[1]
    if experts > num_ranks * slots_per_rank:
        raise PlanError(f"{num_ranks} ranks x {slots_per_rank} slots cannot hold {experts} experts")
    if slots_per_rank > experts:
        raise PlanError(f"{slots_per_rank} slots per rank for {experts} experts: a rank would hold an expert twice")
    return _balance(weight, num_ranks, slots_per_rank)


@jit
def _balance(weight: FloatArray, num_ranks: int, slots_per_rank: int) -> IntArray:
    result = np.empty((weight.shape[0], num_ranks * slots_per_rank), dtype=np.int32)
    for index in range(weight.shape[0]):
        layer = empty_layer(weight[index], num_ranks, slots_per_rank)
        plan_layer(layer, floor(weight[index], num_ranks, slots_per_rank))
        result[index] = layer.expert.ravel()
    return result


@jit
def plan_layer(layer: PackedLayer, lowest: float) -> None:
    """Place all copies of one layer; in place.

    Args:
        layer: weights are given; the rest is found.
        lowest: no rank can be lighter than this many tokens at its hottest, or need not be: stop there.
    """
    slots_per_rank = layer.expert.shape[1]
    enough = lowest * (1.0 + TOLERANCE)
    spread_copies(layer)
    if slots_per_rank == 2:
        pairing_work = PAIRING_WORK if layer.expert.size <= LARGE else PAIRING_WORK_LARGE
        search_counts(layer, enough, pairing_work // layer.expert.size)
    place_heaviest_first(layer)
    work = descend(layer, enough, WORK)
    if slots_per_rank > 2:
        _kick(layer, enough, work)


@jit
def descend(layer: PackedLayer, enough: float, work: int) -> int:
    """Cool the hottest rank until no move does, or it is cool enough; moves that are dear to look for only while there
    is ``work`` left.

    Returns:
        The work left, in slot comparisons.
    """
    num_ranks, slots = layer.expert.shape
    while True:
        rank = int(np.argmax(layer.load))
        if layer.load[rank] <= enough:
            return work
        work -= num_ranks * slots * slots // 8
        if improve_by_one_swap(layer, rank):
            continue
        if work <= 0:
            return work
        work -= num_ranks * slots * slots * (slots - 1) * (slots - 1) // 32
        if improve_by_two_swaps(layer, rank):
            continue
        work -= max(num_ranks * slots * slots, num_ranks * layer.weight.size // 2)
        if work <= 0 or not improve_by_another_copy(layer, rank):
            return work


@jit
def _kick(layer: PackedLayer, enough: float, work: int) -> None:
    """Iterated local search: a few swaps at random, one of them on the hottest rank, every other time a changed count,
    then descent; the best stays."""
    num_ranks, slots = layer.expert.shape
    best = layer.load.max()
    best_expert = layer.expert.copy()
    best_count = layer.copies.copy()
    random = np.uint64(0x9E3779B97F4A7C15)
    for kick in range(KICKS):
        if best <= enough or work <= 0:
            break
        if kick % 2:
            random = _kick_count(layer, random)
        for number in range(KICK_SWAPS):
            random = _xorshift(random)
            pick = np.int64(random >> np.uint64(24))
            rank = int(np.argmax(layer.load)) if number == 0 else pick % num_ranks
            pick //= num_ranks
            slot = pick % slots
            random = _xorshift(random)
            pick = np.int64(random >> np.uint64(24))
            other_rank = pick % num_ranks
            other_slot = (pick // num_ranks) % slots
            if (
                rank != other_rank
                and not layer.holds[other_rank, layer.expert[rank, slot]]
                and not layer.holds[rank, layer.expert[other_rank, other_slot]]
            ):
                swap(layer, rank, slot, other_rank, other_slot)
        work = descend(layer, enough, work)
        hottest = layer.load.max()
        if hottest < best * (1.0 - 1e-12):
            best = hottest
            best_expert[:] = layer.expert
            best_count[:] = layer.copies
        elif hottest > best * WANDER:
            layer.expert[:] = best_expert
            layer.copies[:] = best_count
            recompute(layer)
    layer.expert[:] = best_expert
    layer.copies[:] = best_count
    recompute(layer)


@jit
def _kick_count(layer: PackedLayer, random: np.uint64) -> np.uint64:
    """Let some copy of an expert with several make room for one of an expert that its rank lacks; returns the next
    state of the generator."""
    num_ranks, slots = layer.expert.shape
    experts = layer.weight.size
    random = _xorshift(random)
    start = np.int64(random >> np.uint64(24))
    first = (start // layer.expert.size) % experts
    for offset in range(layer.expert.size):
        place = (start + offset) % layer.expert.size
        rank, slot = place // slots, place % slots
        giver = layer.expert[rank, slot]
        if layer.copies[giver] < 2:
            continue
        for further in range(experts):
            taker = (first + further) % experts
            if not layer.holds[rank, taker] and layer.copies[taker] < num_ranks:
                replace(layer, rank, slot, int(taker))
                return random
    return random


@jit
def _xorshift(state: np.uint64) -> np.uint64:
    """The next state of Marsaglia's 64-bit xorshift: the same numbers on every machine."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    return state
