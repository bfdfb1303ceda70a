"""Copies poured by arithmetic, for many ranks: level groups without a search."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from eplb_runtime.placement import Placement
from eplb_runtime.planner import plan
from eplb_runtime.planner.search.pouring import NEAR_AND_LEVEL, pour
from eplb_runtime.topology import Topology

incremental = importlib.import_module("eplb_runtime.planner.policies.incremental")


def lognormal(layers: int, experts: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(sigma=0.5, size=(layers, experts)) * 1000


@pytest.mark.parametrize("near_and_level", NEAR_AND_LEVEL)
@pytest.mark.parametrize(("ranks", "homes", "slots"), [(8, 1, 1), (16, 3, 1), (32, 2, 2), (64, 1, 1)])
def test_each_copy_stands_where_its_expert_has_no_home_and_none_has_too_many(
    ranks: int, homes: int, slots: int, near_and_level: tuple[float, float]
) -> None:
    for seed in range(5):
        load_E = lognormal(1, ranks * homes, seed)[0]
        home_E = np.random.default_rng(seed).permutation(np.repeat(np.arange(ranks, dtype=np.int32), homes))
        home_E, stood_E = home_E.copy(), home_E.copy()
        replica_RK = np.full((ranks, slots), 7, dtype=np.int32)
        pour(load_E, np.zeros(ranks), 4, near_and_level, home_E, replica_RK)
        assert np.array_equal(home_E, stood_E)
        assert (replica_RK[:, 1:] == -1).all()
        rank_N = np.flatnonzero(replica_RK[:, 0] >= 0)
        expert_N = replica_RK[rank_N, 0]
        assert len(rank_N) > ranks // 4
        assert (home_E[expert_N] != rank_N).all()
        assert np.bincount(expert_N).max() <= 3


def test_ranks_that_fit_one_another_become_pairs() -> None:
    load_E = np.array([1.3, 0.7, 1.1, 0.9, 1.5, 0.5])
    replica_RK = np.empty((6, 1), dtype=np.int32)
    pour(load_E, np.zeros(6), 4, NEAR_AND_LEVEL[0], np.arange(6, dtype=np.int32), replica_RK)
    assert replica_RK[:, 0].tolist() == [-1, 0, -1, 2, -1, 4]


def test_many_ranks_are_poured_and_what_is_near_the_bound_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    load, topology = lognormal(4, 256, 0), Topology(256, 8)
    searched_from = []
    search = incremental.search_layer
    monkeypatch.setattr(incremental, "search_layer", lambda *args: searched_from.append(1) or search(*args))
    made = plan(load, topology, slots_per_rank=2)
    assert not searched_from
    assert made.imbalance_after.max() < 1.008
    assert (made.placement.home_rank == Placement.initial(4, 256, 256, 1).home_rank).all()
    nearly = load * np.random.default_rng(2).uniform(0.999, 1.001, load.shape)
    assert plan(nearly, topology, slots_per_rank=2).placement.digest() != made.placement.digest()
    again = plan(nearly, topology, slots_per_rank=2, current=made.placement)
    assert again.decision == "stay"
    assert again.moved_slots == 0
    other = plan(lognormal(4, 256, 1), topology, slots_per_rank=2, current=made.placement)
    assert other.imbalance_after.max() < 1.01
    assert other.moved_slots > 0
