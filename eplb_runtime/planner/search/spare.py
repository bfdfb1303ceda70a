"""Two ways to use replica slots that the mean load does not need, so that a batch which strays from it is absorbed.

A split can only move tokens between ranks that share an expert: more, and better placed, copies leave it more ways.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ...placement import EMPTY, Placement

CHORDS = (1, 8, 3, 5)
"""How many ranks before its own a rank takes an expert from, for its first, second, ... replica slot."""


def fill_with_hottest(placement: Placement, load: NDArray[np.float64]) -> Placement:
    """Give each empty replica slot the expert with most load per copy that does not stand on its rank.

    The copy counts are those of DeepSeek's EPLB (hottest copy first), beside the copies that stand already.

    Args:
        placement: home layout.
        load: float64 ``[L, E]``.
    """
    return _filled(placement, load, chords=False)


def fill_with_chords(placement: Placement, load: NDArray[np.float64]) -> Placement:
    """Give each empty replica slot the heaviest home of the rank 1, 8, 3 or 5 before its own: all are connected."""
    return _filled(placement, load, chords=True)


def _filled(placement: Placement, load: NDArray[np.float64], chords: bool) -> Placement:
    slots = placement.physical_to_logical.reshape(placement.num_layers, placement.num_ranks, -1).copy()
    for layer in range(placement.num_layers):
        copies = placement.copy_count[layer].copy()
        _fill(np.ascontiguousarray(load[layer]), slots[layer], placement.homes_per_rank, chords, CHORDS, copies)
    return Placement(
        slots.reshape(placement.num_layers, -1),
        placement.num_experts,
        placement.num_ranks,
        placement.home,
        placement.epoch,
    )


@njit(nogil=True, cache=True)
def _fill(
    load_E: NDArray[np.float64],
    slot_RS: NDArray[np.int32],
    homes: int,
    chords: bool,
    steps: tuple[int, ...],
    copies_E: NDArray[np.int32],
) -> None:
    """Fill ``slot_RS`` in place, first slots of all ranks first; ties go to the lower expert."""
    ranks, slots = slot_RS.shape
    for slot in range(homes, slots):
        for rank in range(ranks):
            if slot_RS[rank, slot] != EMPTY:
                continue
            source = (rank - steps[(slot - homes) % len(steps)]) % ranks
            best, best_load = EMPTY, 0.0
            for index in range(homes if chords else load_E.size):
                expert = slot_RS[source, index] if chords else index
                heavy = load_E[expert] / copies_E[expert]
                if heavy > best_load or (heavy == best_load and best != EMPTY and expert < best):
                    stands = False
                    for other in range(slots):
                        stands = stands or slot_RS[rank, other] == expert
                    if not stands:
                        best, best_load = expert, heavy
            if best != EMPTY:
                slot_RS[rank, slot] = best
                copies_E[best] += 1
