"""The free and hierarchical policies and the lower bounds: valid, reproducible, near the optimum, within the budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from eplb_runtime.placement import Placement
from eplb_runtime.planner import plan
from eplb_runtime.planner.evaluate import lower_bound, predicted_imbalance
from eplb_runtime.planner.policies.deepseek import balance as deepseek
from eplb_runtime.planner.policies.free import balance as free
from eplb_runtime.topology import Topology


def imbalance(load: np.ndarray, slots: np.ndarray, num_ranks: int) -> np.ndarray:
    return predicted_imbalance(load, Placement(slots, load.shape[1], num_ranks))


def optimum(weight: np.ndarray, num_ranks: int, slots_per_rank: int) -> float:
    """Least possible imbalance by even split with no expert twice on a rank, by mixed-integer programming.

    Variables: x[e, c, r] = 1 if expert e has c copies and one of them stands on rank r; y[e, c] = 1 if it has c; t.
    """
    experts, most = weight.size, num_ranks
    xs = experts * most * num_ranks
    size = xs + experts * most + 1

    def x(expert: int, count: int, rank: int) -> int:
        return (expert * most + count - 1) * num_ranks + rank

    def y(expert: int, count: int) -> int:
        return xs + expert * most + count - 1

    rows, low, high = [], [], []

    def constrain(terms: dict[int, float], least: float, greatest: float) -> None:
        row = np.zeros(size)
        for column, value in terms.items():
            row[column] = value
        rows.append(row)
        low.append(least)
        high.append(greatest)

    counts = range(1, most + 1)
    for expert in range(experts):
        constrain({y(expert, count): 1 for count in counts}, 1, 1)
        for count in counts:
            chosen = {x(expert, count, rank): 1.0 for rank in range(num_ranks)}
            constrain({**chosen, y(expert, count): -count}, 0, 0)
    for rank in range(num_ranks):
        constrain({x(e, c, rank): 1 for e in range(experts) for c in counts}, slots_per_rank, slots_per_rank)
        loads = {x(e, c, rank): weight[e] / c for e in range(experts) for c in counts}
        constrain({**loads, size - 1: -1}, -np.inf, 0)
    objective = np.zeros(size)
    objective[-1] = 1
    integral = np.ones(size)
    integral[-1] = 0
    upper = np.ones(size)
    upper[-1] = np.inf
    solved = milp(
        objective, constraints=LinearConstraint(np.array(rows), low, high), integrality=integral, bounds=(0, upper)
    )
    assert solved.success
    return float(solved.fun / (weight.sum() / num_ranks))


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    slots_per_rank = draw(st.integers(1, 5))
    experts = draw(st.integers(slots_per_rank, num_ranks * slots_per_rank))
    tokens = st.one_of(st.just(0), st.sampled_from([5, 7]), st.integers(0, 10**12))
    load = draw(st.lists(st.lists(tokens, min_size=experts, max_size=experts), min_size=1, max_size=3))
    return np.array(load, dtype=float), num_ranks, slots_per_rank


@settings(max_examples=60, deadline=None)
@given(problems())
def test_a_free_plan_is_valid_repeatable_and_between_the_bound_and_deepseeks(
    problem: tuple[np.ndarray, int, int],
) -> None:
    load, num_ranks, slots_per_rank = problem
    slots = free(load, num_ranks, slots_per_rank)
    assert np.array_equal(slots, free(load.copy(), num_ranks, slots_per_rank))
    for rank in slots.reshape(-1, slots_per_rank):
        assert len(set(rank)) == slots_per_rank
    reached = imbalance(load, slots, num_ranks)
    assert (reached >= lower_bound(load, num_ranks, slots_per_rank) * (1 - 1e-9)).all()
    theirs, _, _ = deepseek(load, num_ranks * slots_per_rank, 1, 1, num_ranks)
    bound = lower_bound(load, num_ranks, slots_per_rank)
    assert (imbalance(load, theirs, num_ranks) >= bound * (1 - 1e-5)).all()


@pytest.mark.parametrize(
    ("experts", "num_ranks", "slots_per_rank"), [(6, 3, 2), (5, 3, 2), (6, 4, 2), (8, 4, 2), (6, 2, 4), (7, 3, 3)]
)
def test_small_plans_are_near_the_exact_optimum_and_never_below_it(
    experts: int, num_ranks: int, slots_per_rank: int
) -> None:
    load = np.random.default_rng(experts).lognormal(sigma=0.8, size=(4, experts))
    reached = imbalance(load, free(load, num_ranks, slots_per_rank), num_ranks)
    best = np.array([optimum(weight, num_ranks, slots_per_rank) for weight in load])
    assert (reached >= best * (1 - 1e-5)).all()
    assert (lower_bound(load, num_ranks, slots_per_rank) <= best * (1 + 1e-5)).all()
    assert (reached / best).mean() < 1.06


def test_the_group_rule_keeps_groups_on_nodes() -> None:
    load = np.random.default_rng(1).lognormal(sigma=0.9, size=(6, 64))
    strict = free(load, 8, 9, 8, 4)
    for layer in strict:
        nodes = layer.reshape(4, -1)
        per_expert = [{n for n in range(4) if e in nodes[n]} for e in range(64)]
        assert all(len(set.union(*per_expert[g * 8 : g * 8 + 8])) == 1 for g in range(8))
    unruled = free(load, 8, 9).reshape(6, 4, -1)
    assert any(len({n for n in range(4) if e in layer[n]}) > 1 for layer in unruled for e in range(64)), "the control"


@pytest.mark.parametrize("policy", ["free", "hierarchical", "deepseek"])
@pytest.mark.parametrize("budget", [0, 20, 60])
def test_a_budget_of_moves_is_kept_and_no_layer_gets_worse(policy: str, budget: int) -> None:
    rng = np.random.default_rng(2)
    first, second = rng.lognormal(sigma=0.8, size=(2, 6, 32)) * 1000
    topology = Topology(8, 4)
    current = plan(first, topology, slots_per_rank=5, policy=policy, groups=4).placement
    made = plan(second, topology, slots_per_rank=5, policy=policy, groups=4, current=current, max_moves=budget)
    assert made.moved_slots <= budget
    assert made.imbalance_before is not None
    assert (made.imbalance_after <= made.imbalance_before).all()


def arrivals(before: Placement, after: Placement) -> int:
    """Slots that get an expert which their rank did not hold."""
    held, holds = (p.physical_to_logical.reshape(p.num_layers, p.num_ranks, -1) for p in (before, after))
    return int((holds[:, :, :, None] != held[:, :, None, :]).all(axis=3).sum())


@pytest.mark.parametrize("policy", ["free", "hierarchical"])
def test_ranks_are_renamed_to_those_that_hold_most_of_their_experts_already(policy: str) -> None:
    rng = np.random.default_rng(4)
    load = rng.lognormal(sigma=0.8, size=(4, 64))
    options = {"slots_per_rank": 10, "policy": policy, "groups": 4}
    topology = Topology(8, 4)
    by_rank = plan(load, topology, **options).placement.physical_to_logical.reshape(4, 8, 10)
    current = Placement(by_rank[:, [5, 6, 7, 4, 2, 0, 3, 1]].reshape(4, 80), 64, 8)
    load_now = load * rng.lognormal(sigma=0.05, size=load.shape)
    made = plan(load_now, topology, current=current, **options)
    as_planned = plan(load_now, topology, **options).placement
    assert made.decision == "rebalance"
    assert made.moved_slots == arrivals(current, made.placement) < 0.85 * arrivals(current, as_planned)
    assert (made.imbalance_after <= predicted_imbalance(load_now, as_planned) + 1e-12).all()


FIGURES = [
    ("prefill", 32, 9, 0.9993),
    ("prefill", 64, 4, 0.5858),
    ("prefill", 64, 5, 0.9930),
    ("decode", 144, 2, 0.8600),
    ("gpt-oss", 8, 4, 0.9870),
    ("gpt-oss", 8, 5, 0.9982),
]


@pytest.mark.parametrize(("workload", "num_ranks", "slots_per_rank", "wanted"), FIGURES)
def test_measured_loads_are_balanced_better_than_by_any_public_planner(
    shared_data: Path, workload: str, num_ranks: int, slots_per_rank: int, wanted: float
) -> None:
    if workload == "gpt-oss":
        with np.load(shared_data / "gpt_oss_20b_expert_load_shuffled.npz") as file:
            windows = file["load"][:105].reshape(21, 5, 24, 32).sum(axis=1).astype(float)
    else:
        with np.load(shared_data / "deepseek_v3_expert_load.npz") as file:
            chosen = [str(name).startswith(workload) for name in file["names"]]
            windows = file["load"][chosen].astype(float)
    reached = [1 / imbalance(load, free(load, num_ranks, slots_per_rank), num_ranks) for load in windows]
    assert np.mean(reached) >= wanted
