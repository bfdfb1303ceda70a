"""The load to come, foretold from measured windows, and how far it may stray from the forecast.

A layer's forecast is the mean of its windows. Where other forecasters err surely less, it is a blend of seven of them,
weighed by the imbalance that they would have led to. All is judged on shares of tokens.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .parameters import PARAMETERS

Load = NDArray[np.float64]


class ExpectedLoad(NamedTuple):
    """The load to come of each layer."""

    expected: Load  # [L, E], the forecast
    scenarios: Load  # [W, L, E], loads that may come, equally likely
    mixes: Load  # [V, L, E], more of these, to judge a plan by that the scenarios led
    moves_on_L: NDArray[np.bool_]  # layers whose load moves on from window to window, so that they need the blend
    nonstationary_L: NDArray[np.bool_]  # those that are sure of it by themselves

    @property
    def windows(self) -> Load:
        """Return float64 ``[W + V, L, E]``: all scenarios, then all mixes."""
        return np.concatenate([self.scenarios, self.mixes])


def coarsen(load: Load) -> Load:
    """Return at most ``most_windows`` windows: means of equally long runs of neighbouring windows of ``[T, L, E]``. The
    oldest windows that do not fill a run are dropped."""
    run = -(-len(load) // PARAMETERS.most_windows)
    kept = load[len(load) % run :]
    return np.asarray(kept.reshape(-1, run, *load.shape[1:]).mean(axis=1))


def foretell(load: Load, ranks: int = 8, *, stays: bool = False) -> ExpectedLoad:
    """Return a forecast of each layer's load, with scenarios around it, from measured windows.

    Args:
        load: float64 ``[T, L, E]``, oldest first. A window without tokens in a layer counts as that layer's mean.
        ranks: R, over which experts are spread to judge forecasters.
        stays: True: the load does not move on, so the forecast is the mean.
    """
    share_TLE, counted_TL1 = shares(load), load.any(axis=2, keepdims=True)
    mean_LE = share_TLE.sum(axis=0) / np.maximum(counted_TL1.sum(axis=0), 1)
    share_TLE = np.where(counted_TL1, share_TLE, mean_LE)
    deviation_NLE, moves_L, nonstationary_L = _deviations(share_TLE), *np.zeros((2, len(mean_LE)), dtype=bool)
    if len(load) >= PARAMETERS.least_windows and load.shape[2] > 1 and not stays:
        after = np.arange(max(len(load) - PARAMETERS.judged, 2), len(load) + 1)
        made_FCLE, came_CLE = _forecasts(share_TLE, after), share_TLE[after[:-1]]
        moves_L, nonstationary_L = _which_move_on(share_TLE, made_FCLE[:, :-1], came_CLE)
        if moves_L.any():
            blend_CLE = _blended(made_FCLE[:, :, moves_L], came_CLE[:, moves_L], ranks)
            newest = np.arange(-len(deviation_NLE), 0) % len(came_CLE)
            mean_LE[moves_L] = blend_CLE[-1]
            deviation_NLE[:, moves_L] = (came_CLE[:, moves_L] - blend_CLE[:-1])[newest]
    expected, scenarios, mixes = _scenarios(mean_LE, deviation_NLE, load.mean(axis=0).sum(axis=1, keepdims=True))
    return ExpectedLoad(expected, scenarios, mixes, moves_L, nonstationary_L)


def shares(load: Load) -> Load:
    """Return ``load`` ``[..., E]`` divided by its sum over the last axis; zeros where the sum is 0."""
    total = load.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(load, total, out=np.zeros_like(load), where=total > 0))


def _deviations(share_TLE: Load) -> Load:
    """float64 ``[N, L, E]``, by how much the newest windows deviate from their mean.

    The mean of n windows errs itself: errors to come are ``sqrt((n + 1) / (n - 1))`` times the deviations seen.
    """
    newest, windows = share_TLE[-PARAMETERS.scenarios :], len(share_TLE)
    scale = np.sqrt((windows + 1) / windows * len(newest) / max(len(newest) - 1, 1))
    return np.asarray((newest - newest.mean(axis=0)) * PARAMETERS.spread * scale)


def _blended(made_FCLE: Load, came_CLE: Load, ranks: int) -> Load:
    """float64 ``[C, L, E]``: forecasters weighed by what placements made for their past forecasts would have led to."""
    experts = came_CLE.shape[2]
    made_NE = made_FCLE[:, :-1].reshape(-1, experts)
    came_NE = np.tile(came_CLE.reshape(-1, experts), (len(made_FCLE), 1))
    whole = ((0, 0), (0, -experts % ranks))
    dealt_NE = deal(np.pad(made_NE, whole), ranks)
    came_NR = np.take_along_axis(np.pad(came_NE, whole), dealt_NE, axis=1).reshape(len(made_NE), ranks, -1).sum(axis=2)
    loss_N = came_NR.max(axis=1) / came_NR.mean(axis=1)
    loss_N += PARAMETERS.between_equals * 0.5 * np.abs(made_NE - came_NE).sum(axis=1)
    loss_FL = loss_N.reshape(len(made_FCLE), *came_CLE.shape[:2]).mean(axis=1)
    worse_FL = (loss_FL - loss_FL.min(axis=0)) / np.maximum(loss_FL.min(axis=0) - 1.0, 1e-3)
    weight_FL = np.exp(-worse_FL / PARAMETERS.sharpness)
    return np.asarray(np.einsum("fl,fcle->cle", weight_FL / weight_FL.sum(axis=0), made_FCLE))


def deal(load_NE: NDArray[np.floating], ranks: int) -> NDArray[np.int32]:
    """Return int32 ``[N, E]``, for each row the items of rank 0, of rank 1, ..., E/R each. The heaviest item is dealt
    first, each to the rank with the lightest load that has room. With E = R the items stay in their order."""
    rows, items = load_NE.shape
    room, first_N = items // ranks, np.arange(rows) * ranks
    if room == 1:
        return np.tile(np.arange(items, dtype=np.int32), (rows, 1))
    load_NR, held_NR = np.zeros((rows, ranks), dtype=load_NE.dtype), np.zeros(rows * ranks, dtype=np.int64)
    dealt_NE = np.empty(rows * items, dtype=np.int32)
    order_EN = np.argsort(-load_NE, axis=1, kind="stable").T
    for item_N, each_N in zip(order_EN, np.take_along_axis(load_NE.T, order_EN, axis=0), strict=True):
        rank_N = first_N + load_NR.argmin(axis=1)
        held_N = held_NR[rank_N]
        dealt_NE[rank_N * room + held_N] = item_N
        held_NR[rank_N] = held_N + 1
        load_NR.reshape(-1)[rank_N] += np.where(held_N + 1 == room, np.inf, each_N)
    return dealt_NE.reshape(rows, items)


def _forecasts(share_TLE: Load, after: NDArray[np.int64]) -> Load:
    """float64 ``[7, C, L, E]``, what is foretold after 2 or more windows: their mean, that of the newest four and two,
    the last, it with the mean, the trend, and what came after the window most like the last."""
    mean, four = (
        np.stack([share_TLE[max(end - most, 0) : end].mean(axis=0) for end in after]) for most in (after[-1], 4)
    )
    last, before = share_TLE[after - 1], share_TLE[after - 2]
    alike_CL = 1 + np.stack([((share_TLE[: n - 1] - share_TLE[n - 1]) ** 2).sum(axis=2).argmin(axis=0) for n in after])
    followed = np.take_along_axis(share_TLE, alike_CL[:, :, None], axis=0)
    trend = shares(np.maximum(2.0 * last - before, 0.0))
    return np.stack([mean, four, (last + before) / 2, last, (last + mean) / 2, trend, followed])


def _which_move_on(share_TLE: Load, made_FCLE: Load, came_CLE: Load) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool ``[L]`` each: layers that are forecast by their blend, and those whose load surely moves on by itself.

    Forecasters are judged by the square of their errors in units of an expert's share, and windows by whether
    neighbours are more alike than others. A layer of few experts is rarely sure by itself; layers together are.
    """
    unit_LE = np.maximum(share_TLE.mean(axis=0), 1e-9)
    error_FLE = ((made_FCLE - came_CLE) ** 2).mean(axis=1) / unit_LE
    lags = range(1, len(share_TLE))
    apart_NLE = np.stack([((share_TLE[lag:] - share_TLE[:-lag]) ** 2).mean(axis=0) for lag in lags]) / unit_LE
    nearer_LE = apart_NLE[1:].mean(axis=0) - apart_NLE[0]
    gain_NLE = np.concatenate([error_FLE[0] - error_FLE[1:], nearer_LE[None]])
    gain_NL = gain_NLE.mean(axis=2)
    error_NL = np.maximum(gain_NLE.std(axis=2, ddof=1) / np.sqrt(gain_NLE.shape[2]), 1e-12)
    together_N = gain_NL.sum(axis=1) > PARAMETERS.moves_on * np.sqrt((error_NL**2).sum(axis=1))
    alone_L = (gain_NL > PARAMETERS.moves_on * error_NL).any(axis=0)
    return alone_L | (gain_NL > PARAMETERS.moves_on_each * error_NL)[together_N].any(axis=0), alone_L


def _scenarios(share_LE: Load, deviation_NLE: Load, total_L1: Load) -> tuple[Load, Load, Load]:
    """Return the forecast, scenarios and mixes of all layers, in tokens of the mean window."""
    expected, count = share_LE * total_L1, len(deviation_NLE)
    if count < 2:
        return expected, expected[None], expected[None][:0]
    choice = np.random.default_rng(count).integers(0, count, (PARAMETERS.mixes, *share_LE.shape))
    mixed = np.take_along_axis(deviation_NLE, choice, axis=0)
    may_come, mixes = (np.maximum(share_LE + one, 0.0) * total_L1 for one in (deviation_NLE, mixed))
    return expected, may_come, mixes
