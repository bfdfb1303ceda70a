"""The load to come, foretold from measured windows, and how far it may stray from the forecast.

A layer's forecast is the mean of its windows. Where other forecasters err surely less, it is a blend of seven of them,
weighed by the imbalance that they would have led to. All is judged on shares of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..utils.jit import jit, ready

MOST_WINDOWS = 64
"""Longer histories are merged into at most so many windows."""
Load = NDArray[np.float64]


@dataclass(frozen=True)
class ForecastParameters:
    """Constants of the forecast, tuned on one seed of the families in ``tests/benchmarks/planner``.

    Args:
        scenarios: the newest windows whose deviations the load to come may have.
        mixes: further scenarios, in which each expert deviates as in a window of its own.
        spread: how much farther than seen scenarios deviate: a plan that fits what was seen meets what was not.
        least_windows: fewer do not tell a load that moves on from one that is noisy.
        judged: the newest windows on which forecasters are judged.
        sure: standard errors by which another forecaster must err less than the mean does, in one layer or in all
            layers together.
        once_sure: standard errors by which each layer must then.
        sharpness: a forecaster whose loss is larger by this share of what the least one is above 1 weighs 1 / e.
        between_equals: weight of the share of tokens foretold for other experts, in the loss.
    """

    scenarios: int = 10
    mixes: int = 8
    spread: float = 1.2
    least_windows: int = 5
    judged: int = 8
    sure: float = 4.0
    once_sure: float = 1.0
    sharpness: float = 0.1
    between_equals: float = 0.01


PARAMETERS = ForecastParameters()


class ExpectedLoad(NamedTuple):
    """The load to come of each layer.

    Args:
        expected: float64 ``[L, E]``, the forecast.
        scenarios: float64 ``[W, L, E]``, loads that may come, equally likely.
        mixes: float64 ``[V, L, E]``, more of these, to judge a plan by that the scenarios led.
        wanders_L: bool, layers whose load surely moves on from window to window.
    """

    expected: Load
    scenarios: Load
    mixes: Load
    wanders_L: NDArray[np.bool_]

    @property
    def windows(self) -> Load:
        """float64 ``[W + V, L, E]``, scenarios and mixes."""
        return np.concatenate([self.scenarios, self.mixes])


class _Foretold(NamedTuple):
    """Of one layer, in shares: the forecast, and by how much windows may deviate from it, ``[N, E]``."""

    share_E: Load
    deviation_NE: Load


class _Blend(NamedTuple):
    """Forecasters of one layer.

    Args:
        made_FCE: what each of them foretold after so many windows, and now.
        came_CE: what came.
        gain_N, error_N: by how much others err less than the mean, and the standard error of that.
    """

    made_FCE: Load
    came_CE: Load
    gain_N: Load
    error_N: Load


def coarsen(load: Load) -> Load:
    """Merge runs of neighbouring windows of ``[T, L, E]`` into their means, so that at most ``MOST_WINDOWS`` are left.

    What does not fill a run is left out at the old end.
    """
    run = -(-len(load) // MOST_WINDOWS)
    if run <= 1:
        return load
    kept = load[len(load) % run :]
    return np.asarray(kept.reshape(-1, run, *load.shape[1:]).mean(axis=1))


def foretell(load: Load, ranks: int = 8) -> ExpectedLoad:
    """Forecast each layer by itself; windows in which a layer has no tokens are left out for that layer.

    Args:
        load: float64 ``[T, L, E]``, oldest first; ``ranks``: R, over which experts are spread to judge forecasters.
    """
    layers, experts = load.shape[1:]
    foretold: list[_Foretold] = []
    blends: dict[int, _Blend] = {}
    for layer in range(layers):
        share_TE = shares(load[load[:, layer].any(axis=1), layer])
        if not len(share_TE):
            foretold.append(_Foretold(np.zeros(experts), np.zeros((1, experts))))
            continue
        foretold.append(_of_the_mean(share_TE))
        if len(share_TE) >= PARAMETERS.least_windows and experts > 1:
            blends[layer] = _blend(share_TE)
    moves_L, wanders_L = _which_move_on(blends, layers)
    for layer in np.flatnonzero(moves_L).tolist():
        foretold[layer] = _blended(blends[layer], ranks)
    return _scenarios(foretold, load, wanders_L)


def shares(load: Load) -> Load:
    """``load`` ``[..., E]`` over its sum; zeros where there is none."""
    total = load.sum(axis=-1, keepdims=True)
    return np.divide(load, total, out=np.zeros_like(load), where=total > 0)


def _of_the_mean(share_TE: Load) -> _Foretold:
    """The mean, with the deviations of the newest windows from theirs.

    The mean of n windows errs itself: errors to come are ``sqrt((n + 1) / (n - 1))`` times the deviations seen.
    """
    newest, windows = share_TE[-PARAMETERS.scenarios :], len(share_TE)
    scale = np.sqrt((windows + 1) / windows * len(newest) / max(len(newest) - 1, 1))
    return _Foretold(share_TE.mean(axis=0), (newest - newest.mean(axis=0)) * PARAMETERS.spread * scale)


def _blend(share_TE: Load) -> _Blend:
    """Seven forecasters, judged on the newest windows by the square of their errors in units of an expert's share."""
    windows = len(share_TE)
    after = np.arange(max(windows - PARAMETERS.judged, 2), windows + 1)
    made_FCE = _forecasts(share_TE, after)
    came_CE = share_TE[after[:-1]]
    unit_E = np.maximum(share_TE.mean(axis=0), 1e-9)
    error_FE = ((made_FCE[:, :-1] - came_CE) ** 2).mean(axis=1) / unit_E
    lag_NE = np.stack([((share_TE[lag:] - share_TE[:-lag]) ** 2).mean(axis=0) for lag in range(1, windows)]) / unit_E
    nearer_E = lag_NE[1:].mean(axis=0) - lag_NE[0]  # neighbours are more alike than others: the load wanders
    gain_NE = np.concatenate([error_FE[0] - error_FE[1:], nearer_E[None]])
    noise_N = gain_NE.std(axis=1, ddof=1) / np.sqrt(gain_NE.shape[1])
    return _Blend(made_FCE, came_CE, gain_NE.mean(axis=1), np.maximum(noise_N, 1e-12))


