"""From a static plan in the free layout to one that is near the current placement and within the budget of moves.

Ranks are equal, so the plan's ranks are renamed to the current ranks they share most experts with; experts that stay on
a rank stay in their slot; layers that gain nothing stay as they are; and if the budget is short, the layers that gain
most per moved slot go first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...placement import Placement
from ...utils.jit import jit
from ..evaluate import predicted_imbalance
from .packing import FloatArray, IntArray

if TYPE_CHECKING:
    from ..types import PlanRequest


def settle(request: PlanRequest, planned: IntArray, *, keep_nodes: bool = False) -> Placement:
    """The placement to propose for ``planned``, int32 ``[L, P]``, which has no empty slots.

    Args:
        keep_nodes: ranks that share a node in the plan must go on sharing one (the group rule).
    """
    experts, num_ranks = request.num_experts, request.topology.num_ranks
    current = request.current
    if current is None:
        return Placement(planned, experts, num_ranks)
    node_ranks = request.topology.ranks_per_node if keep_nodes else num_ranks
    slots = np.empty_like(planned)
    moved = np.empty(len(planned), dtype=np.int64)
    _align(current.physical_to_logical, planned, experts, num_ranks, node_ranks, slots, moved)
    gain = predicted_imbalance(request.forecast, current) - predicted_imbalance(
        request.forecast, Placement(slots, experts, num_ranks)
    )
    keep = gain <= 0
    budget = _budget(request)
    if budget is not None:
        rate = gain / np.maximum(moved, 1)
        for layer in np.lexsort((np.arange(len(rate)), -rate)):
            if keep[layer] or moved[layer] > budget:
                keep[layer] = True
            else:
                budget -= int(moved[layer])
    slots[keep] = current.physical_to_logical[keep]
    return Placement(slots, experts, num_ranks, epoch=current.epoch)


def _budget(request: PlanRequest) -> int | None:
    """Slots that may get an expert which their rank did not hold."""
    limits = [] if request.max_moves is None else [request.max_moves]
    if request.max_bytes is not None and request.replica_bytes:
        limits.append(request.max_bytes // request.replica_bytes)
    return min(limits, default=None)


@jit
def _align(
    current: IntArray,
    planned: IntArray,
    experts: int,
    num_ranks: int,
    node_ranks: int,
    slots: IntArray,
    moved: NDArray[np.int64],
) -> None:
    """Rename the planned ranks and put experts that stay into their slots.

    Args:
        node_ranks: ranks that are renamed as one block, and then within it.
        slots: out, int32 ``[L, P]``.
        moved: out, int64 ``[L]``, slots whose rank did not hold their expert.
    """
    per_rank = planned.shape[1] // num_ranks
    num_nodes = num_ranks // node_ranks
    for layer in range(len(planned)):
        shared = _shared_experts(current[layer], planned[layer], experts, num_ranks)
        by_node = np.zeros((num_nodes, num_nodes))
        for rank in range(num_ranks):
            for other in range(num_ranks):
                by_node[rank // node_ranks, other // node_ranks] += shared[rank, other]
        node_name = _match(by_node)
        moved[layer] = planned.shape[1]
        for node in range(num_nodes):
            first = node * node_ranks
            other_first = node_name[node] * node_ranks
            inside = shared[first : first + node_ranks, other_first : other_first + node_ranks]
            names = _match(np.ascontiguousarray(inside))
            for index in range(node_ranks):
                start = (other_first + names[index]) * per_rank
                source = (first + index) * per_rank
                moved[layer] -= _seat(
                    current[layer, start : start + per_rank],
                    planned[layer, source : source + per_rank],
                    slots[layer, start : start + per_rank],
                )


@jit
def _shared_experts(current: IntArray, planned: IntArray, experts: int, num_ranks: int) -> FloatArray:
    """float64 ``[R, R]``: how many slots of a planned rank (row) hold what a current rank (column) holds."""
    per_rank = planned.size // num_ranks
    order = np.argsort(current, kind="mergesort")
    first = np.searchsorted(current[order], np.arange(experts + 1))
    shared = np.zeros((num_ranks, num_ranks))
    for slot in range(planned.size):
        last = -1
        for index in range(first[planned[slot]], first[planned[slot] + 1]):
            holder = order[index] // per_rank
            if holder != last:
                shared[slot // per_rank, holder] += 1
            last = holder
    return shared


@jit
def _match(worth: FloatArray) -> IntArray:
    """For each row a column of its own: dearest pairs first, then exchanges between two rows while one gains."""
    size = len(worth)
    name, is_free = np.full(size, -1, dtype=np.int32), np.ones(size, dtype=np.bool_)
    pairs = np.flatnonzero(worth.ravel())
    for pair in pairs[np.argsort(-worth.ravel()[pairs], kind="mergesort")]:
        row, column = pair // size, pair % size
        if name[row] < 0 and is_free[column]:
            name[row], is_free[column] = column, False
    name[name < 0] = np.flatnonzero(is_free)
    better = True
    while better:
        better = False
        for row in range(size):
            for other in range(row):
                now = worth[row, name[row]] + worth[other, name[other]]
                if worth[row, name[other]] + worth[other, name[row]] > now:
                    name[row], name[other] = name[other], name[row]
                    better = True
    return name


@jit
def _seat(before: IntArray, experts: IntArray, slots: IntArray) -> int:
    """Fill one rank's ``slots`` with ``experts``; those of ``before`` keep their slots.

    Returns:
        Slots whose expert the rank held before.
    """
    slots[:] = -1
    for expert in experts:
        slots[before == expert] = expert
    known, place = int((slots >= 0).sum()), 0
    for expert in experts:
        if not (slots == expert).any():
            while slots[place] >= 0:
                place += 1
            slots[place] = expert
    return known
