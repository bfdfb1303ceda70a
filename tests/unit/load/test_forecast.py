"""Forecasts: long memory where load is steady, short where it jumps."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_runtime.load.forecast import (
    JITTER,
    JITTERS,
    coarsen,
    exponential_average,
    forecast,
    foretell,
    is_restless,
    last_change,
    scenarios,
    variance_of_next,
)


def noisy(mean: np.ndarray, windows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).poisson(mean, (windows, *mean.shape)).astype(float)


MEAN = np.linspace(10, 200, 32).reshape(2, 16)


def error(guess: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(guess / guess.sum() - truth / truth.sum()).sum())


def test_on_steady_load_the_forecast_is_nearly_the_mean_of_all() -> None:
    load = noisy(MEAN, 60, 0)
    assert error(forecast(load), MEAN) < 1.2 * error(load.mean(axis=0), MEAN) < error(load[-1], MEAN)


def test_after_a_jump_the_forecast_forgets_what_was_before() -> None:
    load = np.concatenate([noisy(MEAN, 20, 0), noisy(MEAN[:, ::-1], 20, 1)])
    assert error(forecast(load), MEAN[:, ::-1]) < 0.3 * error(load.mean(axis=0), MEAN[:, ::-1])


def test_under_a_steady_drift_the_trend_is_ahead_of_every_average() -> None:
    load = np.array([MEAN + t * (MEAN[:, ::-1] - MEAN) / 60 for t in range(40)])
    then = MEAN + 40 * (MEAN[:, ::-1] - MEAN) / 60
    assert error(forecast(load, "trend"), then) < error(forecast(load, "average"), then)
    # 16 experts on 8 ranks are placed alike by nearly every forecast: only their errors tell the mixture which to take.
    assert error(forecast(load, "auto"), then) < 0.1 * error(forecast(load, "window"), then)


def test_an_exponential_average_weighs_windows_as_its_memory_says() -> None:
    load = np.array([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    assert exponential_average(load, 0.5)[-1, 0, 0] == pytest.approx((1 / 4 + 2 / 2 + 4) / (1 / 4 + 1 / 2 + 1))
    assert exponential_average(load, 0.0)[-1, 0, 0] == pytest.approx(7 / 3)


def test_a_layer_that_changes_forgets_what_was_before_and_the_others_do_not() -> None:
    load = noisy(MEAN, 12, 0)
    load[9:, 1] = noisy(MEAN[1, ::-1], 3, 1)
    assert last_change(load).tolist() == [0, 9]
    made = forecast(load)
    assert error(made[0], MEAN[0]) < 0.05
    assert error(made[1], MEAN[1, ::-1]) < 0.1


def test_noise_alone_is_no_change() -> None:
    load = np.maximum(np.random.default_rng(0).normal(1, 0.3, (16, 20, 64)), 0)
    assert not last_change(load).any()


def test_where_nothing_lasts_the_newest_windows_are_not_believed_more_than_the_others() -> None:
    generator = np.random.default_rng(0)
    hot_sets = [np.where(np.arange(64) // 8 == hot, 2000.0, 200.0) for hot in (0, 3, 5)]
    rotating = np.concatenate(
        [generator.poisson(hot, (windows, 64)) for hot, windows in zip(hot_sets, (3, 3, 2), strict=True)]
    )
    once = np.concatenate(
        [generator.poisson(hot, (windows, 64)) for hot, windows in zip(hot_sets[:2], (4, 4), strict=True)]
    )
    back = np.concatenate([generator.poisson(hot_sets[index], (2, 64)) for index in (0, 1, 0, 1)])
    load = np.stack([rotating, once, back], axis=1).astype(float)
    assert is_restless(load).tolist() == [True, False, False], "what was there before is no news"
    made = forecast(load)
    assert np.allclose(made[0], load[:, 0].mean(axis=0))
    assert error(made[1], hot_sets[1]) < 0.1, "control: a change that may last is followed"
    assert not is_restless(noisy(MEAN, 16, 0)).any()
    drift = np.array([MEAN + t * (MEAN[:, ::-1] - MEAN) / 20 for t in range(20)])
    assert not is_restless(drift).any()


def test_scenarios_lie_around_the_forecast_and_stray_farther_than_what_was_seen() -> None:
    load = noisy(10 * MEAN, 8, 0)
    expected = forecast(load, "window")
    come, mixed = scenarios(load, expected)
    assert come.shape == load.shape and mixed.shape[1:] == MEAN.shape
    assert np.allclose(come.mean(axis=0), expected, rtol=1e-3)
    assert (come.std(axis=0) > 1.1 * load.std(axis=0)).all()
    assert 0.8 < mixed.std() / come.std() < 1.2


def test_the_next_window_strays_by_a_share_of_the_only_one_and_no_more_where_an_expert_dominates() -> None:
    load = np.array([[0.0, 10.0, 30.0, 1000.0], [20.0, 20.0, 20.0, 20.0]])
    deviation = np.sqrt(variance_of_next(load, 4))
    assert np.allclose(deviation[:, :3], JITTER * load[:, :3])
    assert np.allclose(deviation[:, 3], JITTER * np.minimum(load[:, 3], JITTERS * load.sum(axis=1) / 4))
    assert np.allclose(np.sqrt(variance_of_next(1000 * load, 64)), 1000 * np.sqrt(variance_of_next(load, 64)))
    assert np.sqrt(variance_of_next(load, 64))[0, 3] < JITTER * 1000 / 10


def test_one_window_is_its_own_only_scenario() -> None:
    come, mixed = scenarios(MEAN[None], MEAN)
    assert np.array_equal(come, MEAN[None]) and len(mixed) == 0


@pytest.mark.parametrize("method", ["auto", "window", "last", "average", "trend"])
def test_one_window_is_its_own_forecast(method: str) -> None:
    assert np.array_equal(forecast(MEAN[None], method), MEAN)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, window"):
        forecast(MEAN[None], "oracle")


def test_a_long_history_is_merged_into_means_that_keep_the_newest() -> None:
    load = np.arange(130.0).reshape(130, 1, 1)
    merged = coarsen(load)
    assert len(merged) <= 64
    assert merged[-1, 0, 0] == pytest.approx(np.mean([127, 128, 129]))


def test_windows_without_tokens_say_nothing() -> None:
    """A layer that some windows do not reach is foretold as if they had not been; the others have them all."""
    generator = np.random.default_rng(5)
    load = generator.poisson(200 * generator.lognormal(0, 0.5, 16), (8, 3, 16)).astype(np.float64)
    load[[2, 5], 1] = 0
    load[:, 2] = 0
    expected, seen, mixes, _ = foretell(load)
    reached = load[[0, 1, 3, 4, 6, 7], 1:2]
    alone = foretell(reached)
    assert np.array_equal(expected[1:2], alone[0]) and np.array_equal(seen[:6, 1:2], alone[1])
    assert np.array_equal(mixes[:, 1:2], alone[2]) and (seen[:, :2].sum(axis=2) > 0).all()
    whole = foretell(load[:, :1])[:3]
    assert all(
        np.array_equal(one[..., :1, :], other) for one, other in zip((expected, seen, mixes), whole, strict=True)
    )
    assert not expected[2].any() and not seen[:, 2].any()
    gaps = np.concatenate([reached, np.zeros_like(reached)])
    assert all(np.array_equal(one, other) for one, other in zip(foretell(gaps), alone, strict=True))
