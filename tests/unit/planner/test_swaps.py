"""Swaps of homes, found by NumPy alone: near to what the long search finds, under the same limits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, PlanError, plan
from eplb_runtime.planner.evaluate import predicted_imbalance
from eplb_runtime.topology import Topology

LAYERS, EXPERTS, RANKS = 6, 64, 8
CURRENT = Placement.initial(LAYERS, EXPERTS, RANKS)
SKEWED = np.random.default_rng(3).lognormal(0.0, 1.0, (LAYERS, EXPERTS)) * 1000
QUESTION = {"slots_per_rank": EXPERTS // RANKS, "current": CURRENT, "policy": "swaps", "forecast": "window"}


@given(st.integers(0, 1000), st.sampled_from([(8, 2), (12, 4), (16, 16), (5, 1)]), st.integers(1, 3))
def test_a_plan_is_valid_and_never_worse(seed: int, shape: tuple[int, int], layers: int) -> None:
    experts, ranks = shape
    load = np.random.default_rng(seed).integers(0, 100, (layers, experts))
    current = Placement.initial(layers, experts, ranks, 1)
    made = plan(load, Topology(ranks), **QUESTION | {"slots_per_rank": experts // ranks + 1, "current": current})
    assert (np.bincount(made.placement.home_rank[0], minlength=ranks) == experts // ranks).all()
    assert made.imbalance_before is not None and (made.imbalance_after <= made.imbalance_before + 1e-12).all()


def test_it_comes_near_to_the_long_search() -> None:
    made = plan(SKEWED, Topology(RANKS), **QUESTION)
    best = plan(SKEWED, Topology(RANKS), **QUESTION | {"policy": "incremental"})
    assert made.imbalance_before is not None and made.imbalance_before.mean() > 1.4
    assert made.imbalance_after.mean() < 1.03 * best.imbalance_after.mean()


def test_limits_hold_and_are_used_where_they_gain_most() -> None:
    whole = plan(SKEWED, Topology(RANKS), **QUESTION)
    half = plan(SKEWED, Topology(RANKS), **QUESTION, max_moves=whole.moved_slots // 2)
    assert 0 < half.moved_slots <= whole.moved_slots // 2
    gains = [float((made.imbalance_before - made.imbalance_after).sum()) for made in (half, whole)]
    assert gains[0] > 0.6 * gains[1]
    cost = CostModel(home_bytes=10, step_seconds=1.0)
    of_bytes = plan(SKEWED, Topology(RANKS), **QUESTION, cost=cost, max_bytes=100)
    assert 0 < of_bytes.moved_slots <= 10


def test_slow_ranks_get_less() -> None:
    speed = [1.0] * 7 + [0.5]
    made = plan(SKEWED, Topology(RANKS), **QUESTION, rank_speed=speed)
    assert made.imbalance_before is not None
    assert made.imbalance_after.mean() < made.imbalance_before.mean() - 0.3
    assert np.allclose(made.imbalance_after, predicted_imbalance(SKEWED, made.placement, np.array(speed)))


def test_nothing_moves_on_balance_or_where_it_does_not_pay() -> None:
    even = np.full((LAYERS, EXPERTS), 1000.0)
    assert plan(even, Topology(RANKS), **QUESTION).decision == "stay"
    assert plan(even * 0.0, Topology(RANKS), **QUESTION).decision == "stay"
    dear = CostModel(home_bytes=10**9, step_seconds=1e-3, horizon_steps=10)
    slow = Topology(RANKS, RANKS, intra_node_bandwidth=1e9)
    assert plan(SKEWED, slow, **QUESTION, gate="payoff", cost=dear).decision == "stay"


def test_where_replicas_stand_it_says_what_to_choose() -> None:
    standing = plan(
        SKEWED, Topology(RANKS), **QUESTION | {"slots_per_rank": 9, "current": None, "policy": "incremental"}
    )
    with pytest.raises(PlanError, match="choose incremental"):
        plan(SKEWED, Topology(RANKS), **QUESTION | {"slots_per_rank": 9, "current": standing.placement})


ALONE = """
import numpy as np
from numba.core.dispatcher import Dispatcher
from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, plan
from eplb_runtime.topology import Topology
from eplb_runtime.utils import jit

def refuse(self, signature):
    raise AssertionError(f"{self.py_func.__name__} was compiled")

Dispatcher.compile = refuse
jit._compiling.append(-1)  # another thread
load = np.tile(np.random.default_rng(3).lognormal(0.0, 1.0, (6, 64)) * 1000, (5, 1, 1))
cost = CostModel(home_bytes=1000, step_seconds=1.0)
question = {"slots_per_rank": 9, "current": Placement.initial(6, 64, 8, 1), "gate": "payoff", "cost": cost}
made = plan(load, Topology(8, 4), policy="swaps", forecast="window", **question)
assert made.moved_slots and made.decision == "rebalance", made
jit._compiling.clear()
plan(load, Topology(8, 4), policy="incremental", **question)
"""


def test_nothing_of_it_is_compiled() -> None:
    """The control: the last line, by another policy."""
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert "line 20" in ended.stderr and "was compiled" in ended.stderr, ended.stderr
