"""What an engine's map cannot say of a placement: empty slots are filled on the way out, homes found on the way in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement


def fill_empty_slots(placement: Placement) -> NDArray[np.int32]:
    """int32 [L, P]: the map with each empty slot given a copy of the expert that has fewest copies so far.

    Ties go to the lower id; never an expert that stands on that rank already, if there is another.
    """
    rows = np.array(placement.physical_to_logical)
    counts = np.array(placement.copy_count)
    for layer, slot in np.argwhere(rows == EMPTY):
        rank_start = slot - slot % placement.slots_per_rank
        on_rank = rows[layer, rank_start : rank_start + placement.slots_per_rank]
        cost = counts[layer] + placement.num_slots * np.isin(np.arange(placement.num_experts), on_rank)
        expert = int(np.argmin(cost))
        rows[layer, slot] = expert
        counts[layer, expert] += 1
    return rows


def restore_homes(placement: Placement) -> Placement | None:
    """The same map in the ``home`` layout, or None where it is no such map.

    A map written from the home layout has each rank's homes in its first E/R slots: every expert stands in those slots
    exactly once, and on no rank twice.
    """
    layers, experts, ranks = placement.num_layers, placement.num_experts, placement.num_ranks
    if experts % ranks:
        return None
    by_rank = placement.physical_to_logical.reshape(layers, ranks, -1)
    first = by_rank[:, :, : experts // ranks].reshape(layers, experts)
    order = np.argsort(first, axis=1, kind="stable")
    sorted_ranks = np.sort(by_rank, axis=2)
    if not (np.take_along_axis(first, order, 1) == np.arange(experts)).all():
        return None
    if (sorted_ranks[:, :, 1:] == sorted_ranks[:, :, :-1]).any():
        return None
    homes = experts // ranks
    slot_of_place = (np.arange(experts) // homes) * placement.slots_per_rank + np.arange(experts) % homes
    return Placement(placement.physical_to_logical, experts, ranks, slot_of_place[order], placement.epoch)
