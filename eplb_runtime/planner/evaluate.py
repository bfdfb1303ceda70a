"""What a placement makes of a load: rank loads, imbalance, the moves between two placements."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..placement import EMPTY, Placement
from ..routing.tables import SplitTables
from ..routing.water_filling import split_totals
from ..topology import Topology
from .search.bounds import lower_bound
from .types import PlanRequest

UNITS = 2.0**40


def even_split_rank_load(load: NDArray[np.float64], placement: Placement) -> NDArray[np.float64]:
    """float64 ``[L, R]``: tokens per rank when each expert's tokens are spread evenly over its copies.

    Args:
        load: float64 ``[L, E]``.
    """
    share = np.concatenate([load / placement.copy_count, np.zeros((len(load), 1))], axis=1)
    slots = np.where(placement.physical_to_logical == EMPTY, placement.num_experts, placement.physical_to_logical)
    by_slot = np.take_along_axis(share, slots.astype(np.int64), axis=1)
    return np.asarray(by_slot.reshape(len(load), placement.num_ranks, -1).sum(axis=2))


def in_units(load: NDArray[np.float64]) -> NDArray[np.int64]:
    """``load`` ``[L, E]`` in whole units of 2 ** -40 of each layer's total, as the splitter and the search want it."""
    total = load.sum(axis=-1, keepdims=True)
    share = np.divide(load, total, out=np.zeros_like(load), where=total > 0)
    return np.asarray(np.floor(share * UNITS), dtype=np.int64)


def filled_rank_load(load: NDArray[np.float64], tables: SplitTables) -> NDArray[np.float64]:
    """float64 ``[L, R]``: rank loads under water-filling, in units of 2 ** -40 of a layer's total.

    Args:
        load: float64 ``[L, E]``.
    """
    quota_LEC = split_totals(in_units(load), tables)
    layer = np.arange(len(load))[:, None, None] * tables.num_ranks
    flat = layer + np.maximum(tables.rank_LEC, 0)
    filled = np.bincount(flat.ravel(), quota_LEC.ravel(), minlength=len(load) * tables.num_ranks)
    return np.asarray(filled.reshape(len(load), tables.num_ranks), dtype=np.float64)


def imbalance(rank_load: NDArray[np.float64]) -> NDArray[np.float64]:
    """Max / mean over the last axis; 1 where there is no load at all."""
    mean = rank_load.mean(axis=-1)
    return np.asarray(np.where(mean > 0, rank_load.max(axis=-1) / np.where(mean > 0, mean, 1.0), 1.0), dtype=np.float64)


def predicted_imbalance(load: NDArray[np.float64], placement: Placement) -> NDArray[np.float64]:
    """Imbalance of ``placement`` by the split that its layout really uses.

    Args:
        load: float64 ``[L, E]``, or ``[W, L, E]`` for several windows.

    Returns:
        float64 ``[L]`` or ``[W, L]``.
    """
    if load.ndim == 2:
        return np.asarray(predicted_imbalance(load[None], placement)[0])
    if placement.home is None:
        return np.stack([imbalance(even_split_rank_load(window, placement)) for window in load])
    tables = SplitTables.of(placement)
    return np.stack([imbalance(filled_rank_load(window, tables)) for window in load])


def imbalance_by_scenario(request: PlanRequest, placement: Placement) -> NDArray[np.float64]:
    """float64 ``[W + V, L]``: imbalance under each scenario of the load to come, mixes too, each split by itself."""
    return predicted_imbalance(np.concatenate([request.scenarios, request.mixes]), placement)


def expected_imbalance(request: PlanRequest, placement: Placement) -> NDArray[np.float64]:
    """float64 ``[L]``: mean over the scenarios."""
    return np.asarray(imbalance_by_scenario(request, placement).mean(axis=0))


def expected_lower_bound(request: PlanRequest) -> NDArray[np.float64]:
    """float64 ``[L]``: what ``expected_imbalance`` of no placement gets below."""
    windows = np.concatenate([request.scenarios, request.mixes])
    bounds = lower_bound(windows.reshape(-1, request.num_experts), request.topology.num_ranks, request.slots_per_rank)
    return np.asarray(bounds.reshape(windows.shape[:2]).mean(axis=0))


def moves_between(current: Placement | None, placement: Placement, topology: Topology) -> NDArray[np.int32]:
    """int32 ``[M, 5]`` as in ``Plan.moves``: every slot that gets an expert which did not stand in it."""
    new = placement.physical_to_logical
    if current is None:
        layer, slot = np.nonzero(new != EMPTY)
    else:
        layer, slot = np.nonzero((new != current.physical_to_logical) & (new != EMPTY))
    expert = new[layer, slot]
    destination = placement.rank_of(slot)
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
    destination: NDArray[np.integer],
    topology: Topology,
) -> NDArray[np.int64]:
    """The rank to copy from: the destination itself, else one of its node, else the lowest."""
    copies = current.logical_to_physical[layer, expert]
    ranks = current.rank_of(copies)
    far = (ranks // topology.ranks_per_node != (destination // topology.ranks_per_node)[:, None]).astype(np.int64)
    distance = np.where(ranks == destination[:, None], 0, 1 + far)
    distance = np.where(copies < 0, 3, distance) * (current.num_ranks + 1) + ranks
    return np.asarray(np.take_along_axis(ranks, distance.argmin(axis=1)[:, None], axis=1)[:, 0], dtype=np.int64)
