"""Homes alone: the moves that pay by what they will save, not by what the past promises; all that gain more than
chance, where seconds are not known.

Each layer has a ladder of placements, from few moves to a packing made anew (`search.staying`). Their gains are
estimated on windows that they were not packed for, so what remains to be weighed is seconds against seconds, and
whether a gain is more than chance. No imbalance is put on a move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...placement import Placement
from ..cost import HYSTERESIS
from ..evaluate import most_to_gain_first
from ..search.align import align
from ..search.staying import left_out, pack_staying
from ..search.threads import in_time
from ..types import PlanRequest

SLACKS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03, 0.0)
"""Of the mean rank load: an expert stays while its rank exceeds the least loaded one by no more. From few moves on."""
MIXED = 24
"""Loads to judge by besides the scenarios: in each, every expert has its tokens from a scenario of its own."""
TOLERATED = 0.2
"""Of the standard error of the difference: so much worse than the best is as good, with fewer moves."""
LEAST_GAIN = 0.005
"""A layer's imbalance must fall at least so much, or it stays as it is."""
BELIEVED = 0.5
"""Where a smaller share of what was promised came true, a gain must be the surer."""
LEAST_TRUST = 1e-6
"""Less is no different: no gain by chance is so sure."""
ALL_SURE, SURE = 4.0, 6.0
"""Standard errors by which all layers together must gain; or one of them, where the others do not."""
ONCE_SURE = 1.0
"""Those by which each layer must gain then."""
BY_WINDOWS = 2.0
"""Standard errors by which all layers must gain when judged by the scenarios alone: mixes repeat what is in these. Each
layer must by half as many."""


class _Rung(NamedTuple):
    """A layer's best placement.

    Args:
        gain: fall of imbalance, less what moving costs.
        error: standard error of the fall.
        by_windows, windows_error: the fall and its standard error by the scenarios alone.
        home_E: int32, its home ranks; as now where nothing gains.
    """

    gain: float
    error: float
    by_windows: float
    windows_error: float
    home_E: NDArray[np.int32]


def by_seconds(request: PlanRequest, refine: Callable[[int, NDArray[np.int32]], NDArray[np.int32]]) -> Placement:
    """Move the homes that pay for it.

    Args:
        refine: searches on from a layer's new home ranks, and returns those that it reaches.
    """
    start = request.start
    if request.seconds_per_imbalance is not None and request.seconds_per_imbalance <= 0:
        return start  # nothing is saved by any move
    scenarios = len(request.scenarios)
    mixed = np.random.default_rng(scenarios).integers(0, scenarios, (MIXED, start.num_experts))
    alone = np.repeat(np.arange(scenarios)[:, None], start.num_experts, axis=1)
    choice_NE = np.concatenate([alone, mixed])
    share_WLE, share_LE = _share(request.scenarios), _share(request.forecast)

    def best(layer: int) -> _Rung:
        return _best_rung(request, layer, np.ascontiguousarray(share_WLE[:, layer]), share_LE[layer], choice_NE)

    order = list(range(request.num_layers)) if request.deadline is None else most_to_gain_first(request)

    def left_out(layer: int) -> _Rung:
        assert request.deadline is not None
        request.deadline.left_out.add(layer)
        return _stays(start.home_rank[layer].copy())

    found = in_time(best, left_out, order, request.deadline)
    home_LE, pay_L = start.home_rank.copy(), _pay(request, found)
    for layer in (layer for layer in order if pay_L[layer]):
        is_over = request.deadline is not None and request.deadline.is_over
        home_LE[layer] = found[layer].home_E if is_over else refine(layer, found[layer].home_E)
    return align(start, home_LE, start.replicas_LRK)


