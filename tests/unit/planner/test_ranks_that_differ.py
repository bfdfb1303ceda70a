"""Slow ranks get less, ranks that are gone get nothing and lose no expert."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_runtime.placement import Placement
from eplb_runtime.planner import plan
from eplb_runtime.planner.evaluate import predicted_imbalance, rank_load
from eplb_runtime.topology import Topology

RANKS, EXPERTS, LAYERS = 8, 64, 3
TOPOLOGY = Topology(RANKS, 4)
LOAD = np.random.default_rng(0).lognormal(0.0, 0.6, (LAYERS, EXPERTS)) * 1000
SPEED = np.array([1.0, 1, 0.5, 1, 1, 1, 0.8, 1])
THERE = np.array([True, True, False, True, True, True, False, True])


def seconds(placement: Placement, speed: np.ndarray | None) -> np.ndarray:
    """By the split that knows these speeds, the time of the slowest rank at the true speeds, per layer."""
    return np.asarray((rank_load(LOAD, placement, speed) / SPEED).max(axis=1))


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
    loads = rank_load(LOAD, made.placement, SPEED).sum(axis=0)
    assert loads[2] < 0.6 * loads[0] and 0.7 < loads[6] / loads[0] < 0.9


def test_ranks_of_one_speed_are_planned_for_as_ever() -> None:
    current = Placement.initial(LAYERS, EXPERTS, RANKS, 1)
    plain = plan(LOAD, TOPOLOGY, slots_per_rank=9, current=current)
    alike = plan(LOAD, TOPOLOGY, slots_per_rank=9, current=current, rank_speed=[0.7] * RANKS)
    assert alike.placement == plain.placement and np.array_equal(alike.imbalance_after, plain.imbalance_after)
