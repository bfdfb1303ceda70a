"""Slow ranks get less, ranks that are gone get nothing and lose no expert."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import eplb_runtime
from eplb_runtime.moe.routing.tables import SplitTables
from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.planner import PlanError, plan
from eplb_runtime.planner.evaluate import even_split_rank_load, filled_rank_load, predicted_imbalance
from eplb_runtime.topology import Topology

RANKS, EXPERTS, LAYERS = 8, 64, 3
TOPOLOGY = Topology(RANKS, 4)
LOAD = np.random.default_rng(0).lognormal(0.0, 0.6, (LAYERS, EXPERTS)) * 1000
SPEED = np.array([1.0, 1, 0.5, 1, 1, 1, 0.8, 1])
THERE = np.array([True, True, False, True, True, True, False, True])


def seconds(placement: Placement, speed: np.ndarray | None) -> np.ndarray:
    """By the split that knows these speeds, the time of the slowest rank at the true speeds, per layer."""
    return np.asarray((filled_rank_load(LOAD, SplitTables.of(placement), speed) / SPEED).max(axis=1))


@pytest.mark.parametrize("replicas", [0, 1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_a_slow_rank_gets_tokens_by_its_speed(replicas: int, first: bool) -> None:
    current = None if first else Placement.initial(LAYERS, EXPERTS, RANKS, replicas)
    asked = {"slots_per_rank": EXPERTS // RANKS + replicas, "current": current}
    blind, made = plan(LOAD, TOPOLOGY, **asked), plan(LOAD, TOPOLOGY, rank_speed=SPEED, **asked)
    assert np.allclose(made.imbalance_after, predicted_imbalance(LOAD, made.placement, SPEED))
    assert made.imbalance_after.max() < 1.05
    assert seconds(made.placement, SPEED).sum() < 0.6 * seconds(blind.placement, None).sum()
    assert (made.imbalance_after >= made.lower_bound - 1e-9).all()
    rank_load = filled_rank_load(LOAD, SplitTables.of(made.placement), SPEED).sum(axis=0)
    assert rank_load[2] < 0.6 * rank_load[0] and 0.7 < rank_load[6] / rank_load[0] < 0.9


def test_ranks_of_one_speed_are_planned_for_as_ever() -> None:
    current = Placement.initial(LAYERS, EXPERTS, RANKS, 1)
    plain = plan(LOAD, TOPOLOGY, slots_per_rank=9, current=current)
    alike = plan(LOAD, TOPOLOGY, slots_per_rank=9, current=current, rank_speed=[0.7] * RANKS, available=[True] * RANKS)
    assert alike.placement == plain.placement and np.array_equal(alike.imbalance_after, plain.imbalance_after)


def living(placement: Placement) -> np.ndarray:
    return placement.slots_LRS[:, THERE].reshape(LAYERS, -1)


def test_experts_of_ranks_that_are_gone_get_a_slot_by_the_fewest_moves() -> None:
    current = plan(LOAD, TOPOLOGY, slots_per_rank=12, policy="free").placement
    lost = sum(EXPERTS - len(np.unique(row)) for row in living(current))
    assert lost > 0, "or nothing is shown"
    made = plan(LOAD, TOPOLOGY, slots_per_rank=12, policy="free", current=current, available=THERE)
    assert (made.decision, made.moved_slots) == ("rebalance", lost)
    assert all(len(np.unique(row)) == EXPERTS for row in living(made.placement))
    assert (made.placement.slots_LRS[:, ~THERE] == current.slots_LRS[:, ~THERE]).all()
    assert (made.moves[:, 2] == -1).all(), "their weights are on no rank"
    rank_load = even_split_rank_load(LOAD, made.placement, THERE.astype(float))
    assert (rank_load[:, ~THERE] == 0).all() and np.allclose(rank_load.sum(axis=1), LOAD.sum(axis=1))
    again = plan(LOAD, TOPOLOGY, slots_per_rank=12, policy="free", current=made.placement, available=THERE)
    assert all(len(np.unique(row)) == EXPERTS for row in living(again.placement))
    assert again.imbalance_after.mean() < made.imbalance_after.mean(), "what is left is balanced as any cluster"
    assert again.imbalance_after.mean() < 1.01


def test_serving_engines_get_maps_without_the_ranks_that_are_gone() -> None:
    weight = torch.from_numpy(LOAD)
    current, _, _ = eplb_runtime.rebalance_experts(weight, 96, 1, 1, RANKS)
    maps = eplb_runtime.rebalance_experts(weight, 96, 1, 1, RANKS, current=current, available=torch.from_numpy(THERE))
    by_slot, by_expert, count = (map_.numpy() for map_ in maps)
    there = np.repeat(THERE, 12)
    assert (by_slot[:, ~there] == EMPTY).all() and (by_slot[:, there] >= 0).all()
    for layer, expert in np.ndindex(LAYERS, EXPERTS):
        slots = np.flatnonzero(by_slot[layer] == expert)
        assert len(slots) == count[layer, expert] > 0
        assert by_expert[layer, expert, : len(slots)].tolist() == slots.tolist()
        assert (by_expert[layer, expert, len(slots) :] == EMPTY).all()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"rank_speed": [1.0] * 7}, "each of 8 ranks"),
        ({"rank_speed": [1.0] * 7 + [0.0]}, "above 0"),
        ({"rank_speed": SPEED, "policy": "free"}, "equally fast"),
        ({"available": THERE}, "'incremental' needs every rank.* loads its checkpoint"),
        ({"available": THERE, "policy": "deepseek"}, "needs every rank"),
        ({"available": THERE, "policy": "free", "groups": 2}, "needs every rank"),
        ({"available": [False] * 8, "policy": "free"}, "no rank is left"),
        ({"available": np.arange(8) < 5, "policy": "free"}, "45 of 64 experts"),
        ({"available": ["yes"] * 8, "policy": "free"}, "each of 8 ranks"),
    ],
)
def test_what_cannot_be_planned_is_refused(asked: dict, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan(LOAD, TOPOLOGY, slots_per_rank=9, **asked)
