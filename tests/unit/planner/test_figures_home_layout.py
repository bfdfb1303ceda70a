"""The home layout on measured loads: how near to balance, how little moved, over time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, plan
from eplb_runtime.planner.evaluate import predicted_imbalance
from eplb_runtime.planner.policies.deepseek import balance
from eplb_runtime.topology import Topology


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
    full = [
        np.mean(
            [
                judged(Placement(balance(exponential(load[:at], newest), 40, 1, 1, 8)[0], 32, 8), load[at : at + 5])
                for at in replans
            ]
        )
        for newest in (0.5, 0.3, 0.2, 0.1, 0.07)
    ]
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
