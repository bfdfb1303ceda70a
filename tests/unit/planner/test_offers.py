"""What a plan chose from, and by what: seconds where they are known, the noise of the load where they are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_runtime.load.forecast import scenarios
from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, Plan, PlanError, plan
from eplb_runtime.planner.cost import HYSTERESIS
from eplb_runtime.planner.types import MOST_OFFERS
from eplb_runtime.topology import Topology

COST = CostModel(home_bytes=226_000_000, replica_bytes=38_000_000, step_seconds=4.0, horizon_steps=500)


def windows(seed: int, layers: int = 3, experts: int = 64, count: int = 6, deviation: float = 0.1) -> np.ndarray:
    generator = np.random.default_rng(seed)
    mean = generator.lognormal(0, 0.7, (layers, experts)) * 1000
    return np.maximum(generator.normal(1, deviation, (count, layers, experts)), 0) * mean


def asked(load: np.ndarray, replicas: int = 0, bandwidth: float = 50e9, **terms) -> Plan:
    layers, experts = load.shape[1:]
    terms.setdefault("current", Placement.initial(layers, experts, 8, replicas))
    topology = Topology(8, 4, intra_node_bandwidth=bandwidth, inter_node_bandwidth=bandwidth)
    return plan(load, topology, slots_per_rank=experts // 8 + replicas, **terms)


def scaled(cost: CostModel, factor: int) -> CostModel:
    """The same job with every byte and every second ``factor`` times as many."""
    return replace(
        cost,
        home_bytes=cost.home_bytes * factor,
        replica_bytes=cost.replica_bytes * factor,
        step_seconds=cost.step_seconds * factor,
        stall_seconds=cost.stall_seconds * factor,
        crossing_seconds=cost.crossing_seconds * factor,
    )


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 1),
    st.sampled_from([1e7, 1e9, 50e9]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([2, 3, 10, 64]),
)
def test_a_job_with_bytes_and_seconds_scaled_alike_gets_the_same_plan(
    seed: int, replicas: int, bandwidth: float, stall: float, factor: int
) -> None:
    load, cost = windows(seed), replace(COST, stall_seconds=stall)
    one, other = (asked(load, replicas, bandwidth, cost=each, gate="payoff") for each in (cost, scaled(cost, factor)))
    assert one.placement == other.placement
    assert len(one.offers) == len(other.offers)
    if not np.isnan(one.seconds_spent):
        assert other.seconds_spent == pytest.approx(factor * one.seconds_spent)
        assert other.seconds_saved == pytest.approx(factor * one.seconds_saved)


def test_dearer_bytes_alone_move_less() -> None:
    moved = [asked(windows(0), bandwidth=rate, cost=COST, gate="payoff").moved_slots for rate in (50e9, 2e7, 1e6)]
    assert moved[0] > moved[1] > moved[2] == 0


def test_offers_go_from_the_current_placement_to_the_best_by_slots_moved() -> None:
    made = asked(windows(1, layers=8), cost=COST, gate="off")
    first, last = made.offers[0], made.offers[-1]
    assert (first.moved_slots, first.saved, first.spent) == (0, 0.0, 0.0)
    assert 4 < len(made.offers) <= MOST_OFFERS
    assert [one.moved_slots for one in made.offers] == sorted(one.moved_slots for one in made.offers)
    assert last.imbalance == min(one.imbalance for one in made.offers)
    assert made.moved_slots == last.moved_slots, "off takes the last"
    assert (last.saved, last.spent) == pytest.approx((made.seconds_saved, made.seconds_spent))


@pytest.mark.parametrize("bandwidth", [50e9, 1e8, 2e7, 1e6])
@pytest.mark.parametrize("trust", [1.0, 0.3])
def test_payoff_takes_the_offer_that_saves_most_beyond_what_it_spends(bandwidth: float, trust: float) -> None:
    made = asked(windows(2), bandwidth=bandwidth, cost=COST, gate="payoff", trust=trust)
    worth = [trust * one.saved - HYSTERESIS * one.spent for one in made.offers]
    assert made.moved_slots == made.offers[int(np.argmax(worth))].moved_slots


def test_a_plan_that_is_not_trusted_moves_less_or_nothing() -> None:
    moved = [asked(windows(2), bandwidth=1e8, cost=COST, gate="payoff", trust=t).moved_slots for t in (1.0, 0.1, 0.0)]
    assert moved[0] > moved[1] >= moved[2] == 0
    assert asked(windows(2), trust=0.0).moved_slots > 0, "only payoff knows seconds"
    with pytest.raises(PlanError, match="trust=-1"):
        asked(windows(2), trust=-1.0)


def test_a_stall_is_spent_by_every_placement_but_the_current_one() -> None:
    stall = replace(COST, stall_seconds=1e9)
    made = asked(windows(1), cost=stall, gate="payoff")
    assert (made.decision, made.offers[0].spent) == ("stay", 0.0)
    assert min(one.spent for one in made.offers[1:]) >= 1e9


@pytest.mark.parametrize("budget", [0, 3, 8])
def test_no_offer_is_beyond_the_budget(budget: int) -> None:
    made = asked(windows(1), max_moves=budget, gate="off")
    assert max(one.moved_slots for one in made.offers) <= budget


def test_always_takes_the_fewest_moves_that_are_as_good_as_the_best_but_for_noise() -> None:
    made, best = asked(windows(3, deviation=0.2)), asked(windows(3, deviation=0.2), gate="off")
    assert 0 < made.moved_slots <= best.moved_slots
    assert made.imbalance_after.mean() < best.imbalance_after.mean() + 0.05
    assert made.offers == asked(windows(3, deviation=0.2)).offers or np.isnan(made.offers[0].saved)


def moves_over(series: np.ndarray, history: int = 8) -> list[int]:
    """Windows before which a job that plans each time moves something."""
    standing = Placement.initial(series.shape[1], series.shape[2], 8)
    moved = []
    for at in range(history, len(series)):
        made = asked(series[at - history : at], current=standing)
        standing = made.placement
        moved += [at] if made.moved_slots else []
    return moved


def test_noise_around_a_steady_load_is_not_answered() -> None:
    assert len(moves_over(windows(5, layers=4, count=40))) <= 3, "the first plan among them"


def test_a_shift_is_answered_in_the_next_window() -> None:
    series = np.concatenate([windows(6, count=16), windows(7, count=8)])
    after = [at for at in moves_over(series) if at > 16]
    assert after[0] == 17
    assert len(after) <= 3


def test_jumps_that_nobody_can_foresee_are_left_alone_after_the_fourth() -> None:
    series = np.random.default_rng(8).normal(1, 0.1, (36, 3, 64)) * 1000
    for window in range(12, 36):
        for layer in range(3):
            series[window, layer, np.random.default_rng([window, layer]).integers(64)] += 15_000
    assert not [at for at in moves_over(series) if at > 16]


def test_what_stands_is_judged_on_loads_that_stray_less_than_what_is_made_from_them() -> None:
    load = windows(9)
    load /= load.sum(axis=2, keepdims=True)
    mean = load.mean(axis=0)
    _, _, judged, calm = scenarios(load, mean)
    assert (np.abs(calm - mean).sum(axis=(1, 2)) < np.abs(judged - mean).sum(axis=(1, 2))).all()
    assert np.allclose(calm[: len(load)], load), "on the windows themselves"
