"""The free and hierarchical policies and the lower bounds: valid, reproducible, near the optimum, within the budget."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.placements import some_homes

import eplb_runtime
from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.planner import CostModel, Plan, PlanError, plan
from eplb_runtime.planner.cost import MOVE_DESTINATION_SLOT, MOVE_LAYER
from eplb_runtime.planner.evaluate import lower_bound, predicted_imbalance
from eplb_runtime.planner.policies.deepseek import balance
from eplb_runtime.planner.policies.free import balance as free
from eplb_runtime.topology import Topology


def imbalance(load: np.ndarray, slots: np.ndarray, num_ranks: int) -> np.ndarray:
    return predicted_imbalance(load, Placement(slots, load.shape[1], num_ranks))


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
    bound = lower_bound(load, num_ranks, slots_per_rank)
    assert (imbalance(load, slots, num_ranks) >= bound * (1 - 1e-9)).all()
    theirs, _, _ = balance(load, num_ranks * slots_per_rank, 1, 1, num_ranks)
    assert (imbalance(load, theirs, num_ranks) >= bound * (1 - 1e-5)).all()


def test_the_group_rule_keeps_groups_on_nodes() -> None:
    load = np.random.default_rng(1).lognormal(sigma=0.9, size=(6, 64))
    assert groups_are_on_one_node(free(load, 8, 9, 8, 4), 4)
    assert not groups_are_on_one_node(free(load, 8, 9), 4), "the control"


def groups_are_on_one_node(slots: np.ndarray, num_nodes: int) -> bool:
    """Each group of 8 experts, in each layer."""
    group_LNP = slots.reshape(len(slots), num_nodes, -1) // 8
    return all(sum(len({*group_P}) for group_P in group_NP) == len({*group_NP.flat}) for group_NP in group_LNP)


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
    assert policy == "free" or groups_are_on_one_node(made.placement.physical_to_logical, topology.num_nodes)


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
    ("decode", 144, 2, 0.8730),
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


# -- The call that serving engines make: DeepSeek EPLB's arguments, its three tensors, a better plan


WEIGHT = torch.from_numpy(np.random.default_rng(0).lognormal(0, 0.8, (3, 64)) * 1000).float()


def hottest(by_slot: torch.Tensor, count: torch.Tensor, ranks: int) -> np.ndarray:
    """Tokens of each layer's busiest rank by even split."""
    tokens = (WEIGHT / count).gather(1, by_slot)
    return tokens.reshape(len(WEIGHT), ranks, -1).sum(2).amax(1).numpy()


@pytest.mark.parametrize(("groups", "nodes"), [(1, 1), (8, 2), (3, 2)])
def test_three_tensors_that_agree_and_a_plan_no_worse_than_eplb(groups: int, nodes: int) -> None:
    by_slot, by_expert, count = eplb_runtime.rebalance_experts(WEIGHT, 80, groups, nodes, 8)
    assert by_slot.shape == (3, 80) and count.shape == (3, 64) and by_expert.shape == (3, 64, int(count.max()))
    assert {tensor.dtype for tensor in (by_slot, by_expert, count)} == {torch.int64}
    for layer, expert in np.ndindex(3, 64):
        slots = torch.nonzero(by_slot[layer] == expert)[:, 0]
        assert by_expert[layer, expert].tolist()[: len(slots)] == slots.tolist()
        assert (by_expert[layer, expert, len(slots) :] == -1).all() and count[layer, expert] == len(slots)
    theirs, _, their_count = (torch.from_numpy(map_.astype(np.int64)) for map_ in balance(WEIGHT, 80, groups, nodes, 8))
    assert (hottest(by_slot, count, 8) <= hottest(theirs, their_count, 8) * (1 + 1e-6)).all()


def test_groups_stay_on_their_node() -> None:
    by_slot, _, _ = eplb_runtime.rebalance_experts(WEIGHT, 80, 8, 2, 8)
    assert groups_are_on_one_node(by_slot.numpy(), 2)


