"""Forecasts where load does not stay: several forecasters, weighed by how well each would have placed experts.

Whether a layer's load stays is asked of all its experts at once, which a few windows answer; only where it surely does
not does the mixture take the place of the long mean. All of it follows from the windows given.

Shape suffixes here: T windows, N of them after which forecasts are judged and the newest, L layers, E logical
experts, C forecasters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .drift import farther_apart
from .placement_loss import JUDGED_WINDOWS, dealt_imbalance

FloatArray = NDArray[np.float64]
FORECASTERS = ("mean", "mean of 4", "mean of 2", "last", "half way to last", "rise", "repeat")
"""Long mean first. ``rise``: the newest step once more; ``repeat``: what followed the window most like the newest."""
LEAST_WINDOWS = 5
SURELY = 4.0
"""Standard errors, over the experts, by which a forecaster must have erred less than the long mean."""
GAINS = 4.0
"""Standard errors, over windows and layers, by which the mixture must have been better, where layers count together."""
SHARPNESS = 0.1
"""A forecaster whose loss is so much larger than the best's, as a share of what that is above 1, weighs ``1 / e``."""
BETWEEN_EQUALS = 0.01
"""Weight of the share of tokens foretold for other experts: it decides between forecasts that place equally well."""


class Mixture(NamedTuple):
    """A mixture's forecast.

    Args:
        moves_L: bool, layers whose load does not stay; the others are not for the mixture.
        surely_L: bool, those of them that are sure by themselves.
        share_LE: float64, the share of each expert to come.
        errors_NLE: float64, by how much the same mixture was off after each window judged, newest last.
        weight_CL: float64, of each of `FORECASTERS`; together 1.
    """

    moves_L: NDArray[np.bool_]
    surely_L: NDArray[np.bool_]
    share_LE: FloatArray
    errors_NLE: FloatArray
    weight_CL: FloatArray


def mixture(share_TLE: FloatArray, ranks: int) -> Mixture | None:
    """Weigh the forecasters; None where there are too few windows, or every layer's load may stay.

    Args:
        share_TLE: float64 ``[T, L, E]``, shares of each window's tokens, oldest first.
        ranks: R, over which the experts are spread to judge by.
    """
    if len(share_TLE) < LEAST_WINDOWS or share_TLE.shape[2] < 2:
        return None
    made_CNLE = foretold(share_TLE)
    came_NLE = np.ascontiguousarray(share_TLE[len(share_TLE) + 1 - made_CNLE.shape[1] :])
    signs = _signs(made_CNLE[:, :-1], came_NLE, share_TLE)
    if not (signs.surely_SL.any() or signs.together_S.any()):
        return None
    loss_CNL = np.stack([_loss(made_NLE[:-1], came_NLE, ranks) for made_NLE in made_CNLE])
    error_CNL = 0.5 * np.abs(made_CNLE[:, :-1] - came_NLE).sum(axis=3)
    weight_CL = _weights((loss_CNL + BETWEEN_EQUALS * error_CNL).mean(axis=1))
    mixed_NLE = np.einsum("cl,cnle->nle", weight_CL, made_CNLE)
    gain_NL = loss_CNL[0] - _loss(mixed_NLE[:-1], came_NLE, ranks)
    surely_L: NDArray[np.bool_] = np.logical_or.reduce(signs.surely_SL, axis=0)
    moves_L = surely_L
    if gain_NL.mean() > GAINS * _noise(gain_NL.ravel()):
        moves_L = surely_L | np.logical_or.reduce(signs.likely_SL[signs.together_S], axis=0)
    return Mixture(moves_L, surely_L, mixed_NLE[-1], came_NLE - mixed_NLE[:-1], weight_CL)


