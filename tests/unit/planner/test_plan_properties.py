"""What holds for every plan in the home layout, whatever the shape, the load and the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placements import some_homes

from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.planner import CostModel, Plan, PlanError, plan
from eplb_runtime.planner.cost import MOVE_DESTINATION_SLOT, MOVE_LAYER
from eplb_runtime.planner.evaluate import predicted_imbalance
from eplb_runtime.topology import Topology

KINDS = ("lognormal", "ties", "zeros", "one hot expert", "huge", "layer without load")


def load_of(kind: str, generator: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    load = np.floor(generator.lognormal(0, 1, shape) * 100)
    if kind == "ties":
        load = generator.integers(0, 3, shape) * 100
    if kind == "zeros":
        load = np.zeros(shape)
    if kind == "one hot expert":
        load[:, :, generator.integers(shape[2])] = 1e7
    if kind == "huge":
        load = np.floor(generator.random(shape) * 1e12)
    if kind == "layer without load":
        load[:, 0] = 0
    return load.astype(np.int64)


@st.composite
def questions(draw: st.DrawFn) -> tuple[np.ndarray, Topology, Placement, int | None]:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    homes, replicas = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    layers, windows = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ranks = nodes * per_node
    load = load_of(draw(st.sampled_from(KINDS)), generator, (windows, layers, ranks * homes))
    current = some_homes(generator, layers, ranks, homes, replicas)
    return load, Topology(ranks, per_node), current, draw(st.none() | st.integers(0, 12))


def new_to_their_rank(made: Plan, current: Placement) -> int:
    """Slots of the plan whose rank did not hold that expert, or its home, before: counted from the placements alone."""
    before, after = (p.physical_to_logical.reshape(p.num_layers, p.num_ranks, -1) for p in (current, made.placement))
    count = int((made.placement.home_rank != current.home_rank).sum())
    homes = current.homes_per_rank
    for layer, rank in np.ndindex(current.num_layers, current.num_ranks):
        count += len(set(after[layer, rank, homes:]) - set(before[layer, rank]) - {EMPTY})
    return count


@settings(max_examples=60, deadline=None)
@given(questions())
def test_every_plan_is_valid_deterministic_no_worse_and_within_its_budget(question) -> None:
    load, topology, current, budget = question
    made = plan(load, topology, slots_per_rank=current.slots_per_rank, current=current, max_moves=budget)
    again = plan(load, topology, slots_per_rank=current.slots_per_rank, current=current, max_moves=budget)
    assert made.placement == again.placement
    assert made.moved_slots == new_to_their_rank(made, current)
    assert budget is None or made.moved_slots <= budget
    assert made.imbalance_before is not None
    assert (made.imbalance_after <= made.imbalance_before).all()
    assert (made.imbalance_after >= made.lower_bound - 1e-6).all()
    if made.decision == "stay":
        assert made.placement == current and not len(made.moves)


@settings(max_examples=30, deadline=None)
@given(questions())
def test_the_moves_carry_the_current_placement_into_the_new_one(question) -> None:
    load, topology, current, budget = question
    made = plan(load, topology, slots_per_rank=current.slots_per_rank, current=current, max_moves=budget)
    slots = current.physical_to_logical.copy()
    slots[made.placement.physical_to_logical == EMPTY] = EMPTY
    for layer, expert, source, slot, is_home in made.moves:
        assert source == current.home_rank[layer, expert]
        assert is_home == (slot % current.slots_per_rank < current.homes_per_rank)
        slots[layer, slot] = expert
    assert np.array_equal(slots, made.placement.physical_to_logical)
    assert list(map(tuple, made.moves[:, [MOVE_LAYER, MOVE_DESTINATION_SLOT]])) == sorted(
        map(tuple, made.moves[:, [MOVE_LAYER, MOVE_DESTINATION_SLOT]])
    )


@settings(max_examples=30, deadline=None)
@given(questions(), st.integers(0, 100))
def test_a_budget_of_bytes_is_kept(question, budget: int) -> None:
    load, topology, current, _ = question
    cost = CostModel(home_bytes=6, replica_bytes=1)
    made = plan(load, topology, slots_per_rank=current.slots_per_rank, current=current, max_bytes=budget, cost=cost)
    assert made.bytes_intra_node + made.bytes_inter_node <= budget


def test_a_declared_load_takes_the_place_of_the_forecast() -> None:
    generator = np.random.default_rng(1)
    past, future = generator.lognormal(0, 1, (2, 3, 32))
    current = Placement.initial(3, 32, 8, 1)
    made = plan(past, Topology(8), slots_per_rank=5, current=current, declared=future)
    assert np.array_equal(made.imbalance_after, predicted_imbalance(future, made.placement))
    assert made.imbalance_after.mean() < 1.01 < predicted_imbalance(past, made.placement).mean()
    with pytest.raises(PlanError, match="declared"):
        plan(past, Topology(8), slots_per_rank=5, current=current, declared=future[:2])
