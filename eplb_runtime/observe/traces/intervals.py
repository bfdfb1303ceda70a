"""Unions of intervals and how much of them lies in each other; float64 ``[N, 2]``, begin and end in microseconds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]
NONE: Intervals = np.empty((0, 2))


def union(spans_N2: Intervals) -> Intervals:
    """The same times in order, none twice."""
    if not len(spans_N2):
        return NONE
    spans_N2 = spans_N2[np.argsort(spans_N2[:, 0], kind="stable")]
    reach_N = np.maximum.accumulate(spans_N2[:, 1])
    first_N = np.concatenate([[True], spans_N2[1:, 0] > reach_N[:-1]])
    last_N = np.concatenate([first_N[1:], [True]])
    return np.stack([spans_N2[first_N, 0], reach_N[last_N]], axis=1)


def length(union_N2: Intervals) -> float:
    """Of a `union`, in microseconds."""
    return float((union_N2[:, 1] - union_N2[:, 0]).sum())


def overlap(one_N2: Intervals, other_N2: Intervals) -> float:
    """How much of one `union` lies in another."""
    if not len(one_N2) or not len(other_N2):
        return 0.0
    return float((covered(other_N2, one_N2[:, 1]) - covered(other_N2, one_N2[:, 0])).sum())


def covered(union_N2: Intervals, at_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of a `union` lies before each time."""
    before_N = np.concatenate([[0.0], np.cumsum(union_N2[:, 1] - union_N2[:, 0])])
    index_M = np.searchsorted(union_N2[:, 0], at_M, side="right")
    inside_M = np.minimum(at_M, union_N2[np.maximum(index_M - 1, 0), 1]) - union_N2[np.maximum(index_M - 1, 0), 0]
    past_M = before_N[np.maximum(index_M - 1, 0)] + inside_M
    return np.where(index_M > 0, past_M, 0.0)
