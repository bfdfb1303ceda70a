"""Loads that wander and loads that have just changed: how much each of the past windows says about the next one.

All experts of a layer are samples of one process in time, so a few windows show how far loads drift apart with the
windows between them. `wandering` turns that into the best linear forecast (ordinary kriging over time).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

SUDDEN = 16.0
"""The newest window alone must stand out so many times from the noise: twice what two windows must."""
OF_LONGEST_STEP = 4.0
"""And be so many times as far (squared) from every window before as any two neighbours of these: where loads jump all
the time, the newest jump lasts no longer than the others."""
LEAST_WINDOWS = 5
MOST_WINDOWS = 16
SURELY = 4.0
"""Standard errors, over the experts, by which neighbouring windows must be more alike than distant ones."""


class Wandering(NamedTuple):
    """The forecast of a layer whose load surely wanders.

    Args:
        share_E: float64, of all tokens, the sum is that of the windows' shares.
        widening: by what to multiply the windows' distances from their own mean to get the errors of this forecast.
    """

    share_E: FloatArray
    widening: float


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


def wandering(share_TE: FloatArray) -> Wandering | None:
    """Return the forecast of a layer that surely wanders; None where distant windows are as alike as neighbours.

    Args:
        share_TE: float64 ``[T, E]``, shares of each window's tokens, oldest first; the newest `MOST_WINDOWS` count.
    """
    share_TE = share_TE[-MOST_WINDOWS:]
    count, experts = share_TE.shape
    if count < LEAST_WINDOWS or experts < 2:
        return None
    evened_TE = share_TE / np.sqrt(np.maximum(share_TE.mean(axis=0), 1e-9))
    apart_KE = np.array([((evened_TE[lag:] - evened_TE[:-lag]) ** 2).mean(axis=0) for lag in range(1, count)])
    farther_E = apart_KE[1:].mean(axis=0) - apart_KE[0]
    error = farther_E.std(ddof=1) / np.sqrt(experts)
    if not farther_E.mean() > SURELY * error:
        return None
    half_apart_K = 0.5 * apart_KE.sum(axis=1)
    at = np.arange(count)
    between_TT = np.append(0.0, half_apart_K)[np.abs(at[:, None] - at)]
    to_next_T = np.append(half_apart_K, half_apart_K[-1])[count - 1 - at]
    weight_T = _best_weights(between_TT, to_next_T)
    error_of_next = 2.0 * weight_T @ to_next_T - weight_T @ between_TT @ weight_T
    from_mean = ((evened_TE - evened_TE.mean(axis=0)) ** 2).sum() / count
    return Wandering(weight_T @ share_TE, float(np.sqrt(max(error_of_next, 0.0) / max(from_mean, 1e-300))))


def _best_weights(between_TT: FloatArray, to_next_T: FloatArray) -> FloatArray:
    """float64 ``[T]``, of the windows, at least 0 and together 1, with the least error by the variogram."""
    count = len(to_next_T)
    equations = np.ones((count + 1, count + 1))
    equations[:count, :count] = between_TT - 1e-6 * between_TT.max() * np.eye(count)
    equations[count, count] = 0.0
    solved = np.linalg.lstsq(equations, np.append(to_next_T, 1.0), rcond=None)[0][:count]
    weight_T = np.maximum(solved, 0.0)
    total = float(weight_T.sum())
    return np.asarray(weight_T / total) if total > 0 else np.full(count, 1.0 / count)
