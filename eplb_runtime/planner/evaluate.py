"""What a placement makes of a load: rank loads, imbalance, the moves between two placements."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..placement import EMPTY, Placement
from ..topology import Topology


def even_split_rank_load(load: NDArray[np.float64], placement: Placement) -> NDArray[np.float64]:
    """float64 ``[L, R]``: tokens per rank when each expert's tokens are spread evenly over its copies.

    Args:
        load: float64 ``[L, E]``.
    """
    share = np.concatenate([load / placement.copy_count, np.zeros((len(load), 1))], axis=1)
    slots = np.where(placement.physical_to_logical == EMPTY, placement.num_experts, placement.physical_to_logical)
    by_slot = np.take_along_axis(share, slots.astype(np.int64), axis=1)
    return np.asarray(by_slot.reshape(len(load), placement.num_ranks, -1).sum(axis=2))


def imbalance(rank_load: NDArray[np.float64]) -> NDArray[np.float64]:
    """Max / mean over the last axis; 1 where there is no load at all."""
    mean = rank_load.mean(axis=-1)
    return np.where(mean > 0, rank_load.max(axis=-1) / np.where(mean > 0, mean, 1.0), 1.0)


def predicted_imbalance(load: NDArray[np.float64], placement: Placement) -> NDArray[np.float64]:
    """float64 ``[L]``: imbalance of ``placement`` under ``load`` ``[L, E]``, by the split its layout really uses."""
    return imbalance(even_split_rank_load(load, placement))


def moves_between(current: Placement | None, placement: Placement, topology: Topology) -> NDArray[np.int32]:
    """int32 ``[M, 5]`` as in ``Plan.moves``: every slot that gets an expert which did not stand in it."""
    new = placement.physical_to_logical
    if current is None:
        layer, slot = np.nonzero(new != EMPTY)
    else:
        layer, slot = np.nonzero((new != current.physical_to_logical) & (new != EMPTY))
    expert = new[layer, slot]
    destination = slot // placement.slots_per_rank
    if current is None:
        source = np.full(len(slot), -1)
    elif current.home is not None:
        source = current.home_rank[layer, expert]
    else:
        source = _nearest_copy(current, layer, expert, destination, topology)
    is_home = np.zeros(len(slot), dtype=bool)
    if placement.home is not None:
        is_home |= placement.home[layer, expert] == slot
    return np.stack([layer, expert, source, slot, is_home], axis=1).astype(np.int32)


def _nearest_copy(
    current: Placement,
    layer: NDArray[np.int64],
    expert: NDArray[np.int32],
    destination: NDArray[np.int64],
    topology: Topology,
) -> NDArray[np.int64]:
    """The rank to copy from: the destination itself, else one of its node, else the lowest."""
    copies = current.logical_to_physical[layer, expert]
    ranks = copies // current.slots_per_rank
    far = (ranks // topology.ranks_per_node != (destination // topology.ranks_per_node)[:, None]).astype(np.int64)
    distance = np.where(ranks == destination[:, None], 0, 1 + far)
    distance = np.where(copies < 0, 3, distance) * (current.num_ranks + 1) + ranks
    return np.asarray(np.take_along_axis(ranks, distance.argmin(axis=1)[:, None], axis=1)[:, 0], dtype=np.int64)
