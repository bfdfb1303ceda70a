"""Series of loads that jitter, shift and burst, made by rule, so that planners can be held against what comes next. The
first, ``normal(1, .3)``, is LPLB's own test distribution."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

TOKENS_PER_EXPERT = 512  # selections in a window, on average: the noise of counting


def normal(windows: int, layers: int, experts: int, deviation: float = 0.3, seed: int = 0) -> FloatArray:
    """float64 ``[T, L, E]``: every expert's tokens drawn anew in each window, around the same mean."""
    drawn = np.random.default_rng(seed).normal(1.0, deviation, (windows, layers, experts))
    return np.asarray(np.maximum(drawn, 0.0) * 1000.0)


def bursting(windows: int, layers: int, experts: int, seed: int = 0) -> FloatArray:
    """float64 ``[T, L, E]``: three even windows, then one in which an eighth of the experts, always the same, takes
    half of all selections; and again (W7 of Megatron-LM's pull request 7488)."""
    generator = np.random.default_rng([seed, 7])
    order = generator.permuted(np.broadcast_to(np.arange(experts), (layers, experts)), axis=1)
    hot, count = order < max(experts // 8, 1), max(experts // 8, 1)
    heated, even = np.where(hot, 0.5 / count, 0.5 / (experts - count)), np.ones((layers, experts)) / experts
    drawn = [
        [generator.multinomial(TOKENS_PER_EXPERT * experts, row) for row in (heated if window % 4 == 3 else even)]
        for window in range(windows)
    ]
    return np.array(drawn, dtype=np.float64)


TOKENS_OF_SUITE = 2000  # selections of an expert in a window, on average, in the loads below


def skewed(windows: int, shape: tuple[int, int], spread: float, jitter: float, seed: int) -> FloatArray:
    """float64 ``[T, L, E]``: lognormal shares that stay, each expert off by a lognormal factor in each window; by these
    standard deviations of the logarithms. ``shape``: layers and experts."""
    generator = np.random.default_rng([seed, 21])
    mean = generator.lognormal(0.0, spread, shape)
    return _counted(generator, mean * generator.lognormal(-0.5 * jitter**2, jitter, (windows, *shape)))


def dominated(windows: int, layers: int, experts: int, share: float, seed: int) -> FloatArray:
    """float64 ``[T, L, E]``: one expert of each layer takes this share of all selections; the others lognormal, .3."""
    generator = np.random.default_rng([seed, 22])
    mean = generator.lognormal(0.0, 0.3, (layers, experts))
    hot = (np.arange(layers), generator.integers(0, experts, layers))
    mean[hot] = 0.0
    mean *= (1.0 - share) / mean.sum(axis=1, keepdims=True)
    mean[hot] = share
    return _counted(generator, np.broadcast_to(mean, (windows, layers, experts)))


def autoregressive(windows: int, layers: int, experts: int, seed: int, remembered: float = 0.9) -> FloatArray:
    """float64 ``[T, L, E]``: the logarithm of each expert's share is an AR(1) process with a deviation of .6."""
    generator = np.random.default_rng([seed, 23])
    popularity = generator.normal(0.0, 0.6, (layers, experts))
    made = np.empty((windows, layers, experts))
    for window in range(windows):
        made[window] = np.exp(popularity)
        fresh = np.sqrt(1.0 - remembered**2) * generator.normal(0.0, 0.6, (layers, experts))
        popularity = remembered * popularity + fresh
    return _counted(generator, made)


def rotating(windows: int, layers: int, experts: int, seed: int, regimes: int = 8) -> FloatArray:
    """float64 ``[T, L, E]``: shares go from one of several lognormal regimes to the next in turn, two windows in each
    and half of the way in the second."""
    generator = np.random.default_rng([seed, 24])
    regime = generator.lognormal(0.0, 0.6, (regimes, layers, experts))
    at = np.arange(windows)
    here, following = regime[at // 2 % regimes], regime[(at // 2 + 1) % regimes]
    return _counted(generator, np.where((at % 2 == 1)[:, None, None], 0.5 * (here + following), here))


def shifting(windows: int, layers: int, experts: int, seed: int) -> FloatArray:
    """float64 ``[T, L, E]``: lognormal shares, and after window 14 others."""
    generator = np.random.default_rng([seed, 25])
    first, second = generator.lognormal(0.0, 0.6, (2, layers, experts))
    return _counted(generator, np.where((np.arange(windows) < 14)[:, None, None], first, second))


def jumping(windows: int, layers: int, experts: int, seed: int) -> FloatArray:
    """float64 ``[T, L, E]``: even, but in each window another expert has so many that it takes an eighth of all."""
    generator = np.random.default_rng([seed, 26])
    made = np.ones((windows, layers, experts))
    hot_TL = generator.integers(0, experts, (windows, layers))
    np.put_along_axis(made, hot_TL[:, :, None], (experts - 1) / 7.0, axis=2)
    return _counted(generator, made)


def near_uniform(windows: int, layers: int, experts: int, seed: int) -> FloatArray:
    """float64 ``[T, L, E]``: lognormal shares with a spread of .29, each off by .05 in each window.

    With 896 experts in logical order on 16 ranks the median imbalance is that which Kimi K3 is reported to be served
    with (1.069: vllm-project/vllm issue 50647).
    """
    return skewed(windows, (layers, experts), 0.29, 0.05, seed)


def hash_layers(
    windows: int,
    layers: int,
    experts: int,
    seed: int,
    vocabulary: int = 131_072,
    exponent: float = 1.0,
    hashes: int = 8,
) -> FloatArray:
    """float64 ``[T, L, E]``: experts are a function of the token's id, and tokens are as frequent as words are.

    Args:
        vocabulary: tokens, whose frequencies fall with their rank.
        exponent: of that fall (Zipf).
        hashes: experts of each token; one, and as many tokens as experts: each expert has a token of its own.
    """
    generator = np.random.default_rng([seed, 27])
    frequency = 1.0 / np.arange(1, vocabulary + 1) ** exponent
    made = np.empty((windows, layers, experts))
    for layer in range(layers):
        if vocabulary == experts and hashes == 1:
            expert_of = generator.permutation(experts)[None]
        else:
            expert_of = generator.integers(0, experts, (hashes, vocabulary))
        made[:, layer] = sum(np.bincount(row, frequency, minlength=experts) for row in expert_of)
    return _counted(generator, made)


def _counted(generator: np.random.Generator, share: FloatArray) -> FloatArray:
    """Whole selections, with the noise of counting, from shares ``[T, L, E]`` of any scale."""
    return generator.poisson(share / share.mean(axis=2, keepdims=True) * TOKENS_OF_SUITE).astype(np.float64)
