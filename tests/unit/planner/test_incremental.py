"""The incremental policy in the home layout."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shuffle import plan_shuffle

from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, Plan, PlanError, plan
from eplb_runtime.planner.cost import HYSTERESIS
from eplb_runtime.planner.evaluate import predicted_imbalance, rank_load
from eplb_runtime.planner.gate import _paying
from eplb_runtime.planner.policies import shuffled
from eplb_runtime.planner.policies.deepseek import balance
from eplb_runtime.topology import Topology


def skewed(layers: int, experts: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(sigma=0.5, size=(layers, experts)) * 1000


@pytest.mark.parametrize("windows", [5, 1])
def test_noise_of_the_windows_moves_nothing_and_is_the_reason(windows: int) -> None:
    """Each expert has as many tokens as others in the long run, and a fifth more or less in a window."""
    cost, current = CostModel(home_bytes=1, step_seconds=1.0), Placement.initial(3, 64, 8)
    moved = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        share = rng.dirichlet(np.full(64, 30.0 if windows > 1 else 1e6), (windows, 3))
        load = rng.multinomial(2000, share)
        made = plan(load, Topology(8), slots_per_rank=8, current=current, cost=cost, gate="payoff")
        moved.append(made.decision == "rebalance")
        assert made.imbalance_before is not None and made.imbalance_before.mean() > 1.04
        assert moved[-1] or made.reason.startswith("no gain beyond noise, in "), made.reason
    assert sum(moved) <= 2


def test_jumps_that_nothing_foretells_move_nothing_after_the_first_plan() -> None:
    """In each window another expert takes an eighth of all tokens."""
    generator, current, moved = np.random.default_rng(26), Placement.initial(2, 128, 16, 1), []
    load = generator.poisson(1800.0, (20, 2, 128)).astype(float)
    np.put_along_axis(load, generator.integers(128, size=(20, 2, 1)), 1800 * 127 / 7, axis=2)
    terms = {"slots_per_rank": 9, "cost": CostModel(home_bytes=1, step_seconds=4.0), "gate": "payoff"}
    for end in range(1, 20):
        made = plan(load[max(0, end - 8) : end], Topology(16, 8), current=current, **terms)
        current, moved = made.placement, [*moved, made.moved_slots]
    assert moved[0] and not any(moved[2:])


@pytest.mark.parametrize(
    ("code", "terms", "home_bytes"),
    [
        ("limits", {"max_moves": 1}, 1),
        ("limits", {"max_moves": 1, "policy": "deepseek"}, 1),
        ("price", {}, 1 << 45),
        ("trust", {"trust": 1e-9}, 1 << 20),
        ("static", {"policy": "static"}, 1),
        ("nothing to move", {"load": np.ones((6, 64))}, 1 << 45),
    ],
)
def test_why_nothing_moves_is_the_true_reason(code: str, terms: dict, home_bytes: int) -> None:
    cost, load = CostModel(home_bytes=home_bytes, step_seconds=1.0), terms.get("load", skewed(6, 64))
    asked = {"layout": "home", "current": Placement.initial(6, 64, 8), "cost": cost, "gate": "payoff", **terms}
    made = plan(**{"load": load, "topology": Topology(8, 4), "slots_per_rank": 8, **asked})
    assert (made.decision, made.code) == ("stay", code)
    assert made.reason.startswith("nothing to move") == (code == "nothing to move")


# -- The home layout on measured loads: how near to balance, how little moved, over time


def exponential(windows: np.ndarray, newest: float) -> np.ndarray:
    average = windows[0]
    for window in windows[1:]:
        average = (1 - newest) * average + newest * window
    return average


def judged(placement: Placement, windows: np.ndarray) -> float:
    return float((1 / predicted_imbalance(windows, placement)).mean())


@pytest.mark.parametrize("series", ["shuffled", "by_domain"])
def test_over_time_it_beats_full_replans_and_moves_a_tenth_as_much(shared_data: Path, series: str) -> None:
    load = np.load(shared_data / f"gpt_oss_20b_expert_load_{series}.npz")["load"].astype(float)
    replans = range(5, len(load) - 4, 5)

    def replanned(at: int, newest: float) -> float:
        slots = balance(exponential(load[:at], newest), 40, 1, 1, 8)[0]
        return judged(Placement(slots, 32, 8), load[at : at + 5])

    full = [np.mean([replanned(at, newest) for at in replans]) for newest in (0.5, 0.3, 0.2, 0.1, 0.07)]
    topology = Topology(8, intra_node_bandwidth=40e9)
    cost = CostModel(home_bytes=300 << 20, replica_bytes=50 << 20, step_seconds=1.0, horizon_steps=50)
    budget = int(0.08 * 24 * 40)
    balancedness, moved = {}, {}
    for gate in ("always", "payoff"):
        standing = plan(load[:5], topology, slots_per_rank=5, current=Placement.initial(24, 32, 8, 1)).placement
        results, shares = [judged(standing, load[5:10])], []
        for at in replans[1:]:
            made = plan(load[:at], topology, slots_per_rank=5, current=standing, max_moves=budget, cost=cost, gate=gate)
            standing = made.placement
            results.append(judged(standing, load[at : at + 5]))
            shares.append(made.moved_slots / (24 * 40))
        balancedness[gate], moved[gate] = np.mean(results), np.mean(shares)
        assert max(shares) <= 0.08
        assert balancedness[gate] >= max(full)
    assert moved["payoff"] < moved["always"]
    assert balancedness["payoff"] > balancedness["always"] - 0.018


# -- The part of a plan that the gate takes by seconds: the layers with which most are left


LAYERS, EXPERTS, RANKS = 14, 16, 4
TOPOLOGY = Topology(RANKS, 2)
INITIAL = Placement.initial(LAYERS, EXPERTS, RANKS)
LOAD = 1e4 * np.random.default_rng(3).lognormal(0.0, np.linspace(0.05, 1.2, LAYERS)[:, None], (LAYERS, EXPERTS))
"""From layers that are nearly even to layers with much to gain."""


def planned(home_bytes: float, gate: str = "payoff", stall: float = 0.0) -> Plan:
    cost = CostModel(int(home_bytes), step_seconds=1.0, moe_share=0.4, horizon_steps=100, stall_seconds=stall)
    return plan(LOAD, TOPOLOGY, slots_per_rank=EXPERTS // RANKS, current=INITIAL, cost=cost, gate=gate)  # type: ignore[arg-type]


def left(made: Plan) -> float:
    return made.seconds_saved - HYSTERESIS * made.seconds_spent


@given(st.floats(6, 14), st.sampled_from([0.0, 0.1, 3.0]))
def test_what_is_taken_pays_and_the_other_layers_stay(exponent: float, stall: float) -> None:
    made = planned(10**exponent, stall=stall)
    assert (made.decision == "rebalance") == (len(made.moves) > 0) == (left(made) > 0)
    stays = np.setdiff1d(np.arange(LAYERS), made.moves[:, 0])
    assert made.imbalance_before is not None
    assert (made.imbalance_after[stays] == made.imbalance_before[stays]).all()
    assert (made.placement.physical_to_logical[stays] == INITIAL.physical_to_logical[stays]).all()


def test_dear_bytes_leave_out_layers_with_little_to_gain() -> None:
    cheap, dear, dearest = (set(planned(size).moves[:, 0].tolist()) for size in (1e6, 3e10, 1e14))
    assert 0 < len(dear) < len(cheap) and not dearest
    assert min(dear) > min(cheap), "later layers have more to gain"
    assert left(planned(3e10, "off")) < left(planned(3e10))


def test_a_layer_that_saves_little_more_than_it_costs_stays() -> None:
    cost = Mock(seconds_by_layer=lambda *_: np.ones((2, 1)), seconds_per_imbalance=lambda *_: 1.0, stall_seconds=0.0)
    assert _paying(Mock(), cost, Mock(), np.array([HYSTERESIS - 0.1, HYSTERESIS + 0.1])).tolist() == [False, True]


# -- A shuffle moves every expert, stays a valid placement, and fills replica slots with the hottest


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


# -- Homes dealt out by DeepSeek's rule near the current ones: what plans while the planner is compiled


RULE_LAYERS, RULE_EXPERTS, RULE_RANKS = 6, 64, 8
CURRENT = Placement.initial(RULE_LAYERS, RULE_EXPERTS, RULE_RANKS)
SKEWED = np.random.default_rng(3).lognormal(0.0, 1.0, (RULE_LAYERS, RULE_EXPERTS)) * 1000
QUESTION = {"slots_per_rank": RULE_EXPERTS // RULE_RANKS, "current": CURRENT, "policy": "deepseek", "layout": "home"}


@given(st.integers(0, 1000), st.sampled_from([(8, 2), (12, 4), (16, 16), (5, 1)]), st.integers(1, 3))
def test_a_plan_is_valid_and_never_worse(seed: int, shape: tuple[int, int], layers: int) -> None:
    experts, ranks = shape
    load = np.random.default_rng(seed).integers(0, 100, (layers, experts))
    current = Placement.initial(layers, experts, ranks, 1)
    made = plan(load, Topology(ranks), **QUESTION | {"slots_per_rank": experts // ranks + 1, "current": current})
    assert (np.bincount(made.placement.home_rank[0], minlength=ranks) == experts // ranks).all()
    assert made.imbalance_before is not None and (made.imbalance_after <= made.imbalance_before + 1e-12).all()


def test_limits_hold_and_are_used_where_they_gain_most() -> None:
    whole = plan(SKEWED, Topology(RULE_RANKS), **QUESTION)
    assert whole.imbalance_before is not None
    assert whole.imbalance_after.mean() < whole.imbalance_before.mean() - 0.5
    half = plan(SKEWED, Topology(RULE_RANKS), **QUESTION, max_moves=whole.moved_slots // 2)
    assert 0 < half.moved_slots <= whole.moved_slots // 2
    cost = CostModel(home_bytes=10, step_seconds=1.0)
    of_bytes = plan(SKEWED, Topology(RULE_RANKS), **QUESTION, cost=cost, max_bytes=700)
    assert 0 < of_bytes.moved_slots <= 70
    again = plan(SKEWED, Topology(RULE_RANKS), **QUESTION | {"current": whole.placement})
    assert again.decision == "stay", "ranks are named as those that hold the experts"


def test_where_replicas_stand_it_says_what_to_choose() -> None:
    standing = plan(SKEWED, Topology(RULE_RANKS), slots_per_rank=9).placement
    with pytest.raises(PlanError, match="choose incremental"):
        plan(SKEWED, Topology(RULE_RANKS), **QUESTION | {"slots_per_rank": 9, "current": standing})


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


SLOW_RANKS, SLOW_EXPERTS, SLOW_LAYERS = 8, 64, 3
SLOW_TOPOLOGY = Topology(SLOW_RANKS, 4)
SLOW_LOAD = np.random.default_rng(0).lognormal(0.0, 0.6, (SLOW_LAYERS, SLOW_EXPERTS)) * 1000
SPEED = np.array([1.0, 1, 0.5, 1, 1, 1, 0.8, 1])


def seconds(placement: Placement, speed: np.ndarray | None) -> np.ndarray:
    """By the split that knows these speeds, the time of the slowest rank at the true speeds, per layer."""
    return np.asarray((rank_load(SLOW_LOAD, placement, speed) / SPEED).max(axis=1))


@pytest.mark.parametrize("replicas", [0, 1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_a_slow_rank_gets_tokens_by_its_speed(replicas: int, first: bool) -> None:
    current = None if first else Placement.initial(SLOW_LAYERS, SLOW_EXPERTS, SLOW_RANKS, replicas)
    asked = {"slots_per_rank": SLOW_EXPERTS // SLOW_RANKS + replicas, "current": current}
    blind, made = plan(SLOW_LOAD, SLOW_TOPOLOGY, **asked), plan(SLOW_LOAD, SLOW_TOPOLOGY, rank_speed=SPEED, **asked)
    assert np.allclose(made.imbalance_after, predicted_imbalance(SLOW_LOAD, made.placement, SPEED))
    assert made.imbalance_after.max() < 1.05
    assert seconds(made.placement, SPEED).sum() < 0.6 * seconds(blind.placement, None).sum()
    assert (made.imbalance_after >= made.lower_bound - 1e-9).all()
    of_one = plan(np.where(np.arange(SLOW_EXPERTS), 0, SLOW_LOAD), SLOW_TOPOLOGY, rank_speed=SPEED, **asked)
    assert (of_one.imbalance_after >= of_one.lower_bound - 1e-9).all() and (replicas or of_one.lower_bound.min() > 7)
    loads = rank_load(SLOW_LOAD, made.placement, SPEED).sum(axis=0)
    assert loads[2] < 0.6 * loads[0] and 0.7 < loads[6] / loads[0] < 0.9
    alone = plan(np.array([[90.0, 10, 10, 10]]), Topology(4), slots_per_rank=1, rank_speed=[0.5, 1, 1, 1])
    assert alone.placement.home_rank[0, 0] != 0, "a heavy expert that is the slow rank's only one"


def test_ranks_of_one_speed_are_planned_for_as_ever() -> None:
    current = Placement.initial(SLOW_LAYERS, SLOW_EXPERTS, SLOW_RANKS, 1)
    plain = plan(SLOW_LOAD, SLOW_TOPOLOGY, slots_per_rank=9, current=current)
    alike = plan(SLOW_LOAD, SLOW_TOPOLOGY, slots_per_rank=9, current=current, rank_speed=[0.7] * SLOW_RANKS)
    assert alike.placement == plain.placement and np.array_equal(alike.imbalance_after, plain.imbalance_after)
