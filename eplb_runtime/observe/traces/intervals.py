"""Sets of times: float64 ``[N, 2]``, begin and end of each interval."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]


def union(spans_N2: Intervals) -> Intervals:
    """Return the same times in order, none twice."""
    if not len(spans_N2):
        return np.empty((0, 2))
    spans_N2 = spans_N2[np.argsort(spans_N2[:, 0], kind="stable")]
    reach_N = np.maximum.accumulate(spans_N2[:, 1])
    first_N = np.concatenate([[True], spans_N2[1:, 0] > reach_N[:-1]])
    last_N = np.concatenate([first_N[1:], [True]])
    return np.stack([spans_N2[first_N, 0], reach_N[last_N]], axis=1)


def length(union_N2: Intervals) -> float:
    """Return the length of a `union`."""
    return float((union_N2[:, 1] - union_N2[:, 0]).sum())


def overlap(one_N2: Intervals, other_N2: Intervals) -> float:
    """Return how much of one `union` is in another."""
    both = length(union(np.concatenate([one_N2, other_N2])))
    return length(one_N2) + length(other_N2) - both
