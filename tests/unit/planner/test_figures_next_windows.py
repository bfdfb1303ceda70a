"""How well a plan in the home layout holds on windows that it has not seen, judged by the exact split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.planner.loads import normal
from benchmarks.planner.windows import judge, plain_graph

from eplb_runtime.placement import Placement
from eplb_runtime.planner import plan
from eplb_runtime.topology import Topology

pytest.importorskip("scipy")


def planned(load: np.ndarray, ranks: int, replicas: int) -> Placement:
    layers, experts = load.shape[1:]
    current = Placement.initial(layers, experts, ranks, replicas)
    return plan(load, Topology(ranks, 8), slots_per_rank=experts // ranks + replicas, current=current).placement


@pytest.mark.parametrize(("ranks", "replicas", "beyond"), [(32, 1, 0.001), (64, 2, 0.002)])
def test_under_pure_jitter_a_plan_is_as_good_as_a_plain_graph(ranks: int, replicas: int, beyond: float) -> None:
    load = normal(14, 8, 256)
    ours, _ = judge(planned(load[:8], ranks, replicas), load[8:])
    graph, _ = judge(plain_graph(load[:8].mean(axis=0), ranks, replicas), load[8:])
    assert ours.mean() <= graph.mean() + beyond


@pytest.mark.parametrize(
    ("series", "replicas", "at_most"),
    [("by_domain", 1, 1.11), ("shuffled", 1, 1.15), ("by_domain", 2, 1.035), ("shuffled", 2, 1.035)],
)
def test_real_windows_are_met_better_than_by_any_graph(
    shared_data: Path, series: str, replicas: int, at_most: float
) -> None:
    load = np.load(shared_data / f"gpt_oss_20b_expert_load_{series}.npz")["load"].astype(float)
    judged = [
        judge(planned(load[at - 10 : at], 8, replicas), load[at : at + 5])[0].mean()
        for at in range(10, len(load) - 4, 15)
    ]
    assert np.mean(judged) <= at_most
