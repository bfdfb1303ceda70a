"""Judge a placement on windows that come: imbalance by the exact split, without scipy by water-filling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb_runtime.moe.routing.tables import SplitTables
from eplb_runtime.placement import Placement
from eplb_runtime.planner.evaluate import predicted_imbalance

from .exact import lowest_peaks

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