@pytest.mark.parametrize(("slots", "groups", "nodes", "ranks"), [(160, 64, 16, 32), (72 * 8, 1, 1, 8)])
def test_where_a_rank_must_hold_an_expert_twice_the_plan_is_deepseeks(
    slots: int, groups: int, nodes: int, ranks: int
) -> None:
    planned = eplb_runtime.rebalance_experts(WEIGHT, slots, groups, nodes, ranks)
    theirs = balance(WEIGHT, slots, groups, nodes, ranks)
    assert all(np.array_equal(ours.numpy(), map_) for ours, map_ in zip(planned, theirs, strict=True))
    windows = eplb_runtime.rebalance_experts(torch.stack([WEIGHT, WEIGHT]), slots, groups, nodes, ranks)
    assert all(torch.equal(ours, of_windows) for ours, of_windows in zip(planned, windows, strict=True))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((81, 1, 1, 8), "81 slots"),
        ((80, 1, 3, 8), "8 ranks"),
        ((56, 1, 1, 8), "56 of 64 experts"),
        (("80", 1, 1, 8), "num_replicas='80': give a whole"),
        ((80, 1, 1, None), "num_gpus=None: give a whole"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[Any, Any, Any, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        eplb_runtime.rebalance_experts(WEIGHT, *sizes)


# -- The reference policy: slot for slot what deepseek-ai/EPLB plans


SORTED_STABLY = (0, 1, 2, 18, 19, 20, 24, 25, 26, 30, 31, 32)


def test_every_recorded_case_of_deepseek_eplb_is_planned_slot_for_slot(shared_data: Path) -> None:
    with np.load(shared_data / "deepseek_eplb_cases.npz", allow_pickle=False) as file:
        cases = {name: file[name] for name in file.files}
    meta = json.loads(bytes(cases["meta"]))
    assert len(meta) == 36
    for case in meta:
        name = f"case{case['case']}_"
        sizes = (case[size] for size in ("num_replicas", "num_groups", "num_nodes", "num_gpus"))
        slots, by_expert, count = balance(cases[name + "load"], *sizes)
        np.testing.assert_array_equal(slots, cases[name + "physical_to_logical"], err_msg=str(case))
        np.testing.assert_array_equal(count, cases[name + "expert_count"], err_msg=str(case))
        # Copies of one expert weigh the same, and the reference sorts unstably: which copy is the first is the whim of
        # one processor's vector sort. Which slots an expert has is not.
        recorded = cases[name + "logical_to_physical"]
        assert by_expert.shape == recorded.shape
        np.testing.assert_array_equal(np.sort(by_expert), np.sort(recorded), err_msg=str(case))
        if case["case"] in SORTED_STABLY:
            np.testing.assert_array_equal(by_expert, recorded)


def test_equal_loads_go_to_the_lower_id() -> None:
    physical_to_logical, _, copy_count = balance(np.ones((1, 4)), 6, 1, 1, 2)
    assert copy_count.tolist() == [[2, 2, 1, 1]]
    assert physical_to_logical.tolist() == [[2, 0, 0, 3, 1, 1]]
    same, tiny, huge = (balance(WEIGHT.double() * 2.0**power, 80, 1, 1, 8)[0] for power in (0, -300, 300))
    assert np.array_equal(same, tiny) and np.array_equal(same, huge), "beyond float32"


@pytest.mark.parametrize(("sizes", "complaint"), [((7, 1, 1, 2), "7 slots"), ((8, 3, 1, 2), "8 experts")])
def test_sizes_that_do_not_fit_for_the_reference_policy_are_refused(
    sizes: tuple[int, int, int, int], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        balance(np.ones((1, 8)), *sizes)


# -- What holds for every plan in the home layout, whatever the shape, the load and the budget


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
def test_every_plan_is_valid_deterministic_no_worse_within_its_budget_and_where_its_moves_lead(question) -> None:
    load, topology, current, budget = question
    made = plan(load, topology, slots_per_rank=current.slots_per_rank, current=current, max_moves=budget)
    again = plan(load, topology, slots_per_rank=current.slots_per_rank, current=current, max_moves=budget)
    assert made.placement == again.placement
    assert made.moved_slots == new_to_their_rank(made, current)
    assert budget is None or made.moved_slots <= budget
    assert made.imbalance_before is not None and (made.imbalance_after <= made.imbalance_before).all()
    assert (made.imbalance_after >= made.lower_bound - 1e-6).all()
    if made.decision == "stay":
        assert made.placement == current and not len(made.moves)
    slots = current.physical_to_logical.copy()
    slots[made.placement.physical_to_logical == EMPTY] = EMPTY
    for layer, expert, source, slot, is_home in made.moves:
        assert source == current.home_rank[layer, expert]
        assert is_home == (slot % current.slots_per_rank < current.homes_per_rank)
        slots[layer, slot] = expert
    assert np.array_equal(slots, made.placement.physical_to_logical)
    into = list(map(tuple, made.moves[:, [MOVE_LAYER, MOVE_DESTINATION_SLOT]]))
    assert into == sorted(into)
    stays = made.placement.home_rank == current.home_rank  # on its rank, and so in its slot
    assert np.array_equal(made.placement.home[stays], current.home[stays])


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
