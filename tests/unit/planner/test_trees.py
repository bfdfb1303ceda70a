"""One window of a load that goes on, at many ranks: copies as trees that withstand what the next window brings."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from benchmarks.planner.loads import skewed

from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, plan
from eplb_runtime.planner.search.trees import grow_trees
from eplb_runtime.topology import Topology

incremental = importlib.import_module("eplb_runtime.planner.policies.incremental")
RANKS, TOPOLOGY = 256, Topology(256, 8)


@pytest.mark.parametrize(("ranks", "homes", "slots"), [(8, 1, 1), (16, 3, 1), (32, 2, 2), (64, 1, 1)])
@pytest.mark.parametrize("most", [2, 4, 64])
def test_each_copy_stands_where_its_expert_has_no_home_and_none_has_too_many(
    ranks: int, homes: int, slots: int, most: int
) -> None:
    for seed in range(5):
        generator = np.random.default_rng(seed)
        load_E = generator.lognormal(sigma=0.8, size=ranks * homes)
        home_E = generator.permutation(np.repeat(np.arange(ranks, dtype=np.int32), homes))
        stood_E = home_E.copy()
        replica_RK = np.full((ranks, slots), 7, dtype=np.int32)
        grow_trees(load_E, (0.2 * load_E) ** 2, np.zeros(ranks), most, home_E, replica_RK)
        assert np.array_equal(home_E, stood_E)
        assert (replica_RK[:, 1:] == -1).all()
        rank_N = np.flatnonzero(replica_RK[:, 0] >= 0)
        expert_N = replica_RK[rank_N, 0]
        assert len(rank_N) > 0
        assert (home_E[expert_N] != rank_N).all()
        assert np.bincount(expert_N).max() < most


def test_an_expert_that_may_stray_beyond_the_level_has_a_helper() -> None:
    load_E, alone = np.array([1.6, 0.9, 0.9, 0.6]), np.full((4, 1), -1, dtype=np.int32)
    grow_trees(load_E, np.zeros(4), np.zeros(4), 4, np.arange(4, dtype=np.int32), alone)
    steady = np.bincount(alone[alone >= 0], minlength=4)
    assert steady[0] > 0
    assert steady[3] == 0
    helped = np.full((4, 1), -1, dtype=np.int32)
    grow_trees(load_E, np.array([0.0, 0.25, 0.0, 0.0]), np.zeros(4), 4, np.arange(4, dtype=np.int32), helped)
    assert (helped == 1).any()


def test_without_any_load_nobody_needs_help() -> None:
    replica_RK = np.zeros((4, 1), dtype=np.int32)
    grow_trees(np.zeros(4), np.zeros(4), np.zeros(4), 4, np.arange(4, dtype=np.int32), replica_RK)
    assert (replica_RK == -1).all()


def test_a_plan_for_one_window_is_a_matter_of_shares_alone_and_the_same_each_time() -> None:
    load = skewed(1, (2, RANKS), 0.8, 0.2, seed=4)
    made = plan(load, TOPOLOGY, slots_per_rank=2).placement.digest()
    assert plan(load, TOPOLOGY, slots_per_rank=2).placement.digest() == made
    assert plan(load * 1024, TOPOLOGY, slots_per_rank=2).placement.digest() == made
    assert plan(load[:, ::-1], TOPOLOGY, slots_per_rank=2).placement.digest() != made


def test_a_declared_load_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    load = skewed(1, (2, RANKS), 0.8, 0.2, seed=4)
    known = plan(load[0], TOPOLOGY, slots_per_rank=2).placement.digest()
    monkeypatch.setattr(incremental, "grow_anew", None)
    assert plan(load, TOPOLOGY, slots_per_rank=2, declared=load).placement.digest() == known
    with pytest.raises(TypeError):
        plan(load, TOPOLOGY, slots_per_rank=2)


def test_moves_that_cost_more_than_they_gain_are_not_made() -> None:
    load = skewed(1, (2, RANKS), 0.3, 0.2, seed=6)
    current = Placement.initial(2, RANKS, RANKS, 1)
    dear = CostModel(home_bytes=10**15, replica_bytes=10**15, step_seconds=1e-3)
    cheap = CostModel(home_bytes=1000, replica_bytes=1000, step_seconds=1.0)
    asked = {"slots_per_rank": 2, "current": current, "gate": "payoff"}
    assert plan(load, TOPOLOGY, cost=dear, **asked).moved_slots == 0
    made = plan(load, TOPOLOGY, cost=cheap, **asked)
    assert made.decision == "rebalance"
    assert made.moved_slots > RANKS
    again = plan(load, TOPOLOGY, cost=cheap, **(asked | {"current": made.placement}))
    assert again.moved_slots == 0