def foretold(share_TLE: FloatArray) -> FloatArray:
    """float64 ``[C, N, L, E]``: forecasts made after each of the newest windows, each from what was known then."""
    count = len(share_TLE)
    at = np.arange(max(count - JUDGED_WINDOWS - 1, 1), count)
    total_TLE = np.cumsum(share_TLE, axis=0)
    newest, before = share_TLE[at], share_TLE[at - 1]
    mean = total_TLE[at] / (at + 1.0)[:, None, None]
    of_4 = np.minimum(at + 1, 4)
    older = np.where((at > of_4 - 1)[:, None, None], total_TLE[at - of_4], 0.0)
    mean_of_4 = (total_TLE[at] - older) / of_4[:, None, None]
    rise = np.maximum(2.0 * newest - before, 0.0)
    rise /= np.maximum(rise.sum(axis=2, keepdims=True), 1e-300)
    return np.stack(
        [mean, mean_of_4, 0.5 * (newest + before), newest, 0.5 * (newest + mean), rise, _repeated(share_TLE, at)]
    )


def _repeated(share_TLE: FloatArray, at: NDArray[np.int64]) -> FloatArray:
    """float64 ``[N, L, E]``: after each window of ``at``, the one that followed the earlier window most like it."""
    share_LTE = share_TLE.transpose(1, 0, 2)
    square_LT = (share_LTE**2).sum(axis=2)
    apart_LNT = square_LT[:, None] - 2.0 * (share_LTE[:, at] @ share_LTE.transpose(0, 2, 1))
    earlier_NT = np.arange(len(share_TLE)) < at[:, None]
    following_NL = np.where(earlier_NT, apart_LNT, np.inf).argmin(axis=2).T + 1
    return np.asarray(share_TLE[following_NL, np.arange(share_TLE.shape[1])])


def _loss(made_NLE: FloatArray, came_NLE: FloatArray, ranks: int) -> FloatArray:
    """float64 ``[N, L]``: the imbalance that placements made for each forecast would have led to."""
    return dealt_imbalance(np.ascontiguousarray(made_NLE), came_NLE, ranks)


def _weights(loss_CL: FloatArray) -> FloatArray:
    """float64 ``[C, L]``: the less loss, the more."""
    least_L = loss_CL.min(axis=0)
    weight_CL = np.exp(-(loss_CL - least_L) / (SHARPNESS * np.maximum(least_L - 1.0, 1e-3)))
    return np.asarray(weight_CL / weight_CL.sum(axis=0))


class _Signs(NamedTuple):
    """Signs that loads do not stay, S of them: a forecaster errs less than the long mean, or neighbouring windows are
    more alike than distant ones.

    Layers of few experts are not sure by themselves. Where all of them together are, and the mixture would have placed
    experts better, those count that are more sure than not.

    Args:
        surely_SL, likely_SL: bool, by `SURELY` standard errors, and by one.
        together_S: bool, of all layers.
    """

    surely_SL: NDArray[np.bool_]
    likely_SL: NDArray[np.bool_]
    together_S: NDArray[np.bool_]


def _signs(made_CNLE: FloatArray, came_NLE: FloatArray, share_TLE: FloatArray) -> _Signs:
    evened_LE = 1.0 / np.maximum(share_TLE.mean(axis=0), 1e-9)
    error_CLE = ((made_CNLE - came_NLE) ** 2).mean(axis=1) * evened_LE
    sign_SLE = np.concatenate([error_CLE[0] - error_CLE[1:], farther_apart(share_TLE)[None]])
    sign_SL, noise_SL = sign_SLE.mean(axis=2), np.maximum(_noise(sign_SLE), 1e-12)
    together_S = sign_SL.sum(axis=1) > SURELY * np.sqrt((noise_SL**2).sum(axis=1))
    return _Signs(sign_SL > SURELY * noise_SL, sign_SL > noise_SL, together_S)


def _noise(value: FloatArray) -> FloatArray:
    """Standard error of the mean over the last axis."""
    return np.asarray(value.std(axis=-1, ddof=1) / np.sqrt(value.shape[-1]))
