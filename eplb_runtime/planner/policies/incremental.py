"""Move few experts: search from the current placement and from placements made anew, and offer a path of placements.

Each layer is searched by itself under the scenarios of the load to come, without regard to what a move costs. What its
searches reach by which cost is its frontier. At one common price of a second each layer stops where its frontier does;
from a high price to none this gives whole placements, from the current one to the best that is known. Which of them is
worth its moves is decided in ``planning``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...moe.routing.water_filling import ballast
from ...placement import Placement
from ..evaluate import in_units, lowest_imbalance
from ..search.align import align_layer, placed_anew
from ..search.budget import share_out
from ..search.descent import GOOD_ENOUGH
from ..search.explore import (
    LITTLE,
    POURED_FROM,
    Found,
    Limits,
    Starts,
    make_starts,
    pour_anew,
    search_layer,
    state_after,
)
from ..search.prices import Question
from ..search.starts import strides
from ..search.threads import in_threads
from ..traffic import worth_by_scenario
from ..types import MOST_OFFERS, PlanRequest

SURE = 2.0
"""A layer's gain must be so many times the standard error of its mean over the scenarios."""
A_MOVE = 1e-3
"""Part of the seconds of a transfer that each move counts besides: of placements whose busiest link is busy equally
long the one with fewer moves is preferred."""
SPARE_COPIES = 4
"""Copies an expert may have beyond those its load needs."""

LayersQuestion = tuple[NDArray[np.int64], NDArray[np.int64], Question]
"""Loads and ballast of all scenarios, and what is asked."""


