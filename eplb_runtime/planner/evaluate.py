"""Rank loads and imbalance of a placement under a load, and the moves between two placements."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..moe.routing.tables import SplitTables
from ..moe.routing.water_filling import split_totals
from ..placement import EMPTY, Placement
from ..topology import Topology
from .forecast import shares

UNITS = 2.0**40
FloatArray = NDArray[np.float64]


def rank_load(load: FloatArray, placement: Placement, speed_R: FloatArray | None = None) -> FloatArray:
    """float64 ``[L, R]`` or ``[W, L, R]``: tokens of each rank by the split that the layout really uses: evenly over an
    expert's copies in the free layout, else by water-filling, window by window. Without copies nothing is compiled.

    Args:
        load: float64 ``[L, E]``, or ``[W, L, E]`` for several windows.
        speed_R: float64 ``[R]``, of each rank, the fastest 1; None: all alike.
    """
    windows = load.reshape(-1, *load.shape[-2:])
    if placement.home is None or has_no_copies(placement):
        slots = np.where(placement.physical_to_logical == EMPTY, placement.num_experts, placement.physical_to_logical)
        share = windows / np.maximum(placement.copy_count, 1)
        share = np.concatenate([share, np.zeros((*share.shape[:2], 1))], axis=2)
        by_slot = np.take_along_axis(share, slots[None].astype(np.int64), axis=2)
        loads = by_slot.reshape(*share.shape[:2], placement.num_ranks, -1).sum(axis=3)
    else:
        tables = SplitTables.of(placement)
        units = np.stack([tables.sum_by_rank(split_totals(in_units(one), tables, speed_R=speed_R)) for one in windows])
        total, all_units = windows.sum(axis=2, keepdims=True), units.sum(axis=2, keepdims=True)
        loads = np.divide(units * total, all_units, out=np.zeros(units.shape), where=all_units > 0)
    return np.asarray(loads.reshape(*load.shape[:-1], placement.num_ranks))


def in_units(load: FloatArray) -> NDArray[np.int64]:
    """``load`` ``[L, E]`` in whole units of 2 ** -40 of each layer's total, as the splitter and the search want it."""
    return np.asarray(np.floor(shares(load) * UNITS), dtype=np.int64)


def has_no_copies(placement: Placement) -> bool:
    """Return whether no replica slot holds an expert (``home`` layout)."""
    return bool((placement.replicas_LRK == EMPTY).all())


def imbalance(load: FloatArray, speed_R: FloatArray | None = None) -> FloatArray:
    """Max / mean over the last axis; 1 where there is no load at all.

    With speeds: the time of the rank that takes longest, over that of all ranks if the load were shared out by speed.
    """
    speed_R = np.ones(load.shape[-1]) if speed_R is None else speed_R
    whole = load.sum(axis=-1) / speed_R.sum()
    slowest = (load / speed_R).max(axis=-1)
    return np.asarray(np.divide(slowest, whole, out=np.ones_like(whole), where=whole > 0))


def predicted_imbalance(load: FloatArray, placement: Placement, speed_R: FloatArray | None = None) -> FloatArray:
    """Imbalance by `rank_load`, float64 ``[L]`` or ``[W, L]``."""
    return imbalance(rank_load(load, placement, speed_R), speed_R)


def moves_between(current: Placement | None, placement: Placement, topology: Topology) -> NDArray[np.int32]:
    """int32 ``[M, 5]`` as in ``Plan.moves``: every slot that gets an expert which did not stand in it."""
    new = placement.physical_to_logical
    layer, slot = np.nonzero((new != EMPTY) & (True if current is None else new != current.physical_to_logical))
    expert, destination = new[layer, slot], placement.rank_of(slot)
    if current is None:
        source = np.full(len(slot), -1)
    elif current.home is not None:
        source = current.home_rank[layer, expert]
    else:
        source = _nearest_copy(current, layer, expert, destination, topology)
    is_home = np.zeros(len(slot), dtype=bool) if placement.home is None else placement.home[layer, expert] == slot
    return np.stack([layer, expert, source, slot, is_home], axis=1).astype(np.int32)


def _nearest_copy(
    current: Placement,
    layer: NDArray[np.int64],
    expert: NDArray[np.int32],
    destination: NDArray[np.integer],
    topology: Topology,
) -> NDArray[np.int64]:
    """The rank to copy from: the destination itself, else one of its node, else the lowest."""
    copies = current.logical_to_physical[layer, expert]
    ranks = current.rank_of(copies)
    far = (ranks // topology.ranks_per_node != (destination // topology.ranks_per_node)[:, None]).astype(np.int64)
    distance = np.where(ranks == destination[:, None], 0, 1 + far)
    distance = np.where(copies < 0, 3, distance) * (current.num_ranks + 1) + ranks
    nearest = np.take_along_axis(ranks, distance.argmin(axis=1)[:, None], axis=1)
    return np.asarray(nearest[:, 0], dtype=np.int64)
