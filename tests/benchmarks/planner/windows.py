"""Plan on windows that are over, judge on those that come: imbalance by the exact split, and what was moved for it.

Each planner plans once on the first windows, and its placement is judged on every window after, by the best split that
it allows; without scipy by water-filling. Moves are counted from experts in logical order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_runtime.moe.routing.tables import SplitTables
from eplb_runtime.placement import Placement
from eplb_runtime.planner.evaluate import moves_between, predicted_imbalance
from eplb_runtime.planner.planning import plan
from eplb_runtime.planner.policies.deepseek import balance as balance_deepseek
from eplb_runtime.planner.types import MOVE_DESTINATION_SLOT, MOVE_SOURCE_RANK
from eplb_runtime.topology import Topology

from .exact import lowest_peaks
from .loads import NAMES, megatron, normal
from .peers import Peer, as_placement

FloatArray = NDArray[np.float64]
PLANNED_ON, JUDGED = 8, 20
"""Windows."""
LAYERS = 2
SHAPES = ((32, 2), (32, 4), (32, 1), (64, 2), (16, 2))
"""(ranks, replica slots a rank) for LPLB's distribution over 256 experts."""


def run(peers: Mapping[str, Peer], on_progress: Callable[[str], None] = lambda what: None) -> list[dict[str, Any]]:
    """All workloads and planners.

    Returns:
        rows: ``load``, ``experts``, ``ranks``, ``slots``, ``planner``, ``imbalance`` (mean over layers and windows),
        ``worst`` (of all), ``moved`` (share of the slots whose rank did not hold that expert), ``judged_by``.
    """
    rows: list[dict[str, Any]] = []
    for ranks, replicas in SHAPES:
        on_progress(f"normal(1, .3), {ranks} ranks, {replicas} replica slots, on the next windows")
        rows += _rows("normal(1, .3)", normal(PLANNED_ON + JUDGED, LAYERS, 256), ranks, replicas, peers)
    for name in NAMES:
        on_progress(f"{name}, on the next windows")
        rows += _rows(name, megatron(name, PLANNED_ON + JUDGED, LAYERS, 64), 8, 2, peers)
    return rows


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


def _rows(name: str, load: FloatArray, ranks: int, replicas: int, peers: Mapping[str, Peer]) -> list[dict[str, Any]]:
    layers, experts = load.shape[1:]
    per_rank = experts // ranks + replicas
    slots = ranks * per_rank
    topology = Topology(ranks, min(8, ranks))
    initial = Placement.initial(layers, experts, ranks, replicas)
    logical = Placement(np.broadcast_to(np.arange(slots) % experts, (layers, slots)), experts, ranks)
    past, mean = load[:PLANNED_ON], load[:PLANNED_ON].mean(axis=0)
    made = {
        "no planner": initial,
        "ours, where it pays": plan(past, topology, slots_per_rank=per_rank, current=initial).placement,
        "ours, a first plan": plan(past, topology, slots_per_rank=per_rank).placement,
        "plain graph": plain_graph(mean, ranks, replicas),
        "deepseek": Placement(balance_deepseek(mean, slots, 1, 1, ranks)[0], experts, ranks),
    }
    made |= {name: as_placement(ask(mean, slots, 1, 1, ranks), experts, ranks) for name, ask in peers.items()}
    rows = []
    for planner, placement in made.items():
        judged, judged_by = judge(placement, load[PLANNED_ON:])
        moves = moves_between(initial if placement.home is not None else logical, placement, topology)
        travels = moves[:, MOVE_SOURCE_RANK] != placement.rank_of(moves[:, MOVE_DESTINATION_SLOT])
        rows.append(
            {
                "load": name,
                "experts": experts,
                "ranks": ranks,
                "slots": slots,
                "planner": planner,
                "imbalance": float(judged.mean()),
                "worst": float(judged.max()),
                "moved": float(np.count_nonzero(travels) / (layers * slots)),
                "judged_by": judged_by,
            }
        )
    return rows
