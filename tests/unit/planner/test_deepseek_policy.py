"""The reference policy: slot for slot what deepseek-ai/EPLB plans."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eplb_runtime.planner.policies.deepseek import balance


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
def test_sizes_that_do_not_fit_are_refused(slots: int, groups: int, nodes: int, ranks: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        balance(np.ones((1, 8)), slots, groups, nodes, ranks)
