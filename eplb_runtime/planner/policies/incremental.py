"""Move as few experts as pay: warm start from the current placement, best swaps first, under budgets.

The search gives each layer a trajectory of steps, each lowering its imbalance; the budgets and the price of a move
decide how far along its trajectory each layer goes. A layer that does not gain on the load planned for and on the
recent windows stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ..align import align
from ..budget import share_out
from ..cost import HYSTERESIS
from ..descent import descend
from ..evaluate import in_units, predicted_imbalance
from ..types import PlanRequest

LEAST_GAIN = 0.002
"""A layer's imbalance must fall at least so much, or it stays as it is."""
SPARE_COPIES = 4
"""Copies an expert may have beyond those its load needs."""
RECENT_WINDOWS = 4
"""Windows, besides the forecast, on which a new placement of a layer must prove itself."""


@dataclass(frozen=True)
class Trajectory:
    """What a layer can reach: after 0, 1, ... N steps.

    Args:
        imbalance: float64 ``[N + 1]``.
        moved: int64 ``[N + 1, 2]``, homes and replicas moved.
        seconds: float64 ``[N + 1]``, to carry them.
        home_rank: int32 ``[E]``, where the search has ended.
        replicas: int32 ``[R, k]``, likewise.
    """

    imbalance: NDArray[np.float64]
    moved: NDArray[np.int64]
    seconds: NDArray[np.float64]
    home_rank: NDArray[np.int32]
    replicas: NDArray[np.int32]

    @property
    def steps(self) -> int:
        return len(self.imbalance) - 1


def incremental(request: PlanRequest) -> Placement:
    """Warm-started search in the home layout, under ``max_moves``, ``max_bytes`` and the price of a move."""
    start = request.start
    units = in_units(request.forecast)
    trajectories = [_explore(request, start, units, layer) for layer in range(request.num_layers)]
    steps = _within_budget(trajectories, [_worth_going(one, request) for one in trajectories], request)
    for layer in np.flatnonzero((steps > 0) & (steps < [one.steps for one in trajectories])).tolist():
        trajectories[layer] = _explore(request, start, units, layer, int(steps[layer]))
    placement = _at_the_end(start, trajectories, steps > 0)
    return _without_losers(request, start, placement)


def _explore(
    request: PlanRequest, start: Placement, units: NDArray[np.int64], layer: int, max_steps: int | None = None
) -> Trajectory:
    """The trajectory of one layer: to where no step gains any more, or of so many steps."""
    topology, load = request.topology, units[layer]
    home_rank = start.home_rank[layer].copy()
    by_rank = start.physical_to_logical[layer].reshape(start.num_ranks, -1)
    replicas = by_rank[:, start.homes_per_rank :].copy()
    total = max(int(load.sum()), 1)
    needed = -(-int(load.max()) * topology.num_ranks // total)
    most = max(needed + SPARE_COPIES, int(start.copy_count[layer].max()))
    max_copies = min(topology.num_ranks, most, 1 + replicas.size)
    if max_steps is None:
        max_steps = 2 * request.num_experts + 2 * replicas.size
    peak = np.empty(max_steps + 1, dtype=np.int64)
    moved = np.empty((max_steps + 1, 2), dtype=np.int32)
    seconds = np.empty(max_steps + 1)
    links = np.array([topology.intra_node_bandwidth, topology.inter_node_bandwidth])
    taken = descend(
        load,
        home_rank,
        replicas,
        topology.ranks_per_node,
        max_copies,
        max_steps,
        tuple((request.home_bytes / links).tolist()),
        tuple((request.replica_bytes / links).tolist()),
        peak,
        moved,
        seconds,
    )
    reached = np.arange(taken + 1)
    return Trajectory(
        peak[reached] * (topology.num_ranks / total),
        moved[reached].astype(np.int64),
        seconds[reached],
        home_rank,
        replicas,
    )


def _worth_going(trajectory: Trajectory, request: PlanRequest) -> int:
    """Steps to where the best is reached, or nearly: the fewest within a tenth of ``LEAST_GAIN`` of the best value."""
    value = trajectory.imbalance
    if request.seconds_per_imbalance is not None:
        value = value + HYSTERESIS * trajectory.seconds / max(request.seconds_per_imbalance, 1e-300)
    if value[0] - value.min() < LEAST_GAIN:
        return 0
    return int(np.argmax(value <= value.min() + LEAST_GAIN / 10))


def _within_budget(trajectories: list[Trajectory], farthest: list[int], request: PlanRequest) -> NDArray[np.int64]:
    """Steps of each layer that the budgets allow, at most ``farthest``."""
    size = np.array([request.home_bytes, request.replica_bytes])
    cut = [(one.imbalance[: end + 1], one.moved[: end + 1]) for one, end in zip(trajectories, farthest, strict=True)]
    return share_out(
        [value for value, _ in cut],
        [np.stack([moved.sum(axis=1), moved @ size], axis=1) for _, moved in cut],
        (request.max_moves, request.max_bytes),
    )


def _at_the_end(start: Placement, trajectories: list[Trajectory], moves: NDArray[np.bool_]) -> Placement:
    """Layers that move stand as at the end of their trajectory, the others as in ``start``."""
    home_rank = start.home_rank.copy()
    standing = start.physical_to_logical.reshape(start.num_layers, start.num_ranks, -1)
    replicas = standing[:, :, start.homes_per_rank :].copy()
    for layer in np.flatnonzero(moves).tolist():
        home_rank[layer], replicas[layer] = trajectories[layer].home_rank, trajectories[layer].replicas
    replica_ranks = np.zeros((start.num_layers, start.num_experts, start.num_ranks), dtype=bool)
    layers, ranks, slots = np.nonzero(replicas != EMPTY)
    replica_ranks[layers, replicas[layers, ranks, slots], ranks] = True
    return align(start, home_rank, replica_ranks)


def _without_losers(request: PlanRequest, start: Placement, placement: Placement) -> Placement:
    """Put layers back that do not gain, by the splitter itself, on the forecast and on forecast and recent windows."""
    judges = np.concatenate([request.forecast[None], request.load[-RECENT_WINDOWS:]])
    gain = predicted_imbalance(judges, start) - predicted_imbalance(judges, placement)
    loses = (gain[0] <= 0) | (gain[0] + gain[1:].mean(axis=0) <= 0)
    if start.home is None or placement.home is None or not loses.any():
        return placement
    return Placement(
        np.where(loses[:, None], start.physical_to_logical, placement.physical_to_logical),
        start.num_experts,
        start.num_ranks,
        np.where(loses[:, None], start.home, placement.home),
        start.epoch,
    )
