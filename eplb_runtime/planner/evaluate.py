"""Rank loads and imbalance of a placement, what no placement can beat, moves between two, and how far tokens travel.

A batch's tokens go to copies on their own rank first, then on their node, then to the rest (`split_for_rank`). Sources
are counted by node (suffix N); the ranks of a node send alike.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..moe.routing.water_filling import SplitTables, split_totals
from ..placement import EMPTY, Placement
from ..topology import Topology
from .forecast import shares

UNITS = 2.0**40
FloatArray = NDArray[np.float64]
HALVINGS = 24
"""Of the interval in which the hottest copy is found."""


def rank_load(load: FloatArray, placement: Placement, speed_R: FloatArray | None = None) -> FloatArray:
    """Return the tokens of each rank, float64 ``[L, R]`` or ``[W, L, R]``. In the free layout they are split evenly
    over an expert's copies, else by water-filling, window by window. Without replicas numba compiles nothing.

    Args:
        load: float64 ``[L, E]``, or ``[W, L, E]`` for several windows.
        speed_R: float64 ``[R]``, speed of each rank, the fastest 1, for water-filling; None: all alike.
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
    """Return int64 ``[L, E]``: ``load`` in units of 2 ** -40 of each layer's total, rounded down; 0 without load."""
    return np.asarray(np.floor(shares(load) * UNITS), dtype=np.int64)


def has_no_copies(placement: Placement) -> bool:
    """Return whether all replica slots of a placement in the home layout are empty."""
    return bool((placement.replicas_LRK == EMPTY).all())


def imbalance(load: FloatArray, speed_R: FloatArray | None = None) -> FloatArray:
    """Return max / mean over the last axis, the ranks; 1 where there is no load at all. With speeds: the time of the
    rank that takes longest, over that of all ranks if the load were shared out by speed."""
    speed_R = np.ones(load.shape[-1]) if speed_R is None else speed_R
    whole = load.sum(axis=-1) / speed_R.sum()
    slowest = (load / speed_R).max(axis=-1)
    return np.asarray(np.divide(slowest, whole, out=np.ones_like(whole), where=whole > 0))


def predicted_imbalance(load: FloatArray, placement: Placement, speed_R: FloatArray | None = None) -> FloatArray:
    """Return the imbalance of the loads that `rank_load` gives the ranks, float64 ``[L]`` or ``[W, L]``."""
    return imbalance(rank_load(load, placement, speed_R), speed_R)


def lower_bound(load: ArrayLike, num_ranks: int, slots_per_rank: int) -> FloatArray:
    """Return an imbalance (max / mean rank load) that no placement of this shape gets below.

    Args:
        load: ``[L, E]``, tokens of each expert.
        num_ranks: R.
        slots_per_rank: S; R x S slots hold E experts, the rest are copies.

    Returns:
        float64 ``[L]``, at least 1; 1 for a layer without load.
    """
    weight_LE = np.ascontiguousarray(load, dtype=np.float64)
    mean_L = weight_LE.sum(axis=1) / num_ranks
    floor_L = _floor(weight_LE, num_ranks, slots_per_rank)
    return np.asarray(np.where(mean_L > 0, np.maximum(floor_L, mean_L) / np.where(mean_L > 0, mean_L, 1.0), 1.0))


def _floor(weight_LE: FloatArray, num_ranks: int, slots_per_rank: int) -> FloatArray:
    """float64 ``[L]``: tokens that the heaviest rank has at least, whatever the placement.

    Without spare slots this includes the pigeonhole: among the (j - 1) R + 1 heaviest experts some j share a rank, with
    the S - j lightest at best; and the m heaviest experts stand on at most m ranks, whose other slots hold the lightest
    at best: the heaviest of these ranks has at least their mean. With two slots a rank, heaviest with lightest is the
    optimum itself.
    """
    layers, experts = weight_LE.shape
    spare = num_ranks * slots_per_rank - experts
    if spare > 0:
        return _hottest_copy(weight_LE, spare, num_ranks)
    lightest_LE = np.sort(weight_LE, axis=1)
    upto_LN = np.concatenate([np.zeros((layers, 1)), lightest_LE.cumsum(axis=1)], axis=1)
    floor_L = upto_LN[:, -1] / num_ranks
    for shared in range(1, slots_per_rank + 1):
        start = experts - (shared - 1) * num_ranks - 1
        together_L = upto_LN[:, start + shared] - upto_LN[:, start] + upto_LN[:, slots_per_rank - shared]
        floor_L = np.maximum(floor_L, together_L)
    ranks = np.arange(1, num_ranks)
    heaviest_LN = upto_LN[:, -1:] - upto_LN[:, experts - ranks]
    together_LN = (heaviest_LN + upto_LN[:, ranks * (slots_per_rank - 1)]) / ranks
    floor_L = np.maximum(floor_L, together_LN.max(axis=1, initial=0.0))
    if slots_per_rank == 2:
        floor_L = np.maximum(floor_L, (lightest_LE + lightest_LE[:, ::-1]).max(axis=1))
    return np.asarray(floor_L)


