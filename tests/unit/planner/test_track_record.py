"""Gains that do not come true are believed less; where a router wanders experts stop moving."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import numpy as np
import pytest

from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, Plan, plan
from eplb_runtime.planner.evaluate import predicted_imbalance
from eplb_runtime.planner.forecast import coarsen, foretell
from eplb_runtime.planner.track_record import JUDGED, TrackRecord
from eplb_runtime.topology import Topology

LAYERS, EXPERTS, RANKS = 4, 32, 8
TOPOLOGY = Topology(RANKS, RANKS, intra_node_bandwidth=4e8)


def wandering(seed: int, windows: int, keeps: float) -> np.ndarray:
    """int ``[T, L, E]``: popularities of which each window keeps a part, and draws the rest anew."""
    rng = np.random.default_rng(seed)
    popularity, made = rng.normal(0, 0.7, (LAYERS, EXPERTS)), []
    for _ in range(windows):
        popularity = keeps * popularity + np.sqrt(1 - keeps**2) * rng.normal(0, 0.7, (LAYERS, EXPERTS))
        share = np.exp(popularity) / np.exp(popularity).sum(axis=1, keepdims=True)
        made.append([rng.multinomial(20_000, row) for row in share])
    return np.array(made)


def train(load: np.ndarray, learns: bool) -> dict[str, float]:
    """Decide at each window on the last four, as a job does; judge each move by the ten windows after it."""
    current, record, history = Placement.initial(LAYERS, EXPERTS, RANKS), TrackRecord(), deque(maxlen=4)
    moves: list[tuple[int, Placement, Placement, float, float]] = []
    for number, window in enumerate(load):
        history.append(window)
        record.observe(window.astype(float))
        cost, trust = CostModel(10**8, 0, 0.2, 0.5, 500, 0.1), record.trust if learns else 1.0
        made = plan(
            np.array(history), TOPOLOGY, slots_per_rank=4, current=current, cost=cost, gate="payoff", trust=trust
        )
        if made.decision == "rebalance":
            record.note(made)
            moves.append((number, current, made.placement, made.seconds_saved, made.seconds_spent))
            current = made.placement
    moves = [move for move in moves if move[0] < len(load) - 1]  # the last one is judged by nothing
    kept = []
    for number, before, after, _, _ in moves:
        came = load[number + 1 : number + 11].astype(float)
        gain = predicted_imbalance(came, before) - predicted_imbalance(came, after)
        kept.append(float(gain.mean()) * 0.5 * 0.2 * 500)
    late = [index for index, move in enumerate(moves) if move[0] >= 10]
    return {
        "moves": len(moves),
        "false": sum(value < move[4] for value, move in zip(kept, moves, strict=True)),
        "promised": sum(moves[index][3] for index in late),
        "kept": sum(kept[index] for index in late),
        "net": sum(kept) - sum(move[4] for move in moves),
    }


def test_a_router_that_wanders_stops_moving_experts() -> None:
    load = wandering(1, 40, keeps=0.85)
    blind, learns = train(load, False), train(load, True)
    assert blind["false"] >= 2 and blind["promised"] > 2 * max(blind["kept"], 1.0), "control: it promises much"
    assert learns["false"] < blind["false"] and learns["net"] > blind["net"]
    assert train(wandering(0, 40, keeps=0.0), False)["moves"] <= 1, "what is noise alone is seen by the gate"


@pytest.fixture
def turned() -> tuple[np.ndarray, Plan]:
    """A load, and a plan that is better by 0.5."""
    load = np.array([[3.0, 3, 1, 1]])
    made = plan(load, Topology(2), slots_per_rank=2, current=Placement.initial(1, 4, 2))
    assert made.imbalance_before - made.imbalance_after == pytest.approx(0.5)
    return load, made


def test_trust_is_the_share_that_came_true(turned: tuple[np.ndarray, Plan]) -> None:
    load, made = turned
    record = TrackRecord()
    assert record.trust == 1.0
    record.note(made)
    assert record.trust == 1.0, "nothing came yet"
    record.observe(np.zeros_like(load))
    assert record.trust == 1.0, "no tokens say nothing"
    record.observe(load)
    assert record.trust == pytest.approx(1.0)
    record.observe(load[:, ::-1] * 0 + 1)  # even load: nothing gained
    assert record.trust == pytest.approx((0.25 + 0.05) / 0.55, rel=0.03)


def test_a_record_that_was_saved_is_trusted_as_before(turned: tuple[np.ndarray, Plan]) -> None:
    load, made = turned
    record = TrackRecord()
    for came in (load, np.ones_like(load), np.ones_like(load)):
        record.note(made)
        record.observe(came)
    again = TrackRecord()
    again.resume(json.loads(json.dumps(record.saved())))
    assert again.trust == record.trust < 0.8
    judged = record.judgement(2.0)
    assert again.judgement(2.0) == judged and (judged["judged_plans"], judged["judged_decisions"]) == (3, 6)
    assert judged["predicted_seconds"] == 3.0 and judged["true_seconds"] == pytest.approx(1.0 / 3)
    again.observe(load)
    assert again.judgement(2.0) == judged, "placements are not saved, so nothing judges them further"


@pytest.mark.parametrize(
    "broken",
    ["text", [[1, 2, 3]], [[0.5, float("nan"), 1, 1.0]], [[0.5, 0.1, 0, 1.0]], [[0.5, 0.1, 1, 0.5]] * 101],
)
def test_a_saved_record_that_is_broken_changes_nothing(turned: tuple[np.ndarray, Plan], broken: object) -> None:
    record = TrackRecord()
    record.note(turned[1])
    record.observe(np.ones_like(turned[0]))
    trust = record.trust
    with pytest.raises(ValueError):
        record.resume(broken)
    assert record.trust == trust < 1


def test_a_plan_is_judged_for_as_long_as_it_promised(turned: tuple[np.ndarray, Plan]) -> None:
    """Other loads may come after that, which it did not promise anything for."""
    load, made = turned
    record = TrackRecord(horizon=1)
    record.note(made)
    record.observe(load)
    for _ in range(5):
        record.observe(np.ones_like(load))
    assert record.trust == pytest.approx(1.0)
    control = TrackRecord(horizon=JUDGED)
    control.note(made)
    for came in (load, *[np.ones_like(load)] * 5):
        control.observe(came)
    assert control.trust < 0.3


def test_a_plan_saves_as_much_as_is_believed_of_its_gain() -> None:
    load, current = np.arange(1.0, 17.0)[None], Placement.initial(1, 16, 4)
    cost = CostModel(10**6, 0, 1.0)

    def ask(**terms: Any) -> Plan:
        return plan(load, Topology(4), slots_per_rank=4, current=current, gate="payoff", cost=cost, **terms)

    whole, half = ask(), ask(trust=0.5)
    assert whole.seconds_saved > 0 and half.placement == whole.placement
    assert half.seconds_saved == pytest.approx(0.5 * whole.seconds_saved)
    nothing = ask(trust=0.0)
    assert nothing.decision == "stay" and not len(nothing.moves)


# -- Forecasts: long memory where load is steady, short where it jumps, ahead where it drifts


MEAN = np.linspace(10, 200, 64).reshape(2, 32)


def noisy(mean: np.ndarray, windows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).poisson(mean, (windows, *mean.shape)).astype(float)


def error(guess: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(guess / guess.sum() - truth / truth.sum()).sum())


def forecast(load: np.ndarray) -> np.ndarray:
    return foretell(load).expected


def test_on_steady_load_the_forecast_is_the_mean_of_all() -> None:
    load = noisy(MEAN, 60, 0)
    assert error(forecast(load), load.mean(axis=0)) < 1e-3
    assert not foretell(load).wanders_L.any()


def test_after_a_jump_the_forecast_forgets_what_was_before() -> None:
    load = np.concatenate([noisy(MEAN, 20, 0), noisy(MEAN[:, ::-1], 20, 1)])
    assert error(forecast(load), MEAN[:, ::-1]) < 0.3 * error(load.mean(axis=0), MEAN[:, ::-1])


def test_under_a_steady_drift_the_forecast_is_ahead_of_the_mean() -> None:
    load = np.array([MEAN + t * (MEAN[:, ::-1] - MEAN) / 60 for t in range(40)])
    then = MEAN + 40 * (MEAN[:, ::-1] - MEAN) / 60
    assert error(forecast(load), then) < 0.2 * error(load.mean(axis=0), then)


def test_scenarios_lie_around_the_forecast_and_deviate_farther_than_what_was_seen() -> None:
    load = noisy(10 * MEAN, 8, 0)
    come = foretell(load)
    assert come.scenarios.shape == load.shape and come.mixes.shape[1:] == MEAN.shape
    assert np.allclose(come.scenarios.mean(axis=0), come.expected, rtol=1e-3)
    assert (come.scenarios.std(axis=0) > 1.1 * load.std(axis=0)).mean() > 0.8
    assert 0.8 < come.mixes.std() / come.scenarios.std() < 1.2


def test_windows_without_tokens_are_left_out_of_that_layer_alone() -> None:
    load = noisy(MEAN, 6, 0)
    load[[1, 4], 0] = 0
    expected = forecast(load)
    assert error(expected[0], load[[0, 2, 3, 5], 0].mean(axis=0)) < 0.02
    assert np.allclose(expected[1], load[:, 1].mean(axis=0), rtol=0.05)
    load[:, 0] = 0
    assert not foretell(load).scenarios[:, 0].any()


def test_a_long_history_is_merged_into_means_that_keep_the_newest() -> None:
    load = np.arange(130.0).reshape(130, 1, 1)
    merged = coarsen(load)
    assert len(merged) <= 64
    assert merged[-1, 0, 0] == pytest.approx(np.mean([127, 128, 129]))
