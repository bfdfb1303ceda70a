"""Rank loads and imbalance of a placement under a load, the moves between two placements, and what gain is sure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..moe.routing.tables import SplitTables
from ..moe.routing.water_filling import split_totals
from ..placement import EMPTY, Placement
from ..topology import Topology
from .search.bounds import lower_bound
from .types import PlanRequest

UNITS = 2.0**40
SURE, EACH = 2.5, 1.0
"""Errors by which all layers together must gain, and each layer then."""


def even_split_rank_load(load: NDArray[np.float64], placement: Placement) -> NDArray[np.float64]:
    """float64 ``[L, R]``: tokens per rank when each expert's tokens are spread evenly over its copies.

    Args:
        load: float64 ``[L, E]``.
    """
    slots, count_LE = placement.physical_to_logical, placement.copy_count
    share = np.concatenate([load / np.maximum(count_LE, 1), np.zeros((len(load), 1))], axis=1)
    slots = np.where(slots == EMPTY, placement.num_experts, slots)
    by_slot = np.take_along_axis(share, slots.astype(np.int64), axis=1)
    return np.asarray(by_slot.reshape(len(load), placement.num_ranks, -1).sum(axis=2))


def in_units(load: NDArray[np.float64]) -> NDArray[np.int64]:
    """``load`` ``[L, E]`` in whole units of 2 ** -40 of each layer's total, as the splitter and the search want it."""
    total = load.sum(axis=-1, keepdims=True)
    share = np.divide(load, total, out=np.zeros_like(load), where=total > 0)
    return np.asarray(np.floor(share * UNITS), dtype=np.int64)


def filled_rank_load(
    load: NDArray[np.float64], tables: SplitTables, speed_R: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """float64 ``[L, R]``: rank loads under water-filling, in units of 2 ** -40 of a layer's total.

    Args:
        load: float64 ``[L, E]``.
        speed_R: float64 ``[R]``, of each rank, the fastest 1; None: all alike.
    """
    units_LE = in_units(load)
    quota_LEC = split_totals(units_LE, tables, speed_R=speed_R)
    return tables.sum_by_rank(quota_LEC).astype(np.float64)


def has_no_copies(placement: Placement) -> bool:
    """Return whether no replica slot holds an expert (``home`` layout)."""
    return bool((placement.replicas_LRK == EMPTY).all())


def home_rank_load(load: NDArray[np.float64], placement: Placement) -> NDArray[np.float64]:
    """float64 ``[L, R]``: what `filled_rank_load` gives for a placement without copies, by nothing that is compiled.

    Args:
        load: float64 ``[L, E]``.
    """
    homes_LRH = placement.homes_LRH
    units_LH = np.take_along_axis(in_units(load), homes_LRH.reshape(len(load), -1).astype(np.int64), axis=1)
    return np.asarray(units_LH.reshape(homes_LRH.shape).sum(axis=2), dtype=np.float64)


def imbalance(rank_load: NDArray[np.float64], speed_R: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Max / mean over the last axis; 1 where there is no load at all.

    With speeds: the time of the rank that takes longest, over that of all ranks if the load were shared out by speed.
    """
    if speed_R is not None:
        whole = rank_load.sum(axis=-1) / speed_R.sum()
        rank_load = rank_load / speed_R
        return np.asarray(np.where(whole > 0, rank_load.max(axis=-1) / np.where(whole > 0, whole, 1.0), 1.0))
    mean = rank_load.mean(axis=-1)
    return np.asarray(np.where(mean > 0, rank_load.max(axis=-1) / np.where(mean > 0, mean, 1.0), 1.0), dtype=np.float64)


def predicted_imbalance(
    load: NDArray[np.float64], placement: Placement, speed_R: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Imbalance of ``placement`` by the split that its layout really uses.

    Args:
        load: float64 ``[L, E]``, or ``[W, L, E]`` for several windows.
        speed_R: float64 ``[R]``, of each rank, the fastest 1; None: all alike.

    Returns:
        float64 ``[L]`` or ``[W, L]``.
    """
    if load.ndim == 2:
        return np.asarray(predicted_imbalance(load[None], placement, speed_R)[0])
    if placement.home is None:
        return np.stack([imbalance(even_split_rank_load(window, placement), speed_R) for window in load])
    if has_no_copies(placement):
        return np.stack([imbalance(home_rank_load(window, placement), speed_R) for window in load])
    tables = SplitTables.of(placement)
    return np.stack([imbalance(filled_rank_load(window, tables, speed_R), speed_R) for window in load])


def expected_lower_bound(request: PlanRequest) -> NDArray[np.float64]:
    """float64 ``[L]``: mean over the scenarios, what no placement gets below.

    A rank below full speed takes no less time than a fast one would: so what holds for equal ranks holds here, against
    the time that all ranks together need.
    """
    ranks, speed_R, windows = request.topology.num_ranks, request.speed_R, request.to_come.windows
    bounds = lower_bound(windows.reshape(-1, request.num_experts), ranks, request.slots_per_rank)
    if speed_R is not None:
        bounds = np.maximum(bounds * speed_R.sum() / ranks, 1.0)
    return np.asarray(bounds.reshape(windows.shape[:2]).mean(axis=0))


def error_of(gain_W: NDArray[np.float64]) -> float:
    """Return the standard error of a mean over windows, larger where they are few: `SURE` of them is as rare as of a
    normal distribution (the expansion of Student's t in 1 / degrees of freedom, Abramowitz and Stegun 26.7.5)."""
    free, square = len(gain_W) - 1, SURE**2
    few = 1.0 + (square + 1.0) / (4.0 * free) + (5.0 * square**2 + 16.0 * square + 3.0) / (96.0 * free**2)
    return max(few * float(gain_W.std(ddof=1)) / float(np.sqrt(len(gain_W))), 1e-12)


def error_of_one(load_E: NDArray[np.float64], ranks: int) -> float:
    """Return the error of a gain that one window shows, where its tokens went to experts by chance: `SURE` of them is
    what the busiest of all ranks has by chance, and `SURE` deviations of a rank."""
    return float(np.sqrt(ranks / load_E.sum()) * (1.0 + np.sqrt(2.0 * np.log(ranks)) / SURE))


def surely_gains(gain_L: NDArray[np.float64], error_L: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return the layers that surely gain: by `EACH` errors where all together are sure, and else alone. Of many layers
    some gain much by chance, so that one alone must gain by more."""
    doubted_L = error_L > 0
    together = gain_L[doubted_L].sum() > SURE * np.sqrt((error_L[doubted_L] ** 2).sum())
    alone = np.sqrt(SURE**2 + 2.0 * np.log(max(doubted_L.sum(), 1)))
    return np.asarray(gain_L > (EACH if together else alone) * error_L)


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
    nearest = np.take_along_axis(ranks, distance.argmin(axis=1)[:, None], axis=1)
    return np.asarray(nearest[:, 0], dtype=np.int64)
