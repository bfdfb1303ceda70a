"""A mixture of forecasters: the long mean where a load stays, what follows it where it moves on."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.planner.loads import autoregressive, normal, rotating, skewed

from eplb_runtime.load.forecast import foretell
from eplb_runtime.load.mixture import FORECASTERS, LEAST_WINDOWS, Mixture, foretold, mixture
from eplb_runtime.placement import Placement
from eplb_runtime.planner import plan
from eplb_runtime.topology import Topology


def share(load: np.ndarray) -> np.ndarray:
    return np.asarray(load / load.sum(axis=2, keepdims=True))


def mixed(load: np.ndarray, ranks: int = 8) -> Mixture:
    made = mixture(share(load), ranks)
    assert made is not None
    return made


def error(guess_LE: np.ndarray, came_LE: np.ndarray) -> float:
    return float(np.abs(share(guess_LE[None]) - share(came_LE[None])).sum(axis=2).mean())


def weight(made: Mixture, *names: str) -> np.ndarray:
    return np.asarray(made.weight_CL[[FORECASTERS.index(name) for name in names]].sum(axis=0))


def half_way_turns(windows: int, experts: int, seed: int) -> np.ndarray:
    """Loads that go from one regime to the next in turn, another every second window, half of the way between."""
    return rotating(windows, 4, experts, seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_load_that_stays_keeps_the_mean_of_all_windows(seed: int) -> None:
    for load in (skewed(8, (12, 128), 0.8, 0.2, seed), normal(8, 12, 128, seed=seed)):
        assert mixture(share(load), 16) is None
        assert np.allclose(foretell(load, ranks=16).expected, load.mean(axis=0))
        assert not foretell(load, ranks=16).wanders_L.any()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_load_that_wanders_is_foretold_by_its_newest_windows(seed: int) -> None:
    load = autoregressive(9, 6, 256, seed)
    made = mixed(load[:8], 16)
    assert made.moves_L.all() and made.surely_L.all()
    assert weight(made, "last", "mean of 2", "half way to last").mean() > 0.4 > 0.1 > weight(made, "mean").mean()
    expected = foretell(load[:8], ranks=16).expected
    assert error(expected, load[8]) < 0.75 * error(load[:8].mean(axis=0), load[8])


def test_a_load_that_goes_on_rising_is_foretold_ahead_of_its_newest_window() -> None:
    generator = np.random.default_rng(3)
    first, last = generator.lognormal(0.0, 0.6, (2, 4, 128)) * 1000
    load = np.array([first + (last - first) * at / 12 for at in range(9)])
    made = mixed(load[:8], 16)
    assert made.moves_L.all() and (weight(made, "rise") > 0.4).all()
    assert error(foretell(load[:8], ranks=16).expected, load[8]) < 0.5 * error(load[7], load[8])


def test_regimes_that_come_again_are_foretold_by_what_followed_them() -> None:
    regime = np.random.default_rng(4).lognormal(0.0, 0.6, (3, 4, 128)) * 1000
    load = np.random.default_rng(5).poisson(np.concatenate([regime] * 4)).astype(float)
    made = mixed(load[:10], 16)
    assert made.moves_L.all() and (weight(made, "repeat") > 0.5).all()
    assert error(foretell(load[:10], ranks=16).expected, load[10]) < 0.5 * error(load[9], load[10])


def test_only_layers_that_move_on_leave_the_mean() -> None:
    load = np.concatenate([skewed(8, (2, 128), 0.8, 0.2, 6), autoregressive(8, 2, 128, 6)], axis=1)
    made = foretell(load, ranks=16)
    assert made.wanders_L.tolist() == [False, False, True, True]
    assert np.allclose(made.expected[:2], load[:, :2].mean(axis=0))
    assert not np.allclose(made.expected[2:], load[:, 2:].mean(axis=0), rtol=0.05)


def test_weights_change_within_two_windows_once_a_load_moves_on() -> None:
    """Eight windows that stay, then a rise: after two windows of it the newest counts for more than the long mean."""
    generator = np.random.default_rng(7)
    here, there = generator.lognormal(0.0, 0.6, (2, 4, 128)) * 5000
    mean = np.array([here] * 6 + [here + (there - here) * step / 4 for step in (1, 2)])
    load = generator.poisson(mean).astype(float)
    made = mixed(load, 16)
    assert made.moves_L.all()
    assert error(made.share_LE, mean[-1]) < 0.5 * error(load.mean(axis=0), mean[-1])


def test_forecasts_are_made_from_what_was_known_and_errors_are_what_came_less_these() -> None:
    load = share(autoregressive(12, 2, 64, 8))
    whole, before = foretold(load), foretold(load[:-1])
    assert whole.shape == (len(FORECASTERS), 9, 2, 64)
    assert np.allclose(whole[:, :-1], before[:, 1:])
    made = mixture(load, 8)
    assert made is not None
    mixed_NLE = np.einsum("cl,cnle->nle", made.weight_CL, whole)
    assert np.allclose(made.errors_NLE, load[-8:] - mixed_NLE[:-1])
    assert np.allclose(made.share_LE, mixed_NLE[-1]) and np.allclose(made.weight_CL.sum(axis=0), 1.0)


def test_scenarios_of_a_load_that_moves_on_stray_by_the_errors_of_its_forecasts() -> None:
    load = autoregressive(8, 3, 128, 9)
    made, errors = foretell(load, ranks=16), mixed(load, 16).errors_NLE
    total = made.expected.sum(axis=1)[:, None]
    apart = np.abs(made.scenarios[-1] / total - made.expected / total - errors[-1])
    floor = made.expected / total + errors[-1] < 0
    assert apart[~floor].max() < 1e-9


def test_the_scale_of_counts_does_not_matter_and_the_same_windows_give_the_same_bytes() -> None:
    load = autoregressive(8, 3, 128, 10)
    made, again, scaled = foretell(load, ranks=16), foretell(load.copy(), ranks=16), foretell(1024.0 * load, ranks=16)
    assert made.expected.tobytes() == again.expected.tobytes()
    assert made.scenarios.tobytes() == again.scenarios.tobytes()
    assert np.allclose(scaled.expected, 1024.0 * made.expected) and (scaled.wanders_L == made.wanders_L).all()


def test_a_layer_is_foretold_alike_whatever_the_others_do() -> None:
    moving, steady = autoregressive(8, 1, 128, 11), skewed(8, (5, 128), 0.8, 0.2, 11)
    alone = foretell(moving, ranks=16).expected[0]
    among = foretell(np.concatenate([steady, moving], axis=1), ranks=16).expected[5]
    assert np.allclose(alone, among)


def test_layers_of_few_experts_are_sure_together() -> None:
    load = autoregressive(8, 24, 16, 12)
    made = mixed(load, 4)
    assert not made.surely_L.all()
    assert made.moves_L.sum() > made.surely_L.sum()


def test_few_windows_are_for_no_mixture() -> None:
    assert mixture(share(autoregressive(LEAST_WINDOWS - 1, 2, 64, 1)), 8) is None
    assert mixture(share(autoregressive(LEAST_WINDOWS, 2, 64, 1)), 8) is not None


def test_rotating_regimes_are_planned_for_better_than_by_the_long_mean() -> None:
    judged = {}
    for forecast in ("auto", "window"):
        peaks = []
        for seed in (71, 72):
            load, current = half_way_turns(14, 64, seed), Placement.initial(4, 64, 8)
            for end in range(8, 14):
                current = plan(
                    load[end - 8 : end], Topology(8), slots_per_rank=8, current=current, forecast=forecast
                ).placement
                came_LE, rank_LE = load[end], current.home_rank
                ranks_LR = np.stack([np.bincount(rank, came, 8) for rank, came in zip(rank_LE, came_LE, strict=True)])
                peaks.append((ranks_LR.max(axis=1) / ranks_LR.mean(axis=1)).mean())
        judged[forecast] = float(np.mean(peaks))
    assert judged["auto"] < 1.0 + 0.7 * (judged["window"] - 1.0)
