"""Homes dealt out by DeepSeek's rule near the current ones: what plans while the planner is compiled."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, PlanError, plan
from eplb_runtime.topology import Topology

LAYERS, EXPERTS, RANKS = 6, 64, 8
CURRENT = Placement.initial(LAYERS, EXPERTS, RANKS)
SKEWED = np.random.default_rng(3).lognormal(0.0, 1.0, (LAYERS, EXPERTS)) * 1000
QUESTION = {"slots_per_rank": EXPERTS // RANKS, "current": CURRENT, "policy": "deepseek", "layout": "home"}


@given(st.integers(0, 1000), st.sampled_from([(8, 2), (12, 4), (16, 16), (5, 1)]), st.integers(1, 3))
def test_a_plan_is_valid_and_never_worse(seed: int, shape: tuple[int, int], layers: int) -> None:
    experts, ranks = shape
    load = np.random.default_rng(seed).integers(0, 100, (layers, experts))
    current = Placement.initial(layers, experts, ranks, 1)
    made = plan(load, Topology(ranks), **QUESTION | {"slots_per_rank": experts // ranks + 1, "current": current})
    assert (np.bincount(made.placement.home_rank[0], minlength=ranks) == experts // ranks).all()
    assert made.imbalance_before is not None and (made.imbalance_after <= made.imbalance_before + 1e-12).all()


def test_limits_hold_and_are_used_where_they_gain_most() -> None:
    whole = plan(SKEWED, Topology(RANKS), **QUESTION)
    assert whole.imbalance_before is not None
    assert whole.imbalance_after.mean() < whole.imbalance_before.mean() - 0.5
    half = plan(SKEWED, Topology(RANKS), **QUESTION, max_moves=whole.moved_slots // 2)
    assert 0 < half.moved_slots <= whole.moved_slots // 2
    cost = CostModel(home_bytes=10, step_seconds=1.0)
    of_bytes = plan(SKEWED, Topology(RANKS), **QUESTION, cost=cost, max_bytes=700)
    assert 0 < of_bytes.moved_slots <= 70
    again = plan(SKEWED, Topology(RANKS), **QUESTION | {"current": whole.placement})
    assert again.decision == "stay", "ranks are named as those that hold the experts"


def test_where_replicas_stand_it_says_what_to_choose() -> None:
    asked = {**QUESTION, "slots_per_rank": 9}
    standing = plan(SKEWED, Topology(RANKS), slots_per_rank=9).placement
    with pytest.raises(PlanError, match="choose incremental"):
        plan(SKEWED, Topology(RANKS), **asked | {"current": standing})


ALONE = """
import numpy as np
from numba.core.dispatcher import Dispatcher
from eplb_runtime.balancer.planner_process import _homes_alone
from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, plan
from eplb_runtime.topology import Topology

def refuse(self, signature):
    raise AssertionError(f"{self.py_func.__name__} was compiled")

Dispatcher.compile = refuse
load = np.random.default_rng(3).lognormal(0.0, 1.0, (32, 6, 64)).cumsum(axis=0) * 1000
cost = CostModel(home_bytes=1000, step_seconds=1.0)
question = {"slots_per_rank": 9, "current": Placement.initial(6, 64, 8, 1), "gate": "payoff", "cost": cost}
made = _homes_alone(load, Topology(8, 4), policy="incremental", layout="home", **question)
assert made.moved_slots and made.decision == "rebalance", made
plan(load, Topology(8, 4), policy="incremental", **question)
"""


def test_nothing_of_it_is_compiled() -> None:
    """The control: the last line, by another policy."""
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert "line 18" in ended.stderr and "was compiled" in ended.stderr, ended.stderr
