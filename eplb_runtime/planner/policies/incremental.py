"""Move as few experts as pay: warm start from the current placement, best swaps first, under budgets.

Each layer gives a trajectory of swaps, each lowering its hottest rank; the budgets and the price of a move decide how
far along its trajectory each layer goes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ..align import align
from ..swaps import swap_homes
from ..types import PlanRequest

MAX_SWAPS_PER_EXPERT = 2


def incremental(request: PlanRequest) -> Placement:
    """Warm-started best swaps of homes, in the home layout, under ``max_moves``."""
    start = request.start
    home_rank = start.home_rank.copy()
    topology = request.topology
    trajectories = [
        swap_homes(
            np.ascontiguousarray(request.forecast[layer]),
            home_rank[layer].copy(),
            topology.num_ranks,
            topology.ranks_per_node,
            MAX_SWAPS_PER_EXPERT * request.num_experts,
        )
        for layer in range(request.num_layers)
    ]
    taken = share_out(
        [2 * np.arange(len(peak)) for _, peak in trajectories],
        [
            peak / max(float(load.mean()), 1e-300)
            for (_, peak), load in zip(trajectories, request.forecast, strict=True)
        ],
        request.max_moves,
    )
    for layer, (swaps, _) in enumerate(trajectories):
        for here, there in swaps[: taken[layer]]:
            ranks = home_rank[layer]
            ranks[here], ranks[there] = ranks[there], ranks[here]
    return align(start, home_rank, kept_replicas(start, home_rank))


def share_out(
    moves: list[NDArray[np.int64]], value: list[NDArray[np.float64]], max_moves: int | None
) -> NDArray[np.int64]:
    """How far each layer may follow its trajectory: always the step with most gain per move next, while it fits.

    Args:
        moves: for each layer int ``[N + 1]``, moves made after 0, 1, ... N steps, not falling.
        value: for each layer float ``[N + 1]``, what to lower, after as many steps.
        max_moves: over all layers; None: no limit.

    Returns:
        int64 ``[L]``, steps to take in each layer.
    """
    taken = np.zeros(len(moves), dtype=np.int64)
    if max_moves is None:
        return np.array([int(np.argmin(layer)) for layer in value])
    left = max_moves
    while True:
        best, best_layer, best_step = 0.0, -1, 0
        for layer, (cost, goal) in enumerate(zip(moves, value, strict=True)):
            at = taken[layer]
            gain = goal[at] - goal[at + 1 :]
            price = cost[at + 1 :] - cost[at]
            rate = np.where(price <= left, gain / np.maximum(price, 1), -1.0)
            if rate.size and rate.max() > best:
                best, best_layer, best_step = float(rate.max()), layer, at + 1 + int(rate.argmax())
        if best_layer < 0:
            return taken
        left -= int(moves[best_layer][best_step] - moves[best_layer][taken[best_layer]])
        taken[best_layer] = best_step


def kept_replicas(start: Placement, home_rank: NDArray[np.int32]) -> NDArray[np.bool_]:
    """bool ``[L, E, R]``: the replicas of ``start`` that do not stand on an expert's new home rank."""
    shape = (start.num_layers, start.num_ranks, start.slots_per_rank)
    replicas = start.physical_to_logical.reshape(shape)[:, :, start.homes_per_rank :]
    layer, rank, slot = np.nonzero(replicas != EMPTY)
    expert = replicas[layer, rank, slot]
    kept = np.zeros((start.num_layers, start.num_experts, start.num_ranks), dtype=bool)
    kept[layer, expert, rank] = home_rank[layer, expert] != rank
    return kept