def _pay(request: PlanRequest, found: list[_Rung]) -> NDArray[np.bool_]:
    """bool ``[L]``: layers whose gain is worth having and more than chance.

    Where earlier plans held little of what they promised, more is asked for. In a layer whose load surely wanders a
    placement ages, so that what is expected to gain is taken.
    """
    doubt = 1.0 / min(1.0, max(request.trust, LEAST_TRUST) / BELIEVED)
    gain_L, error_L, by_windows_L, windows_error_L, _ = (np.array(column) for column in zip(*found, strict=True))
    together = gain_L.sum() > ALL_SURE * doubt * np.sqrt((error_L**2).sum())
    together = together and by_windows_L.sum() > BY_WINDOWS * np.sqrt((windows_error_L**2).sum())
    sure = doubt * (ONCE_SURE if together else SURE)
    sure_L = (gain_L > sure * error_L) & (by_windows_L > 0.5 * BY_WINDOWS * windows_error_L)
    if request.wanders_L is not None:
        sure_L |= request.wanders_L
    return np.asarray((gain_L > LEAST_GAIN) & sure_L)


def _best_rung(
    request: PlanRequest,
    layer: int,
    share_WE: NDArray[np.float64],
    share_E: NDArray[np.float64],
    choice_NE: NDArray[np.int64],
) -> _Rung:
    """The rung of the layer's ladder that is worth most, or one with fewer moves that is as good."""
    start, ranks = request.start, request.topology.num_ranks
    home_E, scenarios = start.home_rank[layer].copy(), len(share_WE)
    slack_X = np.array(SLACKS)
    home_XE = np.empty((len(slack_X), len(home_E)), dtype=np.int32)
    for slack, packed_E in zip(slack_X.tolist(), home_XE, strict=True):
        pack_staying(share_E, home_E, ranks, slack, packed_E)
    judged_XN = left_out(share_WE, share_E, choice_NE, home_E, ranks, slack_X)
    value_XN, now_N = judged_XN[:-1], judged_XN[-1]
    known = request.seconds_per_imbalance is not None
    price = HYSTERESIS / (request.seconds_per_imbalance or 1e-300) if known else 0.0
    cost_X = price * np.array([_seconds(request, home_E, packed_E) for packed_E in home_XE])
    worth_X = value_XN.mean(axis=1) + cost_X
    best = int(worth_X.argmin())
    moves_X = (home_XE != home_E).sum(axis=1)
    near_X = worth_X - worth_X[best] <= TOLERATED * _error(value_XN - value_XN[best])
    rung = int(np.where(near_X, moves_X, moves_X.max() + 1).argmin())
    if not moves_X[rung]:
        return _stays(home_E)
    gain_N = now_N - value_XN[rung]
    gain_W = gain_N[:scenarios]
    gain = float(gain_N.mean() - cost_X[rung])
    return _Rung(gain, float(_error(gain_N)), float(gain_W.mean()), float(_error(gain_W)), home_XE[rung])


def _stays(home_E: NDArray[np.int32]) -> _Rung:
    return _Rung(0.0, 0.0, 0.0, 0.0, home_E)


def _error(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard error of the mean over the last axis."""
    return np.asarray(value.std(axis=-1, ddof=1) / np.sqrt(value.shape[-1]))


def _seconds(request: PlanRequest, before_E: NDArray[np.int32], after_E: NDArray[np.int32]) -> float:
    """Seconds of the busiest link to transfer the layer's homes, as ``CostModel.transfer_seconds``."""
    topology = request.topology
    moved = before_E != after_E
    source, destination = before_E[moved], after_E[moved]
    between = source // topology.ranks_per_node != destination // topology.ranks_per_node
    seconds = request.home_bytes / np.where(between, topology.inter_node_bandwidth, topology.intra_node_bandwidth)
    sent_R = np.bincount(source, seconds, minlength=topology.num_ranks)
    received_R = np.bincount(destination, seconds, minlength=topology.num_ranks)
    return float(max(sent_R.max(), received_R.max()))


def _share(load: NDArray[np.float64]) -> NDArray[np.float64]:
    total = load.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(load, total, out=np.zeros_like(load), where=total > 0))
