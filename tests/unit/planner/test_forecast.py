"""Forecasts: long memory where load is steady, short where it jumps, ahead where it drifts."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_runtime.planner.forecast import coarsen, foretell

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