def _hottest_copy(weight_LE: FloatArray, spare: int, num_ranks: int) -> FloatArray:
    """float64 ``[L]``: least possible tokens of the hottest copy with ``spare`` copies to give, at most one a rank.

    Found by bisection on the answer: a maximum of x needs ceil(weight / x) copies of each expert.
    """
    heaviest_L, total_L, copies_LE = weight_LE.max(axis=1), weight_LE.sum(axis=1), np.empty_like(weight_LE)
    needed_L = (weight_LE > 0.0).sum(axis=1)
    low_L = np.maximum(heaviest_L / num_ranks, total_L / (spare + weight_LE.shape[1]))  # on all ranks; all alike
    high_L = np.minimum(heaviest_L, total_L / spare)  # weight / x copies beside the first are enough
    for _ in range(HALVINGS):
        middle_L = np.maximum(0.5 * (low_L + high_L), 1e-300)
        extra_L = np.ceil(np.divide(weight_LE, middle_L[:, None], out=copies_LE), out=copies_LE).sum(axis=1) - needed_L
        low_L, high_L = np.where(extra_L <= spare, low_L, middle_L), np.where(extra_L <= spare, middle_L, high_L)
    return np.asarray(low_L)


def moves_between(current: Placement | None, placement: Placement, topology: Topology) -> NDArray[np.int32]:
    """Return int32 ``[M, 5]`` as in ``Plan.moves``, a row for each slot that holds another expert than in ``current``.
    Without ``current`` these are all slots that hold an expert, with source rank -1. Emptied slots have no row."""
    new = placement.physical_to_logical
    layer, slot = np.nonzero((new != EMPTY) & (True if current is None else new != current.physical_to_logical))
    expert, destination = new[layer, slot], placement.rank_of(slot)
    source = np.full(len(slot), -1)
    if current is not None:  # a copy on the destination itself, else one of its node, else on the lowest rank
        slot_MC = current.logical_to_physical[layer, expert]
        rank_MC = current.rank_of(slot_MC[:, :1] if current.home is not None else slot_MC)
        far_MC = rank_MC // topology.ranks_per_node != (destination // topology.ranks_per_node)[:, None]
        distance_MC = np.where(rank_MC == destination[:, None], 0, 1 + far_MC)
        distance_MC = np.where(slot_MC[:, : rank_MC.shape[1]] < 0, 3, distance_MC) * (current.num_ranks + 1) + rank_MC
        source = np.take_along_axis(rank_MC, distance_MC.argmin(axis=1)[:, None], axis=1)[:, 0]
    is_home = np.zeros(len(slot), dtype=bool) if placement.home is None else placement.home[layer, expert] == slot
    return np.stack([layer, expert, source, slot, is_home], axis=1).astype(np.int32)


def received(
    load: FloatArray, placement: Placement, topology: Topology, share_LNE: FloatArray | None = None
) -> FloatArray:
    """Return float64 ``[L, R, 2]``, the tokens that each rank gets from other ranks of its node, and from other nodes.

    Args:
        load: float64 ``[L, E]``.
        share_LNE: as in `types.PlanRequest`; None: tokens come from all nodes alike.
    """
    nodes, node_ranks, ranks = topology.num_nodes, topology.ranks_per_node, topology.num_ranks
    result, slot_LEC = np.empty((len(load), ranks, 2)), placement.logical_to_physical
    if placement.home is None:
        tokens_LEC = np.broadcast_to((load / placement.copy_count)[:, :, None], slot_LEC.shape)
    else:
        quota_LEC = split_totals(in_units(load), SplitTables.of(placement))
        tokens_LEC = quota_LEC * (load.sum(axis=1) / UNITS)[:, None, None]
    for layer, (load_E, slot_EC) in enumerate(zip(load, slot_LEC, strict=True)):
        expert, copy = np.nonzero(slot_EC >= 0)
        computed_ER = np.zeros((len(load_E), ranks))
        np.add.at(computed_ER, (expert, placement.rank_of(slot_EC[expert, copy])), tokens_LEC[layer, expert, copy])
        share_EN = np.full((len(load_E), nodes), 1.0 / nodes) if share_LNE is None else share_LNE[layer].T
        computed_EN = computed_ER.reshape(len(load_E), nodes, node_ranks).sum(axis=2)
        come_EN = load_E[:, None] * share_EN
        far_EN = np.maximum(computed_EN - come_EN, 0.0)
        far_EN = np.divide(far_EN, computed_EN, out=np.zeros_like(far_EN), where=computed_EN > 0)
        far_ER = computed_ER * np.repeat(far_EN, node_ranks, axis=1)
        own_ER = np.minimum(computed_ER, np.repeat(come_EN / node_ranks, node_ranks, axis=1))
        result[layer, :, 0] = np.maximum(computed_ER - far_ER - own_ER, 0.0).sum(axis=0)
        result[layer, :, 1] = far_ER.sum(axis=0)
    return result


def crossing_share(
    load: FloatArray, placement: Placement, topology: Topology, share_LNE: FloatArray | None = None
) -> FloatArray:
    """Return float64 ``[L]``, the share of a layer's tokens that are computed on another node than they come from."""
    total = load.sum(axis=1)
    far = received(load, placement, topology, share_LNE)[:, :, 1].sum(axis=1)
    return np.asarray(np.divide(far, total, out=np.zeros_like(total), where=total > 0))
