"""Placements judged on windows that come: by the best split, by the exact linear program (HiGHS), without scipy by
water-filling; and LPLB's fixed graph."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb_runtime.moe.routing.water_filling import SplitTables
from eplb_runtime.placement import Placement
from eplb_runtime.planner.evaluate import predicted_imbalance


def lowest_peaks(
    totals_LE: NDArray[np.integer] | NDArray[np.float64],
    tables: SplitTables,
    speed_R: NDArray[np.float64] | float = 1.0,
) -> NDArray[np.float64]:
    """float64 ``[L]``, tokens of the busiest rank in each layer, of ``[L, E]``, when every expert's tokens are shared
    out over its copies at best; with speeds, of the rank that takes longest. ImportError: scipy is missing."""
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
            lowest[layer] = (fixed_R / speed_R).max()
            continue
        expert, copy = np.nonzero(rank_EC[several] >= 0)
        rank, copies = rank_EC[several[expert], copy], np.arange(len(expert))
        ones = np.ones(len(expert))
        below_peak = coo_matrix(
            (
                np.r_[ones, -np.ones(ranks) * speed_R],
                (np.r_[rank, np.arange(ranks)], np.r_[copies, np.full(ranks, len(expert))]),
            )
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


FloatArray = NDArray[np.float64]


def judge(placement: Placement, windows: FloatArray) -> tuple[FloatArray, str]:
    """float64 ``[T, L]``, max / mean rank load of each window and layer at the best split; and the splitter's name."""
    mean = windows.sum(axis=2) / placement.num_ranks
    try:
        tables = SplitTables.of(placement)
        peaks = np.array([lowest_peaks(window, tables) for window in windows])
    except ImportError:
        return predicted_imbalance(windows, placement), "water-filling"
    return peaks / np.maximum(mean, 1e-300), "exact"


def plain_graph(load_LE: FloatArray, ranks: int, replicas: int) -> Placement:
    """Homes packed greedily; each replica slot of a rank copies the heaviest expert of a rank at a fixed distance."""
    layers, experts = load_LE.shape
    homes = experts // ranks
    slots = np.empty((layers, ranks, homes + replicas), dtype=np.int32)
    home = np.empty((layers, experts), dtype=np.int32)
    for layer, load_E in enumerate(load_LE):
        total_R, held = np.zeros(ranks), [[] for _ in range(ranks)]
        for expert in np.argsort(-load_E, kind="stable").tolist():
            rank = min((r for r in range(ranks) if len(held[r]) < homes), key=lambda r: total_R[r])
            total_R[rank] += load_E[expert]
            held[rank].append(expert)
        copies_E = np.ones(experts)
        for number in range(replicas):
            distance = (1, ranks // 4 + 1, 5, 7)[number]
            for rank in range(ranks):
                others = [e for e in held[(rank - distance) % ranks][:homes] if e not in held[rank]]
                expert = max(others, key=lambda e: load_E[e] / copies_E[e])
                copies_E[expert] += 1
                held[rank].append(expert)
        slots[layer] = held
        first_R = np.arange(ranks)[:, None] * (homes + replicas)
        home[layer, slots[layer, :, :homes]] = first_R + np.arange(homes)
    return Placement(slots.reshape(layers, -1), experts, ranks, home)
