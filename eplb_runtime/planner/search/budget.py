"""Share a budget of moves and bytes out over the layers, by gain."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray


def share_out(
    value: list[NDArray[np.float64]], cost: list[NDArray[np.int64]], limits: tuple[int | None, ...]
) -> NDArray[np.int64]:
    """How far each layer may follow its trajectory: always the stretch with most gain per cost next, while it fits.

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
