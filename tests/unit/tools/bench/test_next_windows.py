"""What comes next is judged by the best split, for every planner alike; workloads are what they say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eplb_runtime.placement import Placement
from eplb_runtime.tools.bench import next_windows
from eplb_runtime.tools.bench.next_windows import LPLB_GRAPH, judge, plain_graph
from eplb_runtime.tools.bench.workloads import NAMES, megatron, normal


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_repeatable_and_every_window_has_as_many_tokens(name: str) -> None:
    load = megatron(name, 9, 2, 64)
    assert np.array_equal(load, megatron(name, 9, 2, 64))
    assert (load.sum(axis=2) == load[0, 0].sum()).all()


def test_workloads_differ_in_what_they_are_for() -> None:
    load = {name[:2]: megatron(name, 9, 2, 64) for name in NAMES}
    hottest = {name: float((one.max(axis=2) / one.mean(axis=2)).mean()) for name, one in load.items()}
    by_rank = {name: one.reshape(9, 2, 8, 8).sum(axis=3) for name, one in load.items()}
    busiest = {name: float((one.max(axis=2) / one.mean(axis=2)).mean()) for name, one in by_rank.items()}
    assert hottest["W0"] == busiest["W0"] == 1
    assert all(3.5 < hottest[name] < 5 for name in ("W1", "W2", "W3", "W6"))
    assert busiest["W2"] > 3.9 > 1.1 > busiest["W3"], "one rank, or evenly spaced"
    assert (load["W5"][:, :, 32:] == 0).all() and busiest["W5"] > 1.9
    sets = [set(np.argsort(-window[0])[:8].tolist()) for window in load["W6"]]
    assert sets[0] == sets[2] != sets[3] == sets[5] != sets[6]
    heat = (load["W7"].max(axis=2) / load["W7"].mean(axis=2))[:, 0]
    assert (heat[[3, 7]] > 3.5).all() and (np.delete(heat, [3, 7]) < 1.5).all()


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="W9"):
        megatron("W9", 1, 1, 8)


def test_the_best_split_is_what_arithmetic_says() -> None:
    pytest.importorskip("scipy")
    # expert 0 on ranks 0 and 1: its 12 tokens level 1 + 12 and 3 to 8 each
    placement = Placement([[0, 1, 2, 0]], 3, 2)
    judged, judged_by = judge(placement, np.array([[[12.0, 1.0, 3.0]]]))
    assert judged_by == "exact" and judged[0, 0] == pytest.approx(1.0)
    judged, _ = judge(placement, np.array([[[2.0, 1.0, 9.0]]]))
    assert judged[0, 0] == pytest.approx(9 / 6), "what stands on one rank stays there"


def test_a_graph_copies_from_the_ranks_it_names() -> None:
    graph = plain_graph(normal(1, 2, 64)[0], 8, 2, LPLB_GRAPH)
    for slot, source_R in enumerate(LPLB_GRAPH):
        for layer, rank in np.ndindex(2, 8):
            assert graph.home_rank[layer, graph.replicas_LRK[layer, rank, slot]] == source_R[rank]


def test_all_planners_stand_in_one_table_with_what_they_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_windows, "SHAPES", ((8, 2),))
    monkeypatch.setattr(next_windows, "NAMES", {"W2 hot rank": ""})
    monkeypatch.setattr(next_windows, "JUDGED", 2)
    monkeypatch.setattr(next_windows, "LAYERS", 1)
    in_order = {"peer": lambda load, slots, *_: np.arange(slots, dtype=np.int32).reshape(1, -1) % load.shape[1]}
    said: list[str] = []
    rows = json.loads(json.dumps(next_windows.run(in_order, said.append)))
    assert len(said) == len(rows) == 2 * 8
    by_planner = {row["planner"]: row for row in rows[8:]}
    assert by_planner["no planner"]["moved"] == by_planner["peer"]["moved"] == 0
    assert by_planner["incremental"]["imbalance"] < 1.05 < 2 < by_planner["no planner"]["imbalance"]
    assert 0 < by_planner["incremental"]["moved"] < by_planner["deepseek"]["moved"]
