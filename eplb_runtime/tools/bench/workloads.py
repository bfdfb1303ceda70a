"""Series of loads that jitter, shift and burst, made by rule, so that planners can be held against what comes next.

W0 to W7 follow the table of Megatron-LM's pull request 7488 (what each is for, and the periods it states): expert heat
is set here so that the hottest expert has about four times the mean, as theirs. The first, ``normal(1, .3)``, is LPLB's
own test distribution.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

HOT_SHARE = 0.5
"""Of all selections, to an eighth of the experts."""
TOKENS_PER_EXPERT = 512
"""Selections in a window, on average: the noise of counting."""
NAMES = {
    "W0 balanced": "every expert the same",
    "W1 hot expert set": "a fixed set takes half of all selections",
    "W2 hot rank": "the same heat on consecutive experts: on one rank of eight",
    "W3 spread hot experts": "the same heat, evenly spaced",
    "W4 source ragged": "even over experts, uneven over sources",
    "W5 zero experts": "half of the experts are never selected",
    "W6 rotating hotspot": "the hot set is another every three windows",
    "W7 burst": "three even windows, one with a hot set, and again",
}


def normal(windows: int, layers: int, experts: int, deviation: float = 0.3, seed: int = 0) -> FloatArray:
    """float64 ``[T, L, E]``: every expert's tokens drawn anew in each window, around the same mean."""
    drawn = np.random.default_rng(seed).normal(1.0, deviation, (windows, layers, experts))
    return np.asarray(np.maximum(drawn, 0.0) * 1000.0)


def megatron(name: str, windows: int, layers: int, experts: int, seed: int = 0) -> FloatArray:
    """float64 ``[T, L, E]``: a workload of `NAMES`.

    Raises:
        ValueError: no such workload.
    """
    if name not in NAMES:
        raise ValueError(f"workload {name!r} is unknown; choose one of: {', '.join(NAMES)}")
    kind = name[:2]
    generator = np.random.default_rng([seed, int(kind[1])])
    fixed = _hot_sets(generator, layers, experts)
    load = np.empty((windows, layers, experts))
    for window in range(windows):
        share = np.ones((layers, experts)) / experts
        if kind == "W1" or (kind == "W7" and window % 4 == 3):
            share = _heated(fixed)
        elif kind in ("W2", "W3"):
            order = np.arange(experts) < experts // 8 if kind == "W2" else np.arange(experts) % 8 == 0
            share = _heated(np.broadcast_to(order, (layers, experts)))
        elif kind == "W5":
            share = np.broadcast_to(np.where(np.arange(experts) < experts // 2, 2 / experts, 0.0), (layers, experts))
        elif kind == "W6":
            share = _heated(_hot_sets(np.random.default_rng([seed, 6, window // 3]), layers, experts))
        total = TOKENS_PER_EXPERT * experts
        load[window] = share * total if kind == "W0" else [generator.multinomial(total, row) for row in share]
    return load


def _hot_sets(generator: np.random.Generator, layers: int, experts: int) -> NDArray[np.bool_]:
    """bool ``[L, E]``: an eighth of the experts of each layer."""
    order = generator.permuted(np.broadcast_to(np.arange(experts), (layers, experts)), axis=1)
    return np.asarray(order < max(experts // 8, 1))


def _heated(hot: NDArray[np.bool_]) -> FloatArray:
    count = hot.sum(axis=1, keepdims=True)
    return np.where(hot, HOT_SHARE / count, (1.0 - HOT_SHARE) / (hot.shape[1] - count))
