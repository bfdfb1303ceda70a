"""Loads that wander and loads that have just changed.

All experts of a layer are samples of one process in time, so a few windows show whether loads drift apart with the
windows between them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

SUDDEN = 16.0
"""The newest window alone must stand out so many times from the noise: twice what two windows must."""
OF_LONGEST_STEP = 4.0
"""And be so many times as far (squared) from every window before as any two neighbours of these: where loads jump all
the time, the newest jump lasts no longer than the others."""
MOST_WINDOWS = 16


def has_just_changed(share_TLE: FloatArray) -> NDArray[np.bool_]:
    """bool ``[L]``: whether the newest window alone is of another load than all before it.

    Args:
        share_TLE: float64 ``[T, L, E]``, shares of each window's tokens, oldest first.
    """
    count = len(share_TLE)
    if count < 4:
        return np.zeros(share_TLE.shape[1], dtype=bool)
    before, newest = share_TLE[:-1], share_TLE[-1]
    mean = before.mean(axis=0)
    within_L = ((before - mean) ** 2).sum(axis=(0, 2)) / (count - 2)
    between_L = ((newest - mean) ** 2).sum(axis=1) * (count - 1) / count
    longest_L = ((before[1:] - before[:-1]) ** 2).sum(axis=2).max(axis=0)
    nearest_L = ((newest - before) ** 2).sum(axis=2).min(axis=0)
    stands_out_L = between_L > SUDDEN * np.maximum(within_L, 1e-12)
    return np.asarray(stands_out_L & (nearest_L > OF_LONGEST_STEP * np.maximum(longest_L, 1e-12)))


def farther_apart(share_TLE: FloatArray) -> FloatArray:
    """float64 ``[L, E]``: by how much farther apart distant windows are than neighbours, squared; 0 on average where
    the load stays.

    Args:
        share_TLE: float64 ``[T, L, E]``, shares of each window's tokens, oldest first; the newest `MOST_WINDOWS` count.
    """
    share_TLE = share_TLE[-MOST_WINDOWS:]
    evened_TLE = share_TLE / np.sqrt(np.maximum(share_TLE.mean(axis=0), 1e-9))
    lags = range(1, len(share_TLE))
    apart_KLE = np.array([((evened_TLE[lag:] - evened_TLE[:-lag]) ** 2).mean(axis=0) for lag in lags])
    return np.asarray(apart_KLE[1:].mean(axis=0) - apart_KLE[0])
