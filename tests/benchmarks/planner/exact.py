"""The best split that a placement allows, by the exact linear program (HiGHS): what every splitter is held against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb_runtime.moe.routing.tables import SplitTables


def lowest_peaks(totals_LE: NDArray[np.integer] | NDArray[np.float64], tables: SplitTables) -> NDArray[np.float64]:
    """Tokens of the busiest rank in each layer when every expert's tokens are shared out over its copies at best.

    Args:
        totals_LE: ``[L, E]``, tokens of each expert.

    Returns:
        float64 ``[L]``.

    Raises:
        ImportError: scipy is missing.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    lowest = np.empty(len(totals_LE))
    ranks, rank_LEC = tables.num_ranks, tables.copy_slot_LEC // tables.slots_per_rank
    for layer, totals_E in enumerate(totals_LE):
        rank_EC = rank_LEC[layer]
        several = np.flatnonzero((rank_EC >= 0).sum(axis=1) > 1)
        fixed_R = np.bincount(tables.first_rank_LE[layer], totals_E, minlength=ranks).astype(np.float64)
        np.add.at(fixed_R, tables.first_rank_LE[layer, several], -totals_E[several])
        if not len(several):
            lowest[layer] = fixed_R.max()
            continue
        expert, copy = np.nonzero(rank_EC[several] >= 0)
        rank, copies = rank_EC[several[expert], copy], np.arange(len(expert))
        ones = np.ones(len(expert))
        below_peak = coo_matrix(
            (np.r_[ones, -np.ones(ranks)], (np.r_[rank, np.arange(ranks)], np.r_[copies, np.full(ranks, len(expert))]))
        )
        whole_expert = coo_matrix((ones, (expert, copies)), shape=(len(several), len(expert) + 1))
        solved = linprog(
            np.r_[np.zeros(len(expert)), 1.0],
            A_ub=below_peak.tocsr(),
            b_ub=-fixed_R,
            A_eq=whole_expert.tocsr(),
            b_eq=totals_E[several],
            method="highs",
        )
        lowest[layer] = solved.fun
    return lowest
