"""Homes alone, with seconds known and weights cheap: plans for the windows that come, and quiet on noise."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest

from eplb_runtime.load.drift import has_just_changed
from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, Plan, plan
from eplb_runtime.planner.evaluate import predicted_imbalance
from eplb_runtime.planner.policies.deepseek import balance
from eplb_runtime.planner.policies.incremental import Trajectory
from eplb_runtime.topology import Topology

INCREMENTAL = sys.modules[Trajectory.__module__]
COST = CostModel(home_bytes=226_000_000, step_seconds=4.0)


def lognormal(spread: float, layers: int, experts: int, seed: int) -> np.ndarray:
    mean = np.random.default_rng([seed, 5]).lognormal(0, spread, (layers, experts))
    return mean / mean.mean(axis=1, keepdims=True)


def jittered(mean: np.ndarray, windows: int, spread: float, seed: int) -> np.ndarray:
    noise = np.random.default_rng([seed, 77]).lognormal(-0.5 * spread**2, spread, (windows, *mean.shape))
    return np.floor(1000 * mean * noise)


def ask(load: np.ndarray, current: Placement, cost: CostModel = COST) -> Plan:
    topology = Topology(current.num_ranks, 8, intra_node_bandwidth=50e9, inter_node_bandwidth=50e9)
    slots = current.slots_per_rank
    return plan(load, topology, slots_per_rank=slots, current=current, cost=cost, gate="payoff")


def play(load: np.ndarray, ranks: int, first: int = 8) -> tuple[list[int], np.ndarray]:
    """Windows before which experts move, and float64 ``[T]``, the imbalance of every window from ``first`` on."""
    current, moved, imbalance = Placement.initial(*load.shape[1:], ranks), [], []
    for window in range(first, len(load)):
        made = ask(load[max(0, window - 8) : window], current)
        if made.decision == "rebalance":
            moved.append(window)
        current = made.placement
        imbalance.append(predicted_imbalance(load[window], current).mean())
    return moved, np.array(imbalance)


@pytest.mark.parametrize(("ranks", "spread"), [(64, 0.8), (64, 0.3), (32, 0.8)])
def test_a_first_plan_is_as_good_as_one_that_moves_everything(
    monkeypatch: pytest.MonkeyPatch, ranks: int, spread: float
) -> None:
    load = np.stack([jittered(lognormal(spread, 4, 256, seed), 14, 0.2, seed) for seed in range(2)])
    past, come, current = np.concatenate(load[:, :8], axis=1), np.concatenate(load[:, 8:], axis=1), None
    current = Placement.initial(8, 256, ranks)
    full = Placement(balance(past.mean(axis=0), 256, 1, 1, ranks)[0], 256, ranks)
    best = predicted_imbalance(come, full).mean()
    made = ask(past, current)
    assert predicted_imbalance(come, made.placement).mean() <= 1.015 * best
    assert made.moved_slots <= 0.7 * 8 * 256
    monkeypatch.setattr(INCREMENTAL, "answers", lambda request: False)
    assert predicted_imbalance(come, ask(past, current).placement).mean() > 1.03 * best, "control"


@pytest.mark.parametrize("factor", [0.25, 8.0])
def test_seconds_alone_decide_whatever_their_unit(factor: float) -> None:
    load, current = jittered(lognormal(0.5, 3, 64, 1), 8, 0.1, 1), Placement.initial(3, 64, 8)
    cost = CostModel(home_bytes=10**9, step_seconds=2.0, stall_seconds=0.5)
    scaled = CostModel(home_bytes=int(10**9 * factor), step_seconds=2.0 * factor, stall_seconds=0.5 * factor)
    made = ask(load, current, cost)
    assert made.decision == "rebalance"
    assert ask(load, current, scaled).placement == made.placement
    dearer = CostModel(home_bytes=10**12, step_seconds=2.0, stall_seconds=0.5)
    assert ask(load, current, dearer).placement != made.placement, "control"


def test_noise_moves_next_to_nothing_after_the_first_plan() -> None:
    load = jittered(lognormal(0.5, 4, 64, 0), 48, 0.1, 0)
    moved, _ = play(load, 8)
    assert moved[0] == 8 and len(moved) <= 3


def test_a_shift_is_answered_in_the_next_window() -> None:
    load = jittered(lognormal(0.5, 4, 64, 1), 28, 0.1, 1)
    load[18:] = jittered(lognormal(0.5, 4, 64, 101), 10, 0.1, 2)
    moved, imbalance = play(load, 8)
    assert 19 in moved and len([window for window in moved if window > 18]) <= 3
    assert imbalance[18 - 8] > 1.25 > 1.15 > imbalance[19 - 8]


def test_jumps_that_nobody_can_foresee_move_little(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(9)
    load = jittered(np.ones((4, 32)), 30, 0.1, 1)
    for window in range(30):
        load[window, np.arange(4), generator.integers(0, 32, 4)] *= 8
    assert len(play(load, 8)[0]) <= 4
    monkeypatch.setattr(INCREMENTAL, "answers", lambda request: False)
    assert len(play(load, 8)[0]) >= 10, "control"


def test_one_window_of_another_load_is_a_change_and_one_of_many_jumps_is_none() -> None:
    share = jittered(lognormal(0.5, 3, 64, 0), 9, 0.1, 0)
    share[-1, 1] = lognormal(0.5, 1, 64, 50) * 1000
    for window in range(9):
        share[window, 2, window * 5] *= 10
    share /= share.sum(axis=2, keepdims=True)
    assert has_just_changed(share).tolist() == [False, True, False]
    assert not has_just_changed(share[-3:]).any()


def test_windows_without_tokens_are_none_to_judge_by() -> None:
    load = jittered(lognormal(0.8, 2, 64, 3), 8, 0.1, 3)
    load[1:] = 0
    current = Placement.initial(2, 64, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = ask(load, current)
    assert made.decision == "rebalance"
    assert (made.imbalance_after < 1.02 * made.lower_bound).all()
