"""Move as few experts as pay: warm start from the current placement, best swaps first, under budgets.

The search gives each layer a trajectory of steps, each lowering its imbalance; the budgets and the price of a move
decide how far along its trajectory each layer goes. A layer that does not gain on the forecast and the recent windows
stays as it is; replica slots left empty are filled where that absorbs what strays from the forecast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ..cost import HYSTERESIS, CostModel
from ..evaluate import expected_imbalance, in_units, moves_between
from ..search.align import align
from ..search.budget import share_out
from ..search.descent import descend
from ..search.spare import fill_with_chords, fill_with_hottest
from ..types import MOVE_DESTINATION_SLOT, MOVE_IS_HOME, MOVE_LAYER, MOVE_SOURCE_RANK, PlanRequest

LEAST_GAIN = 0.005
"""A layer's imbalance must fall at least so much, or it stays as it is."""
LEAST_GAIN_OF_FILLING = 0.005
"""The same for filling replica slots beyond need: a replica also costs its refresh at every step."""
SPARE_COPIES = 4
"""Copies an expert may have beyond those its load needs."""


@dataclass(frozen=True)
class Trajectory:
    """What a layer can reach: after 0, 1, ... N steps.

    Args:
        imbalance: float64 ``[N + 1]``.
        moved: int64 ``[N + 1, 2]``, homes and replicas moved.
        seconds: float64 ``[N + 1]``, to carry them.
        home_rank: int32 ``[E]``, where the search has ended.
        replicas: int32 ``[R, k]``, likewise.
        begin: where the search began: the start itself, or with its empty replica slots filled.
        least_steps: 1 if filling them is the first step, which is taken in any case; else 0.
    """

    imbalance: NDArray[np.float64]
    moved: NDArray[np.int64]
    seconds: NDArray[np.float64]
    home_rank: NDArray[np.int32]
    replicas: NDArray[np.int32]
    begin: Placement
    least_steps: int = 0

    @property
    def steps(self) -> int:
        return len(self.imbalance) - 1


def incremental(request: PlanRequest) -> Placement:
    """Warm-started search in the home layout, under ``max_moves``, ``max_bytes`` and the price of a move."""
    start = request.start
    units = in_units(request.forecast)
    trajectories = [_explore(request, start, start, units, layer) for layer in range(request.num_layers)]
    if request.max_moves is None and request.max_bytes is None:
        trajectories = _or_filled_first(request, start, units, trajectories)
    steps = _within_budget(trajectories, [_worth_going(one, request) for one in trajectories], request)
    for layer in np.flatnonzero((steps > 0) & (steps < [one.steps for one in trajectories])).tolist():
        begin, searched = trajectories[layer].begin, int(steps[layer]) - trajectories[layer].least_steps
        trajectories[layer] = _explore(request, start, begin, units, layer, searched)
    placement = _at_the_end(start, trajectories, steps > 0)
    return _use_spare_slots(request, _better_of(request, start, placement))


def _or_filled_first(
    request: PlanRequest, start: Placement, units: NDArray[np.int64], trajectories: list[Trajectory]
) -> list[Trajectory]:
    """For each layer the given trajectory, or one that fills the empty replica slots first, if that ends better."""
    begin = fill_with_hottest(start, request.forecast)
    fills = (begin.physical_to_logical != start.physical_to_logical).any(axis=1)
    others = list(trajectories)
    for layer in np.flatnonzero(fills).tolist():
        one, other = trajectories[layer], _explore(request, start, begin, units, layer)
        others[layer] = Trajectory(
            np.concatenate([one.imbalance[:1], other.imbalance]),
            np.concatenate([one.moved[:1], other.moved]),
            np.concatenate([one.seconds[:1], other.seconds]),
            other.home_rank,
            other.replicas,
            begin,
            least_steps=1,
        )
    gain = expected_imbalance(request, _at_the_end(start, trajectories, fills)) - expected_imbalance(
        request, _at_the_end(start, others, fills)
    )
    dearer = np.array([two.seconds[-1] - one.seconds[-1] for one, two in zip(trajectories, others, strict=True)])
    pays = fills & (gain >= (0.0 if request.current is None else LEAST_GAIN_OF_FILLING))
    if request.seconds_per_imbalance is not None:
        pays &= request.seconds_per_imbalance * gain > HYSTERESIS * dearer
    return [two if better else one for one, two, better in zip(trajectories, others, pays, strict=True)]


def _explore(
    request: PlanRequest,
    start: Placement,
    begin: Placement,
    units: NDArray[np.int64],
    layer: int,
    max_steps: int | None = None,
) -> Trajectory:
    """The trajectory of one layer from ``begin``: to where no step gains any more, or of so many steps."""
    topology, load = request.topology, units[layer]
    home_rank, replicas = begin.home_rank[layer].copy(), _replica_slots(begin)[layer].copy()
    total = max(int(load.sum()), 1)
    needed = -(-int(load.max()) * topology.num_ranks // total)
    most = max(needed + SPARE_COPIES, int(begin.copy_count[layer].max()))
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
        start.home_rank[layer].copy(),
        _replica_slots(start)[layer].copy(),
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
        begin,
    )


