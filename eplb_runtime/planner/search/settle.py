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
    """For each row a column of its own: see `_match_entries`."""
    entry_N = np.flatnonzero(worth.ravel())
    return _match_entries(entry_N, worth.ravel()[entry_N], len(worth))


@jit
def _match_entries(entry_N: NDArray[np.int64], worth_N: FloatArray, size: int) -> IntArray:
    """For each row a column of its own: dearest pairs first, then exchanges between two rows while one gains.

    Args:
        entry_N: ``row * size + column`` of each pair that is worth anything, ascending.
        worth_N: what it is worth, above 0.
    """
    row_N, column_N = entry_N // size, entry_N % size
    name, holder = np.full(size, -1, dtype=np.int32), np.full(size, -1, dtype=np.int32)
    for pair in np.argsort(-worth_N, kind="mergesort"):
        row, column = row_N[pair], column_N[pair]
        if name[row] < 0 and holder[column] < 0:
            name[row], holder[column] = column, row
    unnamed = np.flatnonzero(holder < 0)
    used = 0
    for row in range(size):
        if name[row] < 0:
            name[row] = unnamed[used]
            holder[unnamed[used]] = row
            used += 1
    first_of_row = np.searchsorted(row_N, np.arange(size + 1))
    by_column = np.argsort(column_N, kind="mergesort")
    first_of_column = np.searchsorted(column_N[by_column], np.arange(size + 1))
    better = True
    while better:
        better = False
        for row in range(size):
            other = -1
            while True:
                # The next row with which an exchange could be worth something.
                following = row
                for pair in range(first_of_row[row], first_of_row[row + 1]):
                    if other < holder[column_N[pair]] < following:
                        following = holder[column_N[pair]]
                for index in range(first_of_column[name[row]], first_of_column[name[row] + 1]):
                    if other < row_N[by_column[index]] < following:
                        following = row_N[by_column[index]]
                if following == row:
                    break
                other = following
                now, then = 0.0, 0.0
                for pair in range(first_of_row[row], first_of_row[row + 1]):
                    now += worth_N[pair] if column_N[pair] == name[row] else 0.0
                    then += worth_N[pair] if column_N[pair] == name[other] else 0.0
                for pair in range(first_of_row[other], first_of_row[other + 1]):
                    now += worth_N[pair] if column_N[pair] == name[other] else 0.0
                    then += worth_N[pair] if column_N[pair] == name[row] else 0.0
                if then > now:
                    name[row], name[other] = name[other], name[row]
                    holder[name[row]], holder[name[other]] = row, other
                    better = True
    return name


@jit
def _seat(before: IntArray, experts: IntArray, slots: IntArray) -> int:
    """Fill one rank's ``slots`` with ``experts``; those of ``before`` keep their slots.

    Returns:
        Slots whose expert the rank held before.
    """
    slots[:] = -1
    seated = np.zeros(experts.size, dtype=np.bool_)
    for index in range(experts.size):
        for slot in range(slots.size):
            if slots[slot] < 0 and before[slot] == experts[index]:
                slots[slot] = experts[index]
                seated[index] = True
                break
    known = 0
    for index in range(experts.size):
        held = seated[index]
        if not held:
            for slot in range(slots.size):
                held = held or before[slot] == experts[index]
                if slots[slot] < 0:
                    slots[slot] = experts[index]
                    break
            for slot in range(slots.size):
                held = held or before[slot] == experts[index]
        known += held
    return known
