"""What the load will be, from what it was: window, exponential average, trend; numpy only.

The default chooses among them by how well each would have foretold the windows already seen, so that steady traffic
gets a long memory and drifting traffic a short one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MEMORIES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.0)
"""Weights of the newest window that averages are tried with; 1 remembers the last window alone, 0 all alike."""
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


def exponential_average(load: Load, newest_weight: float) -> Load:
    """float64 ``[T, L, E]``: for each window the average up to it, each older one ``1 - newest_weight`` lighter.

    Weights are normalised, so that the first windows are plain means rather than bound to the first one.
    """
    averages = np.empty_like(load)
    total, weight = np.zeros(load.shape[1:]), 0.0
    for index, window in enumerate(load):
        total = total * (1.0 - newest_weight) + window
        weight = weight * (1.0 - newest_weight) + 1.0
        averages[index] = total / weight
    return averages


def trend(load: Load, newest_weight: float) -> Load:
    """float64 ``[T, L, E]``: for each window the average plus half its recent drift; never below zero.

    The drift is the lead of a fast average over one of half its newest weight (double exponential smoothing, damped).
    """
    fast = exponential_average(load, newest_weight)
    slow = exponential_average(load, newest_weight / 2)
    return np.maximum(fast + TREND_DAMPING * (fast - slow), 0.0)


def forecast(load: Load, method: str = "auto", horizon: int = 1) -> Load:
    """The load to plan for.

    Args:
        load: float64 ``[T, L, E]``, oldest first; ``coarsen`` it before if T is large.
        method: ``"window"`` (mean of all windows), ``"last"``, ``"average"`` (exponential, memory chosen by past
            error), ``"trend"`` (likewise), ``"auto"`` (the best of all of these by past error).
        horizon: windows that the forecast is to hold for; past errors are taken against the mean of as many.

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
    made = []
    if method in ("auto", "average"):
        made += [exponential_average(load, weight) for weight in MEMORIES]
    if method in ("auto", "trend"):
        made += [trend(load, weight) for weight in MEMORIES if 0 < weight < 1]
    errors = [past_error(one, load, horizon) for one in made]
    return np.asarray(made[int(np.argmin(errors))][-1])


def past_error(forecasts: Load, load: Load, horizon: int = 1) -> float:
    """How far forecasts were from what came: squared difference of expert shares, mean over windows and layers.

    Args:
        forecasts: float64 ``[T, L, E]``, made after each window.
        load: float64 ``[T, L, E]``, the windows.
        horizon: windows ahead that count together; fewer where the series ends.
    """
    came = np.cumsum(np.concatenate([np.zeros_like(load[:1]), load]), axis=0)
    last = len(load) - 1
    until = np.minimum(np.arange(1, last + 1) + horizon, len(load))
    ahead = came[until] - came[1 : last + 1]
    return float(((_share(forecasts[:last]) - _share(ahead)) ** 2).sum(axis=-1).mean())


def _share(load: Load) -> Load:
    total = load.sum(axis=-1, keepdims=True)
    return np.divide(load, total, out=np.zeros_like(load), where=total > 0)
