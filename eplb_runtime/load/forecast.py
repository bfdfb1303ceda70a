"""Forecasts of load from what it was: window, exponential average, trend, or by default what each layer calls for.

Steady traffic gets a long memory, traffic that moves on a mixture of forecasters, weighed by how well each would have
balanced the windows already seen; what came before a change of domain is forgotten at once. `scenarios` says how what
comes may stray from the forecast.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..utils.jit import jit
from .drift import has_just_changed
from .mixture import mixture
from .placement_loss import JUDGED_WINDOWS, dealt_imbalance, what_came

MEMORIES = (1.0, 0.7, 0.5, 0.25, 0.1, 0.0)
"""Weights of the newest window that averages are tried with; 1 remembers the last window alone, 0 all alike."""
LONG_MEMORY = 0.0
"""The one that is taken where none is surely better."""
SURE = 3.0
"""Standard errors by which it must be: where windows differ by chance alone, one of several seems better by two errors
in a fifth of all layers."""
BETWEEN_EQUALS = 1e-3
"""Weight of the error itself: it decides between forecasts that balance equally well."""
CHANGE_RATIO = 8.0
"""A change must stand out so many times from the noise. Measured: noise alone gives up to 1.4; windows of 1,000 tokens
of gpt-oss-20b with requests in random order 1 to 5, over changing domains up to 12."""
OFTEN = 2
"""Changes to what was never seen before, after which another is expected."""
METHODS = ("auto", "window", "last", "average", "trend")
TREND_DAMPING = 0.5
MOST_WINDOWS = 64
"""Longer histories are merged into at most so many windows."""

Load = NDArray[np.float64]


def coarsen(load: Load) -> Load:
    """Merge runs of neighbouring windows of ``[T, L, E]`` into their means, so that at most ``MOST_WINDOWS`` are left.

    What does not fill a run is left out at the old end.
    """
    run = -(-len(load) // MOST_WINDOWS)
    if run <= 1:
        return load
    kept = load[len(load) % run :]
    return np.asarray(kept.reshape(-1, run, *load.shape[1:]).mean(axis=1))


def exponential_average(load: Load, newest_weight: float, newest: int | None = None) -> Load:
    """float64 ``[T, L, E]``: for each window the average up to it, each older one ``1 - newest_weight`` lighter.

    Weights are normalised, so that the first windows are plain means rather than bound to the first one.

    Args:
        newest: only of so many of the newest windows; None: of all.
    """
    left_out = 0 if newest is None else max(len(load) - newest, 0)
    averages = np.empty((len(load) - left_out, *load.shape[1:]))
    total, weight = np.zeros(load.shape[1:]), 0.0
    for index, window in enumerate(load):
        total *= 1.0 - newest_weight
        total += window
        weight = weight * (1.0 - newest_weight) + 1.0
        if index >= left_out:
            np.divide(total, weight, out=averages[index - left_out])
    return averages


def _with_drift(fast: Load, slow: Load) -> Load:
    return np.maximum(fast + TREND_DAMPING * (fast - slow), 0.0)


def forecast(load: Load, method: str = "auto", ranks: int = 8) -> Load:
    """The load to plan for, each layer by itself.

    Args:
        load: float64 ``[T, L, E]``, oldest first; ``coarsen`` it before if T is large.
        method: ``"window"`` (mean of all windows), ``"last"``, ``"average"`` (exponential), ``"trend"`` (likewise, with
            the drift), ``"auto"`` (the mean, or a mixture of forecasters where the load surely does not stay). Where
            several are possible, each layer takes what would have balanced its past windows best, and windows before a
            change of domain are forgotten.
        ranks: R, over which the experts are spread to judge it.

    Returns:
        float64 ``[L, E]``.

    Raises:
        ValueError: the method is unknown.
    """
    if method not in METHODS:
        raise ValueError(f"forecast={method!r} is unknown; choose one of: {', '.join(METHODS)}")
    if method == "window" or len(load) == 1:
        return np.asarray(load.mean(axis=0))
    if method == "last":
        return np.asarray(load[-1])
    if method == "auto":
        return _adaptive(load, ranks).expected
    result = np.empty(load.shape[1:])
    restless_L = is_restless(load)
    if restless_L.any():
        result[restless_L] = load[:, restless_L].mean(axis=0)
    change_L = last_change(load)
    for change in np.unique(change_L):
        layers = np.flatnonzero((change_L == change) & ~restless_L)
        if not len(layers):
            continue
        result[layers] = _best_of_past(np.ascontiguousarray(load[change:, layers]), method, ranks)
    return result


class ExpectedLoad(NamedTuple):
    """The load to come of each layer.

    Args:
        expected: float64 ``[L, E]``, the forecast.
        scenarios: float64 ``[W, L, E]``, loads that may come, as `scenarios` has them.
        mixes: float64 ``[V, L, E]``, mixes of these.
        wanders_L: bool, layers whose load surely moves on from window to window (`mixture`).
    """

    expected: Load
    scenarios: Load
    mixes: Load
    wanders_L: NDArray[np.bool_]


def foretell(load: Load, method: str = "auto", ranks: int = 8) -> ExpectedLoad:
    """`forecast` and `scenarios`, where a layer may have had windows without any tokens: they say nothing of where
    tokens go, and are left out, of that layer alone.

    Of a layer whose load surely moves on, scenarios stray from the forecast by the errors that past ones made.

    Args:
        load: float64 ``[T, L, E]``, oldest first.
        method, ranks: as for `forecast`.

    Returns:
        the load to come; a layer that has fewer windows than others has scenarios more than once.

    Raises:
        ValueError: the method is unknown.
    """
    empty_TL: NDArray[np.bool_] = load.max(axis=2) == 0
    if not empty_TL.any():
        return _of_full_windows(load, method, ranks)
    left_L = (~empty_TL).sum(axis=0)
    found = []
    for left in np.unique(left_L):
        layers = np.flatnonzero(left_L == left)
        # Windows with tokens, in their order; of layers without any, one empty one.
        newest = np.sort(np.argsort(empty_TL[:, layers], axis=0, kind="stable")[: max(int(left), 1)], axis=0)
        here = np.ascontiguousarray(np.take_along_axis(load[:, layers], newest[:, :, None], axis=0))
        found.append((layers, _of_full_windows(here, method, ranks)))
    result, wanders_L = np.empty(load.shape[1:]), np.zeros(load.shape[1], dtype=bool)
    may_come = np.empty((max(len(one.scenarios) for _, one in found), *load.shape[1:]))
    mixes = np.empty((max(len(one.mixes) for _, one in found), *load.shape[1:]))
    for layers, one in found:
        result[layers], wanders_L[layers] = one.expected, one.wanders_L
        may_come[:, layers] = one.scenarios[np.arange(len(may_come)) % len(one.scenarios)]
        again = one.mixes if len(one.mixes) else one.scenarios
        mixes[:, layers] = again[np.arange(len(mixes)) % len(again)]
    return ExpectedLoad(result, may_come, mixes, wanders_L)


def _of_full_windows(load: Load, method: str, ranks: int) -> ExpectedLoad:
    """`foretell` where every window has tokens in every layer."""
    if method != "auto" or len(load) == 1:
        expected = forecast(load, method, ranks)
        return ExpectedLoad(expected, *scenarios(load, expected), np.zeros(load.shape[1], dtype=bool))
    made = _adaptive(load, ranks)
    return ExpectedLoad(made.expected, *scenarios(load, made.expected, made.changed_L, made.errors), made.wanders_L)


class _Adaptive(NamedTuple):
    """A forecast of each layer by itself.

    Args:
        expected: float64 ``[L, E]``.
        changed_L: bool, layers of which the newest window alone is of the load to come.
        wanders_L: bool, layers whose load surely moves on.
        errors: of layers that a mixture foretells, by number: its past errors, float64 ``[N, E]`` in shares.
    """

    expected: Load
    changed_L: NDArray[np.bool_]
    wanders_L: NDArray[np.bool_]
    errors: dict[int, Load]


def _adaptive(load: Load, ranks: int) -> _Adaptive:
    """The mean of the windows since the last change, and a mixture of forecasters where the load surely moves on."""
    share, restless_L = _share(load), is_restless(load)
    changed_L = has_just_changed(share) & ~restless_L
    expected, wanders_L = load.mean(axis=0), np.zeros(load.shape[1], dtype=bool)
    expected[changed_L] = load[-1, changed_L]
    errors: dict[int, Load] = {}
    change_L = last_change(load)
    for change in np.unique(change_L).tolist():
        layers = np.flatnonzero((change_L == change) & ~restless_L & ~changed_L)
        expected[layers] = load[change:, layers].mean(axis=0)
        mixed = mixture(np.ascontiguousarray(share[change:, layers]), ranks) if len(layers) else None
        if mixed is None:
            continue
        for index in np.flatnonzero(mixed.moves_L).tolist():
            layer = int(layers[index])
            expected[layer] = mixed.share_LE[index] * expected[layer].sum()
            wanders_L[layer], errors[layer] = mixed.surely_L[index], mixed.errors_NLE[:, index]
    return _Adaptive(expected, changed_L, wanders_L, errors)


def _best_of_past(load: Load, method: str, ranks: int) -> Load:
    """float64 ``[L, E]``: by the average or trend that would have balanced each layer's past best.

    One that is better than the first of them within its own noise is not believed.
    """
    if len(load) < 3:
        return np.asarray(load.mean(axis=0))
    newest = min(JUDGED_WINDOWS + 1, len(load))
    average = cache(lambda weight: exponential_average(load, weight, newest))
    if method == "average":
        made = [average(weight) for weight in (LONG_MEMORY, *(one for one in MEMORIES if one != LONG_MEMORY))]
    else:
        made = [_with_drift(average(weight), average(weight / 2)) for weight in MEMORIES if 0 < weight < 1]
    after, ahead = what_came(load)
    foretold = [np.ascontiguousarray(one[after - (len(load) - newest)]) for one in made]
    judged = [dealt_imbalance(one, ahead, ranks) + BETWEEN_EQUALS * _error(one, ahead) for one in foretold]
    best, gain_L = np.zeros(load.shape[1], dtype=np.int64), np.zeros(load.shape[1])
    for index, one_TL in enumerate(judged):
        better_TL = judged[0] - one_TL
        error_L = better_TL.std(axis=0) / np.sqrt(max(len(better_TL) - 1, 1))
        surely_L = better_TL.mean(axis=0) - SURE * error_L
        best, gain_L = np.where(surely_L > gain_L, index, best), np.maximum(surely_L, gain_L)
    return np.array([made[one][-1, layer] for layer, one in enumerate(best.tolist())])


def last_change(load: Load) -> NDArray[np.int64]:
    """int64 ``[L]``: the first window since a layer's load last changed for another; 0 where it has not.

    The windows are cut in two where the means of both parts differ most, measured by the variance inside the parts (as
    in an analysis of variance; noise gives a ratio of about one), and what follows the cut is looked at again.

    Args:
        load: float64 ``[T, L, E]``.
    """
    share = _share(load)
    change_L = np.zeros(share.shape[1], dtype=np.int64)
    layers = np.arange(share.shape[1])
    while len(layers):
        later = [(layer, change_L[layer] + _cut(share[change_L[layer] :, layer])) for layer in layers]
        layers = np.array([layer for layer, cut in later if cut > change_L[layer]], dtype=np.int64)
        for layer, cut in later:
            change_L[layer] = cut
    return change_L


def is_restless(load: Load) -> NDArray[np.bool_]:
    """bool ``[L]``: whether windows came again and again that were like none before: then the newest will not last, and
    what follows will be like none of them either.

    A window is like none before if it is farther from each of them than `CHANGE_RATIO` times what usually lies between
    neighbours.

    Args:
        load: float64 ``[T, L, E]``.
    """
    if len(load) < 4:
        return np.zeros(load.shape[1], dtype=bool)
    share_LTE = _share(load).transpose(1, 0, 2)
    square_LT = (share_LTE**2).sum(axis=2)
    apart_LTT = square_LT[:, :, None] + square_LT[:, None] - 2.0 * (share_LTE @ share_LTE.transpose(0, 2, 1))
    usual_L = np.median(np.diagonal(apart_LTT, 1, 1, 2), axis=1)
    earlier_TT = np.tri(len(load), k=-1, dtype=bool)
    nearest_LT = np.where(earlier_TT, apart_LTT, np.inf)[:, 1:].min(axis=2)
    new_LT = nearest_LT > CHANGE_RATIO * np.maximum(usual_L, 1e-12)[:, None]
    return np.asarray(new_LT.sum(axis=1) >= OFTEN)


@jit
def _cut(share_TE: Load) -> int:
    """Where the windows of one layer part, 0 if they do not, or drift rather; at least two on either side."""
    count = len(share_TE)
    best, best_ratio = 0, CHANGE_RATIO
    total_E, slope_E = np.zeros(share_TE.shape[1]), np.zeros(share_TE.shape[1])
    squares = 0.0
    for window in range(count):
        total_E += share_TE[window]
        slope_E += (window - 0.5 * (count - 1)) * share_TE[window]
        squares += (share_TE[window] ** 2).sum()
    off_line = squares - (total_E**2).sum() / count - (slope_E**2).sum() * 12.0 / max(count * (count**2 - 1), 1)
    old_E = np.zeros_like(total_E)
    for cut in range(1, count - 1):
        old_E += share_TE[cut - 1]
        if cut < 2:
            continue
        new_E = total_E - old_E
        between = cut * (count - cut) / count * ((old_E / cut - new_E / (count - cut)) ** 2).sum()
        within = squares - (old_E**2).sum() / cut - (new_E**2).sum() / (count - cut)
        ratio = between * (count - 2) / max(within, 1e-12)
        if ratio > best_ratio and within < off_line:
            best, best_ratio = cut, ratio
    return best


def _error(foretold: Load, came: Load) -> Load:
    return np.asarray(0.5 * np.abs(_share(foretold) - _share(came)).sum(axis=-1))


def _share(load: Load) -> Load:
    total = load.sum(axis=-1, keepdims=True)
    return np.divide(load, total, out=np.zeros_like(load), where=total > 0)


MOST_SCENARIOS = 10
SPREAD = 1.2
"""How much farther than seen the scenarios stray: a plan that fits what was seen meets what was not."""
MIXES = 8


def scenarios(
    load: Load,
    expected: Load,
    changed_L: NDArray[np.bool_] | None = None,
    errors: Mapping[int, Load] | None = None,
) -> tuple[Load, Load]:
    """Loads that may come: the forecast, off by as much as each of the newest windows was off their mean.

    A mean of W windows has taken part of their noise with it, and errs by itself: both together make the errors to come
    ``sqrt((W + 1) / (W - 1))`` times those seen.

    Args:
        load: float64 ``[T, L, E]``, oldest first.
        expected: float64 ``[L, E]``, the forecast.
        changed_L: bool, layers of which the newest window alone is of the load to come: the others are off the mean
            without it. None: no layer is.
        errors: float64 ``[N, E]``, by number of the layer: the errors that its forecasts made, in shares, where these
            are known. None: nowhere.

    Returns:
        float64 ``[W, L, E]``, one for each of at most `MOST_SCENARIOS` windows; and ``[V, L, E]``, mixes of them, in
        which each expert strays as in a window of its own: they tell a plan that is good from one that only fits the
        windows. Where only one window is known: the forecast alone, and no mixes.
    """
    seen = _share(load[-MOST_SCENARIOS:])
    count = len(seen)
    if count < 2:
        return expected[None], expected[None][:0]
    stray = (seen - seen.mean(axis=0)) * SPREAD * np.sqrt((count + 1) / (count - 1))
    if changed_L is not None and changed_L.any():
        before = seen[:-1, changed_L]
        stray[-1, changed_L] = 0.0
        stray[:-1, changed_L] = (before - before.mean(axis=0)) * SPREAD * np.sqrt(2.0 * count / (count - 2))
    for layer, error_NE in (errors or {}).items():
        stray[:, layer] = error_NE[np.arange(-count, 0) % len(error_NE)]
    choice = np.random.default_rng(count).integers(0, count, (MIXES, *seen.shape[1:]))
    mixed = np.take_along_axis(stray, choice, axis=0)
    scale = expected.sum(axis=-1, keepdims=True)
    share = _share(expected)
    return np.maximum(share + stray, 0.0) * scale, np.maximum(share + mixed, 0.0) * scale


JITTER = 0.3
"""Standard deviation of the next window around the only one known, as a share of an expert's load: both stray."""
JITTERS = 4.0
"""Of the mean load of a rank: what an expert has beyond so much counts as steady. Copies for more would take those that
all the others need."""


def variance_of_next(load: Load, ranks: int) -> Load:
    """Variance that the next window is taken to have around the only one that is known.

    Args:
        load: float64 ``[L, E]``.
        ranks: R, over which the experts are spread.

    Returns:
        float64 ``[L, E]``, in squared tokens. One window does not show it: it is a constant share of the load, good for
        loads that jitter by a fifth, and not much worse for steadier ones.
    """
    most = JITTERS * load.sum(axis=1, keepdims=True) / ranks
    return np.asarray((JITTER * np.minimum(load, most)) ** 2)
