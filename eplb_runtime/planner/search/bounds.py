"""What no placement can beat: lower bounds on imbalance, by the mean and by the hottest copies, for every split of an
expert's tokens over its copies and for both layouts."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

HALVINGS = 24
"""Of the interval in which the hottest copy is found."""


def lower_bound(load: ArrayLike, num_ranks: int, slots_per_rank: int) -> FloatArray:
    """The imbalance (max / mean rank load) that no placement of this shape gets below.

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
    floor_L = np.maximum(
        floor_L, ((heaviest_LN + upto_LN[:, ranks * (slots_per_rank - 1)]) / ranks).max(axis=1, initial=0.0)
    )
    if slots_per_rank == 2:
        floor_L = np.maximum(floor_L, (lightest_LE + lightest_LE[:, ::-1]).max(axis=1))
    return np.asarray(floor_L)


def _hottest_copy(weight_LE: FloatArray, spare: int, num_ranks: int) -> FloatArray:
    """float64 ``[L]``: least possible tokens of the hottest copy with ``spare`` copies to give, at most one a rank.

    Found by bisection on the answer: a maximum of x needs ceil(weight / x) copies of each expert.
    """
    heaviest_L, total_L = weight_LE.max(axis=1), weight_LE.sum(axis=1)
    low_L = np.maximum(heaviest_L / num_ranks, total_L / (spare + weight_LE.shape[1]))  # on all ranks; all alike
    high_L = np.minimum(heaviest_L, total_L / spare)  # weight / x copies beside the first are enough
    for _ in range(HALVINGS):
        middle_L = np.maximum(0.5 * (low_L + high_L), 1e-300)
        extra_L = (np.maximum(np.ceil(weight_LE / middle_L[:, None]), 1.0) - 1.0).sum(axis=1)
        low_L, high_L = np.where(extra_L <= spare, low_L, middle_L), np.where(extra_L <= spare, middle_L, high_L)
    return np.asarray(low_L)
