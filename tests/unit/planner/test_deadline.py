"""A plan in time: layers with most to gain are searched first, and what time is not enough for stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, PlanError, plan
from eplb_runtime.planner.types import Plan
from eplb_runtime.topology import Topology

LAYERS, EXPERTS, RANKS, WINDOWS = 6, 32, 4, 6
WORST = 3
COST = CostModel(home_bytes=10**6, step_seconds=4.0, moe_share=0.4, horizon_steps=500)
WAYS: dict[str, dict[str, Any]] = {
    "copies": {"replica_slots": 1},
    "homes": {"replica_slots": 0},
    "homes by seconds": {"replica_slots": 0, "cost": COST, "gate": "payoff"},
    "a few moves": {"replica_slots": 1, "max_moves": 5},
}


def loads(stray: float = 0.05) -> np.ndarray:
    """Uneven in every layer; in layer 3 nearly all tokens go to the experts of one rank. Windows stray."""
    random = np.random.default_rng(0)
    mean_LE = random.gamma(1.0, size=(LAYERS, EXPERTS))
    mean_LE[WORST, : EXPERTS // RANKS] *= 20
    return np.asarray(1e5 * mean_LE * random.uniform(1 - stray, 1 + stray, size=(WINDOWS, LAYERS, EXPERTS)))


def planned(replica_slots: int, **terms: Any) -> Plan:
    current = Placement.initial(LAYERS, EXPERTS, RANKS, replica_slots)
    slots = EXPERTS // RANKS + replica_slots
    return plan(loads(), Topology(RANKS), slots_per_rank=slots, current=current, **terms)


def placed(made: Plan) -> list[list[list[int]]]:
    found: list[list[list[int]]] = made.placement.physical_to_logical.tolist()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_without_time_the_layer_with_most_to_gain_is_searched_and_the_others_stay(way: str) -> None:
    made, whole = planned(**WAYS[way], deadline=0.0), planned(**WAYS[way])
    assert set(made.moves[:, 0].tolist()) == {WORST}
    assert made.imbalance_before is not None
    others = np.arange(LAYERS) != WORST
    assert (made.imbalance_after[others] == made.imbalance_before[others]).all()
    assert made.imbalance_after[WORST] < made.imbalance_before[WORST]
    assert made.reason.endswith(f"no time was left for {LAYERS - 1} of {LAYERS} layers")
    assert len(set(whole.moves[:, 0].tolist())) > 1 and "no time" not in whole.reason


@pytest.mark.parametrize("way", WAYS)
def test_with_time_enough_the_plan_is_that_without_a_deadline(way: str) -> None:
    assert placed(planned(**WAYS[way], deadline=1e9)) == placed(planned(**WAYS[way]))


@pytest.mark.parametrize("way", ["copies", "homes by seconds"])
def test_what_is_left_out_is_planned_by_the_next_decisions(way: str) -> None:
    terms = dict(WAYS[way])
    replica_slots = terms.pop("replica_slots")
    current, slots = Placement.initial(LAYERS, EXPERTS, RANKS, replica_slots), EXPERTS // RANKS + replica_slots
    order = []
    for _ in range(LAYERS):
        made = plan(loads(), Topology(RANKS), slots_per_rank=slots, current=current, deadline=0.0, **terms)
        order += sorted(set(made.moves[:, 0].tolist()))
        current = made.placement
    assert order[0] == WORST and len(set(order)) >= LAYERS - 1  # the last gains may be too small to be worth moves
    whole = planned(replica_slots, **terms)
    assert made.imbalance_after.mean() < whole.imbalance_after.mean() + 0.02


def test_a_policy_that_plans_all_layers_at_once_takes_no_deadline() -> None:
    with pytest.raises(PlanError, match="'swaps' plans all layers at once"):
        planned(0, deadline=1.0, policy="swaps")


@pytest.mark.parametrize("deadline", [True, "1", -1.0, float("nan")])
def test_a_deadline_is_a_number_of_seconds(deadline: Any) -> None:
    with pytest.raises(PlanError, match=r"^deadline=.*: give seconds from now on, or leave it out$"):
        planned(1, deadline=deadline)


def test_a_deadline_needs_a_placement_that_stands() -> None:
    with pytest.raises(PlanError, match="deadline needs current"):
        plan(loads(), Topology(RANKS), slots_per_rank=EXPERTS // RANKS, deadline=1.0)