@dataclass(frozen=True)
class Frontier:
    """States that a layer can reach, each better than all that cost less; the first is the current one.

    Args:
        imbalance: float64 ``[N]``, falling.
        cost: float64 ``[N]``, seconds of the layer's busiest link, and a little for each move; rising. Where the bytes
            of an expert are unknown: moves.
        moved: int64 ``[N, 2]``, homes and replicas moved.
        reached: for each state the search and the steps that lead to it.
    """

    imbalance: NDArray[np.float64]
    cost: NDArray[np.float64]
    moved: NDArray[np.int64]
    reached: tuple[tuple[Found, int], ...]

    def state(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """int32 ``[E]`` home ranks and ``[R, K]`` replicas."""
        found, steps = self.reached[index]
        return state_after(found.home_E, found.replica_RK, found.track.step_N4[1 : steps + 1])

    def hull(self, end: int) -> list[int]:
        """States up to ``end`` at which the frontier stops for some price of its cost: corners of its lower hull."""
        corners = [0]
        while corners[-1] < end:
            at = corners[-1]
            gain = self.imbalance[at] - self.imbalance[at + 1 : end + 1]
            rate = gain / np.maximum(self.cost[at + 1 : end + 1] - self.cost[at], 1e-300)
            corners.append(end - int(np.argmax(rate[::-1])))
        return corners


def incremental(request: PlanRequest) -> tuple[Placement, ...]:
    """Placements in the home layout by the slots moved for them: first the current one, last the best; within
    ``max_moves`` and ``max_bytes``. Where nothing stands yet, the best alone."""
    start = request.start
    search = _Search(request, start)
    if request.current is None:
        ends = in_threads(search.best, request.num_layers)
        return (placed_anew(np.array([home_E for home_E, _ in ends]), np.array([replica for _, replica in ends])),)
    frontiers = in_threads(search.frontier, request.num_layers)
    return _path(request, start, frontiers, _within_budget(frontiers, request))


def _path(
    request: PlanRequest, start: Placement, frontiers: list[Frontier], end_L: NDArray[np.int64]
) -> tuple[Placement, ...]:
    """Whole placements: layers cut at one common price of a second, from a high one to none."""
    corners = [one.hull(int(end)) for one, end in zip(frontiers, end_L, strict=True)]
    segments = []
    for layer, (one, at) in enumerate(zip(frontiers, corners, strict=True)):
        for number, (here, there) in enumerate(pairwise(at)):
            gain, cost = one.imbalance[here] - one.imbalance[there], one.cost[there] - one.cost[here]
            segments.append((-gain / max(cost, 1e-300), layer, number, there))
    segments.sort()
    moved = np.cumsum([_moved_by(frontiers[layer], corners[layer], number) for _, layer, number, _ in segments])
    assert start.home is not None
    slots_LP, home_LE, path, taken = start.physical_to_logical.copy(), start.home.copy(), [start], 0
    for count in _stops(moved):
        reached = {layer: there for _, layer, _, there in segments[taken:count]}
        taken = count
        for layer, there in reached.items():
            slots_LP[layer], home_LE[layer] = align_layer(start, layer, *frontiers[layer].state(there))
        tried = Placement(slots_LP, start.num_experts, start.num_ranks, home_LE, start.epoch)
        path.append(_where_it_gains(request, start, tried))
    return tuple(one for index, one in enumerate(path) if index == 0 or one != path[index - 1])


def _moved_by(one: Frontier, corners: list[int], number: int) -> int:
    return int(one.moved[corners[number + 1]].sum() - one.moved[corners[number]].sum())


def _stops(moved_N: NDArray[np.int64]) -> list[int]:
    """After how many segments a placement is offered: closer together where few slots have moved."""
    if not len(moved_N):
        return []
    targets = moved_N[-1] * (np.arange(1, MOST_OFFERS) / (MOST_OFFERS - 1)) ** 2
    stops = np.searchsorted(np.maximum.accumulate(moved_N), targets) + 1
    return sorted({*np.minimum(stops, len(moved_N)).tolist()[:-1], len(moved_N)})


class _Search:
    """The question of every layer, laid out for the compiled search."""

    def __init__(self, request: PlanRequest, start: Placement) -> None:
        topology = request.topology
        self._request = request
        self._load_LWE = np.ascontiguousarray(
            in_units(np.concatenate([request.scenarios, request.mixes])).transpose(1, 0, 2)
        )
        self._led_by = len(request.scenarios)
        self._lowest_L = lowest_imbalance(request, request.scenarios).mean(axis=0)
        self._home_LE = start.home_rank.copy()  # writable: one compiled version for all
        self._replica_LRK = start.replicas_LRK.copy()
        self._most_L = start.copy_count.max(axis=1)
        links = np.array([topology.intra_node_bandwidth, topology.inter_node_bandwidth])
        self._seconds = request.home_bytes / links, request.replica_bytes / links
        self._a_move = A_MOVE * max(float(seconds.max()) for seconds in self._seconds) or 1.0
        alike = request.speed_R is None and not request.crossing_price
        # Of ranks that are alike, each with one expert, none is better for any of them.
        pointless = alike and start.homes_per_rank == 1 and start.replica_slots == 0
        self._anew = request.max_moves is None and request.max_bytes is None and not pointless
        one = self._load_LWE.shape[1] == 1 and self._anew and start.replica_slots > 0
        self._may_pour = one and request.crossing_price == 0.0 and topology.num_ranks >= POURED_FROM
        self._stays_L = worth_by_scenario(request, start).mean(axis=0)
        self._stride_K = strides(topology.num_ranks, start.replica_slots)

    def best(self, layer: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Home ranks and replicas of the best state found, where nothing stands yet."""
        ends = self._explored(layer, stays=False)
        found = min(ends, key=lambda one: float(one.track.value_N[one.steps]))
        return state_after(found.home_E, found.replica_RK, found.track.step_N4[1 : found.steps + 1])

    def frontier(self, layer: int) -> Frontier:
        ends = self._explored(layer, stays=True)
        reached = [(found, step) for found in ends for step in range(found.steps + 1)]
        value = np.concatenate([found.track.value_N[: found.steps + 1] for found in ends])
        moved = np.concatenate([found.track.moved_N2[: found.steps + 1] for found in ends])
        seconds = np.concatenate([found.track.seconds_N[: found.steps + 1] for found in ends])
        cost = seconds + self._a_move * moved.sum(axis=1)
        value[0] = self._stays_L[layer]
        order = np.lexsort((value, cost))
        order = np.concatenate([[0], order[order > 0]])
        better = np.concatenate([[True], value[order][1:] < np.minimum.accumulate(value[order])[:-1]])
        kept = order[better]
        return Frontier(value[kept], cost[kept], moved[kept], tuple(reached[index] for index in kept.tolist()))

    def _explored(self, layer: int, stays: bool) -> tuple[Found, ...]:
        """What searches found; of a layer that stays first the one that begins there."""
        load_WE, ballast_WR, question = self._question(layer)
        led_WE, led_WR, limits = load_WE[: self._led_by], ballast_WR[: self._led_by], self._limits(layer)
        stands = Starts(self._home_LE[layer, None], self._replica_LRK[layer, None])
        if self._may_pour:
            found, starts = pour_anew(led_WE, led_WR, question, limits)
            if found.track.value_N[0] <= limits.lowest * (1.0 + GOOD_ENOUGH) + LITTLE:
                if not stays:
                    return (found,)
                still = search_layer(load_WE, ballast_WR, question, limits._replace(max_steps=0), stands, True)
                return (still[0], found) if found.start else (found,)
            poured = starts
        starts = make_starts(led_WE, led_WR, question, self._stride_K, self._anew)
        if self._may_pour:
            starts = Starts(*(np.concatenate([one, two[1:]]) for one, two in zip(starts, poured, strict=True)))
        return search_layer(load_WE, ballast_WR, question, limits, starts, stays)

    def _question(self, layer: int) -> LayersQuestion:
        load_WE = self._load_LWE[layer]
        speed_R = self._request.speed_R
        ballast_WR = np.zeros((len(load_WE), self._request.topology.num_ranks), dtype=np.int64)
        if speed_R is not None:
            ballast_WR = ballast(load_WE.sum(axis=1) / speed_R.sum(), speed_R)
        question = Question(
            self._home_LE[layer],
            self._replica_LRK[layer],
            self._request.topology.ranks_per_node,
            *self._seconds,
            self._sources(layer),
            self._request.crossing_price,
        )
        return load_WE, ballast_WR, question

    def _sources(self, layer: int) -> NDArray[np.float64]:
        """float64 ``[E, N]``: where each expert's tokens come from."""
        if self._request.source_share_LNE is not None:
            return np.ascontiguousarray(self._request.source_share_LNE[layer].T)
        nodes = self._request.topology.num_nodes
        return np.full((self._request.num_experts, nodes), 1.0 / nodes)

    def _limits(self, layer: int) -> Limits:
        load_WE, ranks = self._load_LWE[layer], self._request.topology.num_ranks
        needed = -(-load_WE.max(axis=1) * ranks // np.maximum(load_WE.sum(axis=1), 1)).max()
        most = max(int(needed) + SPARE_COPIES, int(self._most_L[layer]))
        slots = self._replica_LRK.shape[2]
        max_copies = min(ranks, most, 1 + ranks * slots)
        max_steps = 2 * load_WE.shape[1] + 2 * ranks * slots
        return Limits(max_copies, max_steps, self._led_by, float(self._lowest_L[layer]), self._stride_K)


def _within_budget(frontiers: list[Frontier], request: PlanRequest) -> NDArray[np.int64]:
    """int64 ``[L]``: the farthest state of each layer that the budgets allow."""
    size = np.array([request.home_bytes, request.replica_bytes])
    return share_out(
        [one.imbalance for one in frontiers],
        [np.stack([one.moved.sum(axis=1), one.moved @ size], axis=1) for one in frontiers],
        (request.max_moves, request.max_bytes),
    )


def _where_it_gains(request: PlanRequest, start: Placement, other: Placement) -> Placement:
    """``other`` in those layers whose gain, by the splitter itself, is more than the scenarios' own noise and than the
    search's tolerance."""
    gain_WL = worth_by_scenario(request, start) - worth_by_scenario(request, other)
    gain_L = gain_WL.mean(axis=0)
    error_L = np.zeros_like(gain_L)
    if len(gain_WL) > 1:  # mixes are made of the scenarios: they say nothing new of their mean
        error_L = gain_WL.std(axis=0, ddof=1) / np.sqrt(len(request.scenarios))
    gains_L = gain_L > np.maximum(SURE * error_L, GOOD_ENOUGH)
    if gains_L.all() or start.home is None or other.home is None:
        return other
    return Placement(
        np.where(gains_L[:, None], other.physical_to_logical, start.physical_to_logical),
        start.num_experts,
        start.num_ranks,
        np.where(gains_L[:, None], other.home, start.home),
        start.epoch,
    )
