"""A shuffle moves every expert, stays a valid placement, and fills replica slots with the hottest."""

from __future__ import annotations

import numpy as np
import pytest
from support.shuffle import plan_shuffle

from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.planner.shuffle import shuffled
from eplb_runtime.topology import Topology


@pytest.mark.parametrize(("experts", "ranks"), [(16, 2), (8, 8), (12, 3), (4, 4), (16, 4)])
def test_every_home_changes_its_rank_even_on_balanced_load(experts: int, ranks: int) -> None:
    current = Placement.initial(3, experts, ranks, 0)
    plan = plan_shuffle(np.ones((2, 3, experts)), Topology(ranks), slots_per_rank=experts // ranks, current=current)
    assert plan.decision == "rebalance"
    stayed = (plan.placement.home_rank == current.home_rank).sum(axis=1)
    assert (stayed <= (experts // ranks if ranks % 2 else 0)).all()
    for epoch in range(1, 9):  # two ranks are never back where they began
        made = shuffled(current, np.ones((3, experts))).with_epoch(epoch)
        assert experts < 12 or (made.home_rank != Placement.initial(3, experts, ranks, 0).home_rank).any(axis=1).all()
        current = made


def test_the_next_epoch_is_shuffled_otherwise_and_the_same_epoch_alike() -> None:
    current, load = Placement.initial(1, 16, 4, 0), np.ones((1, 1, 16))
    plans = [
        plan_shuffle(load, Topology(4), slots_per_rank=4, current=current.with_epoch(epoch)).placement.digest()
        for epoch in (0, 0, 1)
    ]
    assert plans[0] == plans[1] != plans[2]


def test_replica_slots_hold_the_hottest_experts_of_other_ranks() -> None:
    load = np.ones((1, 1, 8))
    load[0, 0, 5] = 100
    current = Placement.initial(1, 8, 4, 1)
    made = plan_shuffle(load, Topology(4), slots_per_rank=3, current=current).placement
    assert made.copy_count[0, 5] == 4
    assert (made.physical_to_logical != EMPTY).all()


def test_one_rank_changes_slots() -> None:
    current = Placement.initial(1, 4, 1, 0)
    made = plan_shuffle(np.ones((1, 1, 4)), Topology(1), slots_per_rank=4, current=current).placement
    assert made.home is not None and current.home is not None
    assert (made.home != current.home).all()