def _blended(blend: _Blend, ranks: int) -> _Foretold:
    """The blend of forecasters, weighed by what placements made for their past forecasts would have led to."""
    came_CE = np.ascontiguousarray(blend.came_CE)
    loss_F = np.empty(len(blend.made_FCE))
    for number, made_CE in enumerate(blend.made_FCE):
        misplaced = 0.5 * np.abs(made_CE[:-1] - came_CE).sum(axis=1).mean()
        loss_F[number] = ready(dealt_imbalance)(made_CE, came_CE, ranks) + PARAMETERS.between_equals * misplaced
    worse_F = (loss_F - loss_F.min()) / max(loss_F.min() - 1.0, 1e-3)
    weight_F = np.exp(-worse_F / PARAMETERS.sharpness)
    blend_CE = np.tensordot(weight_F / weight_F.sum(), blend.made_FCE, 1)
    return _Foretold(blend_CE[-1], came_CE - blend_CE[:-1])


@jit(error_model="numpy")
def dealt_imbalance(made_CE: Load, came_CE: Load, ranks: int) -> float:
    """Mean imbalance of what came, on ranks that balance what was foretold: heaviest first, each to the lightest."""
    total, most = 0.0, -(-came_CE.shape[1] // ranks)
    for window in range(len(came_CE)):
        made_R, came_R, room_R = np.zeros(ranks), np.zeros(ranks), np.full(ranks, most)
        for expert in np.argsort(-made_CE[window], kind="mergesort"):
            rank = np.argmin(made_R)
            came_R[rank] += came_CE[window, expert]
            room_R[rank] -= 1
            made_R[rank] = made_R[rank] + made_CE[window, expert] if room_R[rank] else np.inf
        total += came_R.max() / came_R.mean()
    return total / len(came_CE)


def _forecasts(share_TE: Load, after: NDArray[np.int64]) -> Load:
    """float64 ``[7, C, E]``, what is foretold after 2 or more windows: their mean, that of the newest four and two, the
    last, it with the mean, the trend, and what came after the window most like the last."""
    sum_TE = np.cumsum(share_TE, axis=0)
    mean_CE, last_CE, before_CE = sum_TE[after - 1] / after[:, None], share_TE[after - 1], share_TE[after - 2]
    newest_N = np.stack([np.maximum(after - 4, 0), after], axis=1).ravel()[:-1]
    four_CE = np.add.reduceat(share_TE, newest_N, axis=0)[::2] / np.minimum(after, 4)[:, None]
    trend_CE = shares(np.maximum(2.0 * last_CE - before_CE, 0.0))
    alike_C = [1 + int(((share_TE[: end - 1] - share_TE[end - 1]) ** 2).sum(axis=1).argmin()) for end in after]
    near_CE = (last_CE + before_CE) / 2
    return np.stack([mean_CE, four_CE, near_CE, last_CE, (last_CE + mean_CE) / 2, trend_CE, share_TE[alike_C]])


def _which_move_on(blends: dict[int, _Blend], layers: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool ``[L]`` each: layers that are forecast by their blend, and those whose load surely moves on by itself.

    A layer of few experts is rarely sure by itself; layers together are.
    """
    moves_L, wanders_L = np.zeros(layers, dtype=bool), np.zeros(layers, dtype=bool)
    if blends:
        gain_BN = np.stack([one.gain_N for one in blends.values()])
        error_BN = np.stack([one.error_N for one in blends.values()])
        together_N = gain_BN.sum(axis=0) > PARAMETERS.sure * np.sqrt((error_BN**2).sum(axis=0))
        alone_B = (gain_BN > PARAMETERS.sure * error_BN).any(axis=1)
        with_others_B = (gain_BN > PARAMETERS.once_sure * error_BN)[:, together_N].any(axis=1)
        moves_L[list(blends)] = alone_B | with_others_B
        wanders_L[list(blends)] = alone_B
    return moves_L, wanders_L


def _scenarios(foretold: list[_Foretold], load: Load, wanders_L: NDArray[np.bool_]) -> ExpectedLoad:
    """Scenarios and mixes of all layers, in tokens of the mean window; a layer with fewer has them more than once."""
    total_L1 = load.mean(axis=0).sum(axis=1, keepdims=True)
    share_LE = np.stack([one.share_E for one in foretold])
    expected = share_LE * total_L1
    count = min(len(load), PARAMETERS.scenarios)
    if count < 2:
        return ExpectedLoad(expected, expected[None], expected[None][:0], wanders_L)
    newest = [one.deviation_NE[np.arange(-count, 0) % len(one.deviation_NE)] for one in foretold]
    deviation = np.stack(newest, axis=1)
    choice = np.random.default_rng(count).integers(0, count, (PARAMETERS.mixes, *share_LE.shape))
    mixed = np.take_along_axis(deviation, choice, axis=0)
    may_come, mixes = (np.maximum(share_LE + one, 0.0) * total_L1 for one in (deviation, mixed))
    return ExpectedLoad(expected, may_come, mixes, wanders_L)
