"""The planner's suite: families of loads that stay, drift, jump or are dominated, planned on what is over and judged on
the window that follows.

Loads are drawn from seeds, several series of each family, on which none of the planner's constants was chosen. Where a
family drifts every planner plans anew before each window; elsewhere once. Judged by the exact split; moves are counted
from experts in logical order.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_runtime.placement import Placement
from eplb_runtime.planner.api import plan
from eplb_runtime.planner.cost import CostModel
from eplb_runtime.planner.policies.deepseek import balance as balance_deepseek
from eplb_runtime.topology import Topology

from .exact import judge, plain_graph
from .loads import (
    autoregressive,
    bursting,
    dominated,
    hash_layers,
    jumping,
    near_uniform,
    normal,
    rotating,
    shifting,
    skewed,
)

FloatArray = NDArray[np.float64]
SEEDS = (11, 12, 13)  # of the series of each family
LAYERS = 2
PAST, JUDGED = 8, 12  # windows planned on, and windows judged after them
TRAINING = CostModel(home_bytes=226_000_000, step_seconds=4.0)
"""Qwen3-235B's expert with its optimizer state, and a step of training; over links of 50 GB/s, for 500 steps."""
LINK_BANDWIDTH = 50e9  # bytes a second
RULES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "last": lambda past: past[-1],
    "mean": lambda past: past.mean(axis=0),
    "average": lambda past: np.tensordot(0.5 ** np.arange(len(past), 0, -1), past, 1),
}
"""What DeepSeek's rule plans on."""
NOISE = 0.005
Draw = Callable[[int, int, int, int], FloatArray]  # (windows, layers, experts, seed) -> float64 [T, L, E]


@dataclass(frozen=True)
class Family:
    """A kind of load on a cluster, ``past`` windows of which are planned on. One that ``drifts`` is planned anew before
    each window, not once; with ``priced`` ours has to pay its seconds (`TRAINING`, gate ``"payoff"``), as in a job."""

    name: str
    draw: Draw
    experts: int
    ranks: int
    replicas: int
    drifts: bool = False
    priced: bool = False
    past: int = PAST
    layers: int = LAYERS


def _skewed(spread: float, jitter: float) -> Draw:
    return lambda windows, layers, experts, seed: skewed(windows, (layers, experts), spread, jitter, seed)


def _dominated(share: float) -> Draw:
    return lambda windows, layers, experts, seed: dominated(windows, layers, experts, share, seed)


def _zipf(windows: int, layers: int, experts: int, seed: int) -> FloatArray:
    return hash_layers(windows, layers, experts, seed, vocabulary=experts, exponent=1.5, hashes=1)


def _normal(windows: int, layers: int, experts: int, seed: int) -> FloatArray:
    return normal(windows, layers, experts, seed=seed)


FAMILIES = (
    Family("steady, spread .8, seconds known", _skewed(0.8, 0.2), 256, 64, 0, priced=True),
    Family("steady, spread .3, seconds known", _skewed(0.3, 0.2), 256, 64, 0, priced=True),
    Family("steady, spread .8, seconds known, 32 windows", _skewed(0.8, 0.2), 256, 32, 0, priced=True, past=32),
    Family("steady, spread .8", _skewed(0.8, 0.2), 256, 64, 0),
    Family("steady, spread .8", _skewed(0.8, 0.2), 256, 64, 1),
    Family("one window known", _skewed(0.8, 0.2), 256, 256, 1, past=1, layers=1),
    Family("one window known", _skewed(0.8, 0.2), 1024, 1024, 1, past=1, layers=1),
    Family("one window known, jitter .12", _skewed(0.8, 0.12), 256, 256, 1, past=1, layers=1),
    Family("one window known, jitter .12", _skewed(0.8, 0.12), 1024, 1024, 1, past=1, layers=1),
    Family("jitter, normal(1, .3)", _normal, 256, 32, 1),
    Family("jitter, normal(1, .3)", _normal, 256, 32, 2),
    Family("one expert with 30 %", _dominated(0.3), 256, 32, 1),
    Family("one expert with 30 %", _dominated(0.3), 512, 64, 2),
    Family("one expert with 12.5 %", _dominated(0.125), 256, 64, 1),
    Family("Zipf 1.5", _zipf, 512, 64, 2),
    Family("AR(1), .9 a window", autoregressive, 256, 32, 1, drifts=True),
    Family("AR(1), .9 a window", autoregressive, 256, 64, 0, drifts=True),
    Family("rotating, 8 regimes", rotating, 256, 32, 1, drifts=True),
    Family("rotating, 8 regimes", rotating, 64, 8, 1, drifts=True),
    Family("rotating, 8 regimes", rotating, 64, 8, 0, drifts=True),
    Family("shift after window 14", shifting, 256, 32, 1, drifts=True),
    Family("jumps, another hot each window", jumping, 256, 32, 1, drifts=True),
    Family("W7 burst", bursting, 64, 8, 2, drifts=True),
    Family("K3-like, near uniform", near_uniform, 896, 16, 0),
    Family("K3-like, near uniform", near_uniform, 896, 64, 0),
    Family("K3-like, near uniform", near_uniform, 896, 64, 1),
    Family("K3-like, near uniform", near_uniform, 896, 128, 1),
    Family("hash layers, token frequencies", hash_layers, 256, 32, 0),
    Family("hash layers, token frequencies", hash_layers, 256, 32, 1),
    Family("hash layers, token frequencies", hash_layers, 256, 64, 1),
)


