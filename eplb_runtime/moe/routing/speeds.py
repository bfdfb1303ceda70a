"""Water-filling over ranks that are not equally fast: the slowest rank's time is what counts, not its tokens.

If all ranks are to take time t, a rank of speed s has room for s * t tokens. One that counts ``(1 - s) * t`` tokens
beside its own is then as full as the fastest, so the splitter for equal ranks serves. Where not every rank reaches a
level (its copies do not bring it enough tokens) t is larger than the mean, and halved in between what a split has
reached and what none can.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .tables import SplitTables
from .water_filling import SWEEPS, Mode, ballast, split_totals

TOLERANCE = 1e-3
"""A layer whose slowest rank is so near to the level asked for needs no other."""
LEVELS = 12
"""At most so many are tried. Where every rank reaches the first one, that is all."""


def split_by_speed(
    totals_LE: NDArray[np.integer],
    tables: SplitTables,
    speed_R: NDArray[np.float64] | None,
    *,
    mode: Mode = "water_filling",
    sweeps: int = SWEEPS,
    layers: slice = slice(None),
) -> NDArray[np.int64]:
    """Return `split_totals` for ranks of these speeds, the fastest 1; one of speed 0 has no replicas."""
    if speed_R is None or mode == "even":
        return split_totals(totals_LE, tables, mode=mode, sweeps=sweeps, layers=layers)
    least_L = np.asarray(totals_LE, dtype=np.int64).sum(axis=1) / max(float(speed_R.sum()), 1e-12)
    level_L, reached_L = least_L, np.full(len(least_L), np.inf)
    warm_LEC = None
    quota_LEC = np.zeros((*np.shape(totals_LE), tables.copy_slot_LEC.shape[2]), dtype=np.int64)
    for _ in range(LEVELS):
        weights_LR = ballast(level_L, speed_R)
        tried_LEC = split_totals(
            totals_LE, tables, sweeps=sweeps, warm_LEC=warm_LEC, layers=layers, ballast_LR=weights_LR
        )
        tried_L = _slowest(tried_LEC, tables, speed_R, layers)
        quota_LEC = np.where((tried_L < reached_L)[:, None, None], tried_LEC, quota_LEC)
        least_L = np.where(tried_L > level_L * (1 + TOLERANCE), level_L, least_L)
        reached_L = np.minimum(tried_L, reached_L)
        if (reached_L <= least_L * (1 + TOLERANCE)).all():
            break
        level_L, warm_LEC = (least_L + reached_L) / 2, quota_LEC
    return quota_LEC


def _slowest(
    quota_LEC: NDArray[np.int64], tables: SplitTables, speed_R: NDArray[np.float64], layers: slice
) -> NDArray[np.float64]:
    """float64 ``[L]``: how long the rank takes that takes longest."""
    used = speed_R > 0
    return np.asarray((tables.sum_by_rank(quota_LEC, layers)[:, used] / speed_R[used]).max(axis=1, initial=0.0))
