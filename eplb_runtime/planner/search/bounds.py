"""What no placement can beat: lower bounds on imbalance, so that a report can say how far a plan is from the best.

Three reasons hold a rank up: the mean (somebody has at least that), the hottest copy (spare slots are few; where there
are none, the hottest experts stand whole, with the lightest beside them at best), and the group rule (a node has the
tokens of its groups). The bounds hold for every split of an expert's tokens over its copies and for both layouts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...utils.jit import is_ready, jit, must_not_wait

FloatArray = NDArray[np.float64]

EXACTLY = 1e-9
"""So near to it, as a share, a bound is found."""


def lower_bound(
    load: ArrayLike, num_ranks: int, slots_per_rank: int, *, groups: int = 1, num_nodes: int = 1
) -> FloatArray:
    """The imbalance (max / mean rank load) that no placement of this shape gets below.

    Args:
        load: ``[L, E]``, tokens of each expert.
        num_ranks: R.
        slots_per_rank: S; R x S slots hold E experts, the rest are copies.
        groups: expert groups that must stay on one node each; 1: no such rule.
        num_nodes: nodes; divides ``groups`` and ``num_ranks``, or the rule does not apply.

    Returns:
        float64 ``[L]``, at least 1; 1 for a layer without load, and for all where the caller cannot wait for the
        compiler (`utils.jit.without_waiting`).
    """
    weight = np.ascontiguousarray(load, dtype=np.float64)
    layers, experts = weight.shape
    mean = weight.sum(axis=1) / num_ranks
    if must_not_wait() and not is_ready(floors):
        return np.ones(layers)  # nothing better is known without the compiler
    floor = floors(weight, num_ranks, slots_per_rank)
    if groups > 1 and num_nodes > 1 and groups % num_nodes == 0 and experts % groups == 0:
        group_load = np.ascontiguousarray(weight.reshape(layers, groups, -1).sum(axis=2))
        floor = np.maximum(floor, floors(group_load, num_nodes, groups // num_nodes) / (num_ranks // num_nodes))
    return np.asarray(np.where(mean > 0, np.maximum(floor, mean) / np.where(mean > 0, mean, 1.0), 1.0))


@jit
def floors(weight: FloatArray, num_ranks: int, slots_per_rank: int) -> FloatArray:
    """float64 ``[L]``: ``floor`` of every layer of ``weight`` ``[L, E]``."""
    result = np.empty(weight.shape[0])
    for layer in range(weight.shape[0]):
        result[layer] = floor(weight[layer], num_ranks, slots_per_rank)
    return result


@jit
def floor(weight: FloatArray, num_ranks: int, slots_per_rank: int) -> float:
    """Tokens that the heaviest rank has at least, whatever the placement.

    Without spare slots this includes the pigeonhole: among the (j - 1) R + 1 heaviest experts some j share a rank, with
    the S - j lightest at best; and the m heaviest experts stand on at most m ranks, whose other slots hold the lightest
    at best: the heaviest of these ranks has at least their mean. With two slots a rank, heaviest with lightest is the
    optimum itself.
    """
    experts = weight.size
    lightest = np.sort(weight)
    best = float(weight.sum()) / num_ranks
    spare = num_ranks * slots_per_rank - experts
    if spare > 0:
        return max(best, hottest_copy(weight, spare, num_ranks))
    for shared in range(1, slots_per_rank + 1):
        start = experts - (shared - 1) * num_ranks - 1
        best = max(best, lightest[start : start + shared].sum() + lightest[: slots_per_rank - shared].sum())
    together = 0.0
    for ranks in range(1, num_ranks):
        with_lightest = lightest[(ranks - 1) * (slots_per_rank - 1) : ranks * (slots_per_rank - 1)].sum()
        together += lightest[experts - ranks] + with_lightest
        best = max(best, together / ranks)
    if slots_per_rank == 2:
        for index in range(num_ranks):
            best = max(best, lightest[index] + lightest[experts - 1 - index])
    return best


@jit
def hottest_copy(weight: FloatArray, spare: int, num_ranks: int) -> float:
    """Least possible tokens of the hottest copy with ``spare`` copies to give and at most one a rank.

    Found by bisection on the answer: a maximum of x needs ceil(weight / x) copies of each expert.
    """
    heaviest, total = float(weight.max()), float(weight.sum())
    low = max(heaviest / num_ranks, total / (spare + weight.size))  # on all ranks; all copies alike
    high = min(heaviest, total / spare)  # weight / x copies beside the first are enough
    shared = weight[weight > low]  # others need one copy whatever is found
    slots = spare + shared.size
    while high - low > EXACTLY * high:
        middle = 0.5 * (low + high)
        needed, each = 0.0, 1.0 / middle
        for load in shared:
            needed += max(np.ceil(load * each), 1.0)
        if needed <= slots:
            high = middle
        else:
            low = middle
    return low
