"""The incremental policy in the home layout."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, plan
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


def test_experts_that_stay_on_a_rank_stay_in_their_slot() -> None:
    current = Placement.initial(4, 64, 8)
    made = plan(skewed(4, 64, 3), Topology(8, 4), slots_per_rank=8, current=current)
    assert made.placement.home is not None and current.home is not None
    stays = made.placement.home_rank == current.home_rank
    assert np.array_equal(made.placement.home[stays], current.home[stays])
