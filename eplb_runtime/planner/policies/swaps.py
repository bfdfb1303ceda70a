"""Pairs of homes that change places, found by NumPy alone: what plans while the other policies are being compiled.

In each layer the rank that takes longest gives one of its experts for another rank's, whichever pair leaves the two
best balanced, until no pair helps. Replica slots stay empty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ..cost import HYSTERESIS
from ..evaluate import error_of, error_of_one, imbalance, surely_gains
from ..search.align import align
from ..search.budget import share_out
from ..types import PlanError, PlanRequest

LEAST_GAIN = 0.01
"""A layer's imbalance must fall at least so much, or it stays as it is."""
MOST_SWAPS_PER_RANK = 2
"""In a layer, on average."""


class _Swaps(NamedTuple):
    """Successive swaps of one layer.

    Args:
        imbalance: float64 ``[N + 1]``, after 0, 1, ... N swaps.
        pairs: int64 ``[N, 2]``, the experts of each.
    """

    imbalance: NDArray[np.float64]
    pairs: NDArray[np.int64]


def swaps(request: PlanRequest) -> Placement:
    """Swap homes under ``max_moves``, ``max_bytes`` and the price of a move (``home`` layout).

    Raises:
        PlanError: replica slots of the current placement hold experts.
    """
    start = request.start
    if (start.replicas_LRK != EMPTY).any():
        raise PlanError("policy 'swaps' moves homes alone, and replicas stand: choose incremental")
    rank_LE = start.home_rank.copy()
    speed_R = np.ones(start.num_ranks) if request.speed_R is None else request.speed_R
    found = [_search(load_E, rank_E, speed_R) for load_E, rank_E in zip(request.forecast, rank_LE, strict=True)]
    price = _price_of_swap(request)
    worth = [one.imbalance + price * np.arange(len(one.imbalance)) for one in found]
    best = [int(value.argmin()) if value[0] - value.min() >= LEAST_GAIN else 0 for value in worth]
    if request.weighs_noise and not request.declared and (len(request.scenarios) > 1 or request.one_known):
        tried = [layer for layer, end in enumerate(best) if end]
        gains = [_unled_gain(request, layer, rank_LE[layer], speed_R) for layer in tried]
        sure = surely_gains(*np.reshape(gains, (-1, 2)).T)
        request.doubted.update(layer for layer, is_sure in zip(tried, sure, strict=True) if not is_sure)
        best = [0 if layer in request.doubted else end for layer, end in enumerate(best)]
    of_swap = np.array([2, 2 * request.home_bytes])
    moved = [np.arange(end + 1)[:, None] * of_swap for end in best]
    value = [one.imbalance[: end + 1] for one, end in zip(found, best, strict=True)]
    for layer, taken in enumerate(share_out(value, moved, (request.max_moves, request.max_bytes)).tolist()):
        for one, other in found[layer].pairs[:taken].tolist():
            rank_LE[layer, [one, other]] = rank_LE[layer, [other, one]]
    return align(start, rank_LE, start.replicas_LRK)


def _unled_gain(
    request: PlanRequest, layer: int, rank_E: NDArray[np.int32], speed_R: NDArray[np.float64]
) -> tuple[float, float]:
    """The mean gain of swaps for half of the scenarios on the other half, and its error; of one, what chance may do."""
    load_WE, gains = request.scenarios[:, layer], []
    if len(load_WE) == 1:
        found = _search(load_WE[0], rank_E, speed_R)
        return found.imbalance[0] - found.imbalance[-1], error_of_one(load_WE[0], len(speed_R))
    for half in (0, 1):
        found = _search(load_WE[half::2].mean(axis=0), rank_E, speed_R)
        after_E = rank_E.copy()
        for one, other in found.pairs.tolist():
            after_E[[one, other]] = after_E[[other, one]]
        before, after = (
            [
                imbalance(np.bincount(ranks_E, load_E, len(speed_R)).astype(np.float64), speed_R)
                for load_E in load_WE[1 - half :: 2]
            ]
            for ranks_E in (rank_E, after_E)
        )
        gains.append(np.subtract(before, after))
    return float(np.concatenate(gains).mean()), error_of(np.concatenate(gains))


def _price_of_swap(request: PlanRequest) -> float:
    """Imbalance of a layer that one swap must take away to pay for its bytes over the slowest link."""
    if request.seconds_per_imbalance is None:
        return 0.0
    slowest = min(request.topology.intra_node_bandwidth, request.topology.inter_node_bandwidth)
    return HYSTERESIS * request.home_bytes / slowest / max(request.seconds_per_imbalance, 1e-300)


def _search(load_E: NDArray[np.float64], rank_E: NDArray[np.int32], speed_R: NDArray[np.float64]) -> _Swaps:
    """Swap until the layer's slowest rank finds no pair that helps it."""
    rank_E, ranks = rank_E.astype(np.int64), len(speed_R)
    load_R = np.bincount(rank_E, load_E, minlength=ranks)
    even = load_E.sum() / speed_R.sum()
    imbalance = [float((load_R / speed_R).max())]
    pairs: list[tuple[int, int]] = []
    while len(pairs) < MOST_SWAPS_PER_RANK * ranks:
        time_R = load_R / speed_R
        slowest = int(time_R.argmax())
        ours, theirs = np.flatnonzero(rank_E == slowest), np.flatnonzero(rank_E != slowest)
        given = load_E[ours][:, None] - load_E[theirs]
        partner = rank_E[theirs]
        after = np.maximum((load_R[slowest] - given) / speed_R[slowest], (load_R[partner] + given) / speed_R[partner])
        if not after.size or after.min() >= time_R[slowest] * (1.0 - 1e-9):
            break
        one, other = np.unravel_index(int(after.argmin()), after.shape)
        taker = int(partner[other])
        load_R[slowest] -= given[one, other]
        load_R[taker] += given[one, other]
        pairs.append((int(ours[one]), int(theirs[other])))
        rank_E[ours[one]], rank_E[theirs[other]] = taker, slowest
        imbalance.append(float((load_R / speed_R).max()))
    return _Swaps(
        np.array(imbalance) / even if even > 0 else np.ones(len(imbalance)),
        np.array(pairs, dtype=np.int64).reshape(-1, 2),
    )