def _replica_slots(placement: Placement) -> NDArray[np.int32]:
    """int32 ``[L, R, k]``."""
    by_rank = placement.physical_to_logical.reshape(placement.num_layers, placement.num_ranks, -1)
    return by_rank[:, :, placement.homes_per_rank :]


def _worth_going(trajectory: Trajectory, request: PlanRequest) -> int:
    """Steps to where the best is reached, or nearly: the fewest within a tenth of ``LEAST_GAIN`` of the best value."""
    value = trajectory.imbalance
    if request.seconds_per_imbalance is not None:
        value = value + HYSTERESIS * trajectory.seconds / max(request.seconds_per_imbalance, 1e-300)
    value = value[trajectory.least_steps :]
    if value[0] - value.min() < LEAST_GAIN:
        return trajectory.least_steps
    return trajectory.least_steps + int(np.argmax(value <= value.min() + LEAST_GAIN / 10))


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
    replicas = _replica_slots(start).copy()
    for layer in np.flatnonzero(moves).tolist():
        home_rank[layer], replicas[layer] = trajectories[layer].home_rank, trajectories[layer].replicas
    replica_ranks = np.zeros((start.num_layers, start.num_experts, start.num_ranks), dtype=bool)
    layers, ranks, slots = np.nonzero(replicas != EMPTY)
    replica_ranks[layers, replicas[layers, ranks, slots], ranks] = True
    return align(start, home_rank, replica_ranks)


def _better_of(request: PlanRequest, standing: Placement, other: Placement) -> Placement:
    """Layer by layer the one with less expected imbalance, by the splitter itself; ties stay as they stand."""
    gains = expected_imbalance(request, other) < expected_imbalance(request, standing)
    return _choose(gains, other, standing)


def _choose(first: NDArray[np.bool_], one: Placement, other: Placement) -> Placement:
    """Layers of ``one`` where ``first`` ``[L]`` holds, of ``other`` elsewhere."""
    if one.home is None or other.home is None or not first.any():
        return other
    return Placement(
        np.where(first[:, None], one.physical_to_logical, other.physical_to_logical),
        one.num_experts,
        one.num_ranks,
        np.where(first[:, None], one.home, other.home),
        other.epoch,
    )


def _use_spare_slots(request: PlanRequest, placement: Placement) -> Placement:
    """Fill empty replica slots in the layers where that absorbs what strays from the forecast, with what is left."""
    if placement.physical_to_logical.min() != EMPTY or not (len(request.recent) or request.current is None):
        return placement
    hot = fill_with_hottest(placement, request.forecast)
    filled = _better_of(request, hot, fill_with_chords(placement, request.forecast)) if len(request.recent) else hot
    if request.current is None:
        return filled
    value = np.stack([expected_imbalance(request, placement), expected_imbalance(request, filled)], axis=1)
    cost = CostModel(home_bytes=request.home_bytes, replica_bytes=request.replica_bytes)
    size = np.array([request.replica_bytes, request.home_bytes])
    spent = [_spent(moves_between(request.current, p, request.topology), p, size) for p in (placement, filled)]
    left = [
        None if limit is None else int(limit - spent[0][:, currency].sum())
        for currency, limit in enumerate((request.max_moves, request.max_bytes))
    ]
    pays = value[:, 0] - value[:, 1] >= LEAST_GAIN_OF_FILLING
    if request.seconds_per_imbalance is not None:
        moves = moves_between(placement, filled, request.topology)
        seconds = [
            cost.transfer_seconds(moves[moves[:, MOVE_LAYER] == layer], request.topology, request.slots_per_rank)
            for layer in range(request.num_layers)
        ]
        pays &= request.seconds_per_imbalance * (value[:, 0] - value[:, 1]) > HYSTERESIS * np.array(seconds)
    offers = [np.array([before, after if pay else before]) for (before, after), pay in zip(value, pays, strict=True)]
    prices = [np.stack([np.zeros(2, dtype=np.int64), extra]) for extra in spent[1] - spent[0]]
    taken = share_out(offers, prices, tuple(left))
    return _choose(pays & (taken > 0), filled, placement)


def _spent(moves: NDArray[np.int32], placement: Placement, size: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 ``[L, 2]``: slots and bytes that travel between ranks, by layer."""
    travels = moves[:, MOVE_SOURCE_RANK] != moves[:, MOVE_DESTINATION_SLOT] // placement.slots_per_rank
    layer = moves[travels, MOVE_LAYER]
    weight = size[moves[travels, MOVE_IS_HOME]]
    slots = np.bincount(layer, minlength=placement.num_layers)
    total = np.zeros(placement.num_layers, dtype=np.int64)
    np.add.at(total, layer, weight)
    return np.stack([slots, total], axis=1)