def run(
    families: Sequence[Family] = FAMILIES,
    seeds: Sequence[int] = SEEDS,
    on_progress: Callable[[str], None] = lambda what: None,
) -> list[dict[str, Any]]:
    """All families, each over several series, one a seed.

    Rows: ``load``, ``experts``, ``ranks``, ``replicas``; imbalance of the next windows, mean over series, layers and
    windows: ``no_planner``; ``rule``, the best of DeepSeek's rule on the newest window, on the mean and on an average
    in which a window counts half as much as the next; ``graph``, LPLB's fixed one on the mean; ``ours``; ``moved``,
    slots that ours moves as a share of all, where loads drift a window."""
    rows = []
    for family in families:
        on_progress(f"{family.name}: {family.experts} experts, {family.ranks} ranks, {family.replicas} copies")
        series = [_series(family, seed) for seed in seeds]
        mean = {name: float(np.mean([one[name] for one in series])) for name in series[0]}
        rows.append(
            {
                "load": family.name,
                "experts": family.experts,
                "ranks": family.ranks,
                "replicas": family.replicas,
                "no_planner": mean["no_planner"],
                "rule": min(mean[name] for name in RULES),
                "graph": mean.get("graph"),
                "ours": mean["ours"],
                "moved": mean["moved"],
            }
        )
    return rows


def behind(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say in how many rows ours is behind the best of the others."""
    best = [min(row[name] for name in ("no_planner", "rule", "graph") if row[name]) for row in rows]
    number = sum(row["ours"] > (1 + NOISE) * other for row, other in zip(rows, best, strict=True))
    return f"by more than {NOISE:.1%} in {number} of {len(rows)} rows"


def _series(family: Family, seed: int) -> dict[str, float]:
    """One series of a family."""
    load = family.draw(family.past + JUDGED, family.layers, family.experts, seed)
    slots = family.experts // family.ranks + family.replicas
    topology = Topology(
        family.ranks, min(8, family.ranks), intra_node_bandwidth=LINK_BANDWIDTH, inter_node_bandwidth=LINK_BANDWIDTH
    )
    terms: dict[str, Any] = {"cost": TRAINING, "gate": "payoff"} if family.priced else {}
    ours = initial = Placement.initial(family.layers, family.experts, family.ranks, family.replicas)
    judged: dict[str, list[FloatArray]] = defaultdict(list)
    moved = 0.0
    ends = range(family.past, len(load)) if family.drifts else [family.past]
    for end in ends:
        past = load[end - family.past : end]
        made = plan(past, topology, slots_per_rank=slots, current=ours, **terms)
        moved += made.moved_slots / initial.physical_to_logical.size / len(ends)
        ours = made.placement
        placed = {"no_planner": initial, "ours": ours}
        for name, known in RULES.items():
            planned = balance_deepseek(known(past), family.ranks * slots, 1, 1, family.ranks)[0]
            placed[name] = Placement(planned, family.experts, family.ranks)
        if family.replicas:
            placed["graph"] = plain_graph(past.mean(axis=0), family.ranks, family.replicas)
        for name, placement in placed.items():
            judged[name].append(judge(placement, load[end : end + 1] if family.drifts else load[end:])[0])
    return {name: float(np.mean(values)) for name, values in judged.items()} | {"moved": moved}
