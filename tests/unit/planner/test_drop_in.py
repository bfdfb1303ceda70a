"""The call that serving engines make: DeepSeek EPLB's arguments, its three tensors, a better plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eplb_runtime
from eplb_runtime.planner import PlanError
from eplb_runtime.planner.policies.deepseek import balance

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
    node_of_group = [
        [set((by_slot[layer, half] // 8).tolist()) for half in (slice(0, 40), slice(40, 80))] for layer in range(3)
    ]
    assert all(not first & second for first, second in node_of_group)


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


def test_every_recorded_case_of_deepseek_eplb_is_planned_slot_for_slot(shared_data: Path) -> None:
    with np.load(shared_data / "deepseek_eplb_cases.npz", allow_pickle=False) as file:
        cases = {name: file[name] for name in file.files}
    meta = json.loads(bytes(cases["meta"]))
    assert len(meta) == 36
    for case in meta:
        name = f"case{case['case']}_"
        planned = balance(
            cases[name + "load"], case["num_replicas"], case["num_groups"], case["num_nodes"], case["num_gpus"]
        )
        slots, by_expert, count = planned
        np.testing.assert_array_equal(slots, cases[name + "physical_to_logical"], err_msg=str(case))
        np.testing.assert_array_equal(count, cases[name + "expert_count"], err_msg=str(case))
        # Copies of one expert weigh the same, and the reference sorts unstably: which copy is the first is the whim of
        # one processor's vector sort. Which slots an expert has is not.
        recorded = cases[name + "logical_to_physical"]
        assert by_expert.shape == recorded.shape
        np.testing.assert_array_equal(np.sort(by_expert), np.sort(recorded), err_msg=str(case))


def test_the_order_of_copies_is_the_recorded_one_where_the_reference_sorts_stably(shared_data: Path) -> None:
    with np.load(shared_data / "deepseek_eplb_cases.npz", allow_pickle=False) as file:
        for case in (0, 1, 2, 18, 19, 20, 24, 25, 26, 30, 31, 32):
            meta = json.loads(bytes(file["meta"]))[case]
            sizes = (meta["num_replicas"], meta["num_groups"], meta["num_nodes"], meta["num_gpus"])
            _, by_expert, _ = balance(file[f"case{case}_load"], *sizes)
            np.testing.assert_array_equal(by_expert, file[f"case{case}_logical_to_physical"])


def test_equal_loads_go_to_the_lower_id() -> None:
    physical_to_logical, _, copy_count = balance(np.ones((1, 4)), 6, 1, 1, 2)
    assert copy_count.tolist() == [[2, 2, 1, 1]]
    assert physical_to_logical.tolist() == [[2, 0, 0, 3, 1, 1]]


@pytest.mark.parametrize(
    ("slots", "groups", "nodes", "ranks", "complaint"),
    [
        (7, 1, 1, 2, "7 slots"),
        (6, 1, 1, 2, "6 slots cannot hold 8"),
        (8, 3, 1, 2, "8 experts"),
        (8, 2, 2, 3, "3 ranks"),
    ],
)
def test_sizes_that_do_not_fit_for_the_reference_policy_are_refused(
    slots: int, groups: int, nodes: int, ranks: int, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        balance(np.ones((1, 8)), slots, groups, nodes, ranks)
