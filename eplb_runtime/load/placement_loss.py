"""The loss of a forecast: how unevenly what came would have been spread by a placement made for what was foretold.

Errors of counts say little of that: an error on one expert of a busy rank costs more than many on others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..utils.jit import jit
from .least_loaded import least_loaded, set_value, tournament

JUDGED_WINDOWS = 8
Load = NDArray[np.float64]


def what_came(load: Load) -> tuple[NDArray[np.int64], Load]:
    """The windows after which forecasts are judged, and what came after each."""
    after = np.arange(1, len(load))[-JUDGED_WINDOWS:]
    return after - 1, np.ascontiguousarray(load[after])


@jit
def dealt_imbalance(foretold_TLE: Load, came_TLE: Load, ranks: int) -> Load:
    """float64 ``[T, L]``: max / mean rank load of what came, on ranks that balance what was foretold.

    Args:
        foretold_TLE: a forecast for each window.
        came_TLE: the window that came.
        ranks: R; experts go to them heaviest first, each to the lightest, at most ``ceil(E / R)`` on each.
    """
    windows, layers, experts = foretold_TLE.shape
    result_TL = np.ones((windows, layers))
    room = -(-experts // ranks)
    for window in range(windows):
        for layer in range(layers):
            load_E, came_E = foretold_TLE[window, layer], came_TLE[window, layer]
            dealt_R, came_R = np.zeros(ranks), np.zeros(ranks)
            filled_R = np.zeros(ranks, dtype=np.int64)
            order_E = np.argsort(-load_E, kind="mergesort")
            first = 0  # while ranks are empty, each expert goes to the next
            while first < min(ranks, experts) and load_E[order_E[first]] > 0.0:
                dealt_R[first], came_R[first] = load_E[order_E[first]], came_E[order_E[first]]
                filled_R[first] = 1
                first += 1
            open_ranks = tournament(np.where(filled_R < room, dealt_R, np.inf))
            for expert in order_E[first:]:
                best = least_loaded(open_ranks)
                dealt_R[best] += load_E[expert]
                came_R[best] += came_E[expert]
                filled_R[best] += 1
                set_value(open_ranks, best, dealt_R[best] if filled_R[best] < room else np.inf)
            if came_R.sum() > 0:
                result_TL[window, layer] = came_R.max() / came_R.mean()
    return result_TL
