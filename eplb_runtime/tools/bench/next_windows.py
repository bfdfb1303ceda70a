"""Plan on windows that are over, judge on those that come: imbalance by the exact split, and what was moved for it.

Each planner plans once on the first windows, and its placement is judged on every window after, whoever made it by the
best split that it allows; without scipy by water-filling. Moves are counted from experts in logical order; ours is
asked twice, to change these where it pays, and to place everything freely as where a model starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...moe.routing.tables import SplitTables
from ...placement import EMPTY, Placement
from ...planner.evaluate import moves_between, predicted_imbalance
from ...planner.planning import plan
from ...planner.policies.deepseek import balance as balance_deepseek
from ...planner.policies.free import balance as balance_free
from ...planner.search.starts import add_chords, pack, strides
from ...planner.types import MOVE_DESTINATION_SLOT, MOVE_SOURCE_RANK
from ...topology import Topology
from .exact import lowest_peaks
from .peers import Peer, as_placement
from .workloads import NAMES, megatron, normal

FloatArray = NDArray[np.float64]
PLANNED_ON, JUDGED = 8, 20
"""Windows."""
LAYERS = 2
SHAPES = ((32, 2), (32, 4), (32, 1), (64, 2), (16, 2))
"""(ranks, replica slots a rank) for LPLB's distribution over 256 experts."""
LPLB_GRAPH = ((3, 0, 1, 2, 7, 4, 5, 6), (6, 7, 4, 5, 0, 1, 2, 3))
"""From LPLB's README, for eight ranks with two copies each: the rank that each copy's original stands on."""


def run(peers: Mapping[str, Peer], on_progress: Callable[[str], None] = lambda what: None) -> list[dict[str, Any]]:
    """All workloads and planners.

    Returns:
        rows: ``load``, ``experts``, ``ranks``, ``slots``, ``planner``, ``imbalance`` (mean over layers and windows),
        ``worst`` (of all), ``moved`` (share of the slots whose rank did not hold that expert), ``judged_by``.
    """
    rows: list[dict[str, Any]] = []
    for ranks, replicas in SHAPES:
        load = normal(PLANNED_ON + JUDGED, LAYERS, 256)
        rows += _rows("normal(1, .3)", load, ranks, replicas, peers, on_progress)
    for name in NAMES:
        load = megatron(name, PLANNED_ON + JUDGED, LAYERS, 64)
        rows += _rows(name, load, 8, 2, peers, on_progress)
    return rows


def judge(placement: Placement, windows: FloatArray) -> tuple[FloatArray, str]:
    """float64 ``[T, L]``, max / mean rank load of each window and layer at the best split; and who split it."""
    mean = windows.sum(axis=2) / placement.num_ranks
    try:
        tables = SplitTables.of(placement)
        peaks = np.array([lowest_peaks(window, tables) for window in windows])
    except ImportError:
        return predicted_imbalance(windows, placement), "water-filling"
    return peaks / np.maximum(mean, 1e-300), "exact"


def plain_graph(load: FloatArray, ranks: int, replicas: int, sources: tuple[tuple[int, ...], ...] = ()) -> Placement:
    """Homes packed greedily; then, rank by rank, copies of other ranks' heaviest experts.

    Args:
        load: float64 ``[L, E]``.
        sources: for each replica slot the rank that each rank copies from; none: ranks at fixed strides before.
    """
    layers, experts = load.shape
    homes = experts // ranks
    slots = np.full((layers, ranks, homes + replicas), EMPTY, dtype=np.int32)
    home = np.empty((layers, experts), dtype=np.int32)
    for layer in range(layers):
        home_E, replica_RK = np.empty(experts, dtype=np.int32), np.full((ranks, replicas), EMPTY, dtype=np.int32)
        pack(load[layer], np.zeros(ranks), 0, home_E, replica_RK, False)
        slots[layer, :, :homes] = np.argsort(home_E, kind="stable").reshape(ranks, homes)
        if sources:
            copies = np.ones(experts)
            for slot, source_R in enumerate(sources):
                for rank, source in enumerate(source_R):
                    others = np.setdiff1d(slots[layer, source, :homes], replica_RK[rank])
                    expert = others[np.argmax(load[layer, others] / copies[others])]
                    replica_RK[rank, slot] = expert
                    copies[expert] += 1
        else:
            add_chords(load[layer], strides(ranks, replicas), home_E, replica_RK)
        slots[layer, :, homes:] = replica_RK
        where = np.arange(ranks)[:, None] * (homes + replicas) + np.arange(homes)
        home[layer, slots[layer, :, :homes]] = where
    return Placement(slots.reshape(layers, -1), experts, ranks, home)


def _rows(
    name: str,
    load: FloatArray,
    ranks: int,
    replicas: int,
    peers: Mapping[str, Peer],
    on_progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    layers, experts = load.shape[1:]
    per_rank = experts // ranks + replicas
    topology = Topology(ranks, min(8, ranks))
    initial = Placement.initial(layers, experts, ranks, replicas)
    logical = Placement(
        np.broadcast_to(np.arange(ranks * per_rank) % experts, (layers, ranks * per_rank)), experts, ranks
    )
    past, mean = load[:PLANNED_ON], load[:PLANNED_ON].mean(axis=0)

    def free(planned: NDArray[np.int32]) -> Placement:
        return as_placement(planned, experts, ranks)

    made: dict[str, Callable[[], Placement]] = {
        "no planner": lambda: initial,
        "incremental": lambda: plan(past, topology, slots_per_rank=per_rank, current=initial).placement,
        "incremental, a first plan": lambda: plan(past, topology, slots_per_rank=per_rank).placement,
        "plain graph": lambda: plain_graph(mean, ranks, replicas),
        "deepseek": lambda: free(balance_deepseek(mean, ranks * per_rank, 1, 1, ranks)[0]),
        "free": lambda: free(balance_free(mean, ranks, per_rank)),
    }
    if (ranks, replicas) == (8, 2):
        made["LPLB's graph"] = lambda: plain_graph(mean, ranks, replicas, LPLB_GRAPH)
    made |= {peer: lambda ask=ask: free(ask(mean, ranks * per_rank, 1, 1, ranks)) for peer, ask in peers.items()}  # type: ignore[misc]
    rows = []
    for planner, make in made.items():
        on_progress(f"{name}, {ranks} ranks, {ranks * per_rank} slots: {planner}, on the next windows")
        placement = make()
        judged, judged_by = judge(placement, load[PLANNED_ON:])
        moves = moves_between(initial if placement.home is not None else logical, placement, topology)
        travels = moves[:, MOVE_SOURCE_RANK] != placement.rank_of(moves[:, MOVE_DESTINATION_SLOT])
        rows.append(
            {
                "load": name,
                "experts": experts,
                "ranks": ranks,
                "slots": ranks * per_rank,
                "planner": planner,
                "imbalance": float(judged.mean()),
                "worst": float(judged.max()),
                "moved": float(np.count_nonzero(travels) / (layers * ranks * per_rank)),
                "judged_by": judged_by,
            }
        )
    return rows
