"""Share a budget of moves and bytes out over the layers, by gain."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

FEW = 64
"""Moves up to which the best way to share them out is found; beyond, what is left over at the end is little."""


def share_out(
    value: list[NDArray[np.float64]], cost: list[NDArray[np.int64]], limits: tuple[int | None, ...]
) -> NDArray[np.int64]:
    """How far each layer may follow its trajectory: always the stretch with most gain per cost next, while it fits.

    Few moves alone are shared out at best, by dynamic programming.

    Args:
        value: for each layer float64 ``[N + 1]``, what to lower, after 0, 1, ... N steps.
        cost: for each layer int64 ``[N + 1, B]``, what it has cost by then, in each of B currencies. Gain is measured
            per unit of the first.
        limits: for each currency, over all layers; None: no limit.

    Returns:
        int64 ``[L]``, steps to take in each layer; equal rates go to the lower layer. Without limits each layer goes to
        its end.
    """
    taken = np.zeros(len(value), dtype=np.int64)
    if all(limit is None for limit in limits):
        return np.array([len(layer) - 1 for layer in value], dtype=np.int64)
    if limits[0] is not None and limits[0] <= FEW and all(limit is None for limit in limits[1:]):
        return _share_out_few(value, [of_layer[:, 0] for of_layer in cost], limits[0])
    left = np.array([np.inf if limit is None else limit for limit in limits])
    queue: list[tuple[float, int, int]] = []

    def offer(layer: int) -> None:
        at = int(taken[layer])
        gain = value[layer][at] - value[layer][at + 1 :]
        price = cost[layer][at + 1 :] - cost[layer][at]
        rate = np.where((price <= left).all(axis=1), gain / np.maximum(price[:, 0], 1), 0.0)
        if rate.size and rate.max() > 0:
            heapq.heappush(queue, (-float(rate.max()), layer, at + 1 + int(rate.argmax())))

    for layer in range(len(value)):
        offer(layer)
    while queue:
        _, layer, step = heapq.heappop(queue)
        price = cost[layer][step] - cost[layer][taken[layer]]
        if (price <= left).all():
            left -= price
            taken[layer] = step
        offer(layer)
    return taken


def _share_out_few(value: list[NDArray[np.float64]], moves: list[NDArray[np.int64]], most: int) -> NDArray[np.int64]:
    """`share_out` of so many moves: the most gain there is; among equals the fewest moves."""
    gain_M = np.zeros(most + 1)
    taken_LM = np.zeros((len(value), most + 1), dtype=np.int64)
    for layer, (value_N, moves_N) in enumerate(zip(value, moves, strict=True)):
        before_M = gain_M.copy()
        for step in np.flatnonzero((moves_N <= most) & (value_N < value_N[0])).tolist():
            cost = int(moves_N[step])
            with_step_M = before_M[: most + 1 - cost] + (value_N[0] - value_N[step])
            more_M = with_step_M > gain_M[cost:]
            gain_M[cost:][more_M] = with_step_M[more_M]
            taken_LM[layer, cost:][more_M] = step
    left = int(gain_M.argmax())
    taken = np.zeros(len(value), dtype=np.int64)
    for layer in reversed(range(len(value))):
        taken[layer] = taken_LM[layer, left]
        left -= int(moves[layer][taken[layer]])
    return taken
