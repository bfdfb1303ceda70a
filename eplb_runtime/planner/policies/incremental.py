"""Move as few experts as pay: search from the current placement and from placements made anew, under budgets.

Each layer is searched by itself under the scenarios of the load to come; the budgets and the price of a move decide how
far along its track it goes. A layer whose gain is within what the scenarios differ by stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...moe.routing.water_filling import ballast
from ...placement import EMPTY, Placement
from ..cost import HYSTERESIS
from ..evaluate import UNITS, in_units, lowest_imbalance, most_to_gain_first
from ..search.align import align, placed_anew
from ..search.budget import share_out
from ..search.descent import GOOD_ENOUGH
from ..search.explore import LITTLE, POURED_FROM, Found, Limits, Starts, grow_anew, make_starts, pour_anew, search_layer
from ..search.few_moves import MOST_MOVES, Frontier, search_few_moves
from ..search.prices import Question, empty_track
from ..search.starts import strides
from ..search.threads import in_time
from ..traffic import where_it_pays
from ..types import PlanRequest
from .by_seconds import by_seconds

LEAST_GAIN = 0.005
"""A layer's imbalance must fall at least so much, or it stays as it is."""
PRICE_OF_ALL, STRAY = 0.5, 0.1
"""Imbalance that moving every slot of a layer must be worth besides what it costs in seconds, where the scenarios are
at least so far from the forecast (the share of tokens that go elsewhere); in proportion where loads are steadier: what
a move gains there is not soon lost again. Declared loads are certain: there moves cost their seconds alone."""
FIRST = 0.02
"""At most that, where no replica slot is in use yet: a first plan lasts."""
FIRST_FEW, FEW = 0.1, 0.5
"""And that, where fewer moves are allowed than this share of the replica slots: at a small price the first steps of a
long way gain little by themselves."""
WANDERING = 0.2
"""And in layers whose load surely moves on: scenarios stray there by the errors of the forecast on windows of the past,
so that a gain is one on the next window."""
LEADING, LED_FROM = 5, 64
"""Loads that lead a search for copies, from so many ranks on; among fewer all scenarios do, in little time."""
BY_CHANCE = (0.6, 1.25)
"""Squares of what a merged load strays over those of the loads that it stands for, where these stray by chance alone:
measured .67 to 1.09. Windows that alternate cancel out, and windows alike add up."""
RARE = 0.1
"""Of the mean expert's tokens: noise in fewer says nothing about the way in which a load strays."""
MOST_SHARES = 2**18
"""Shares of copies over all scenarios that a search has room for; an expert may have as many copies as there are ranks,
or fewer where there is no room."""
SPARE_COPIES = 4
"""Copies an expert may have beyond those its load needs, however little room there is."""
WINDOWS_OF_SECONDS = 5
"""Fewer do not tell a load that wanders from one that is noisy."""
CHEAP = 0.02
"""Imbalance that the seconds of moving a whole layer are worth at most: where weights are dearer, the search for single
moves does better over time."""

LayersQuestion = tuple[NDArray[np.int64], NDArray[np.int64], Question]
"""Loads and ballast of all scenarios, and what is asked."""


@dataclass(frozen=True)
class Trajectory:
    """What a layer can reach: after 0, 1, ... N steps.

    Args:
        imbalance: float64 ``[N + 1]``.
        moved: int64 ``[N + 1, 2]``, homes and replicas moved.
        seconds: float64 ``[N + 1]``, to carry them.
        found: the search.
        anew: it began elsewhere than where the layer stood; that is the first step then.
        most_copies: of one expert.
        taken: steps that are worth going and within the budgets.
        few: what a search under the budget reaches; where it is given, steps are no longer a path: each is a placement
            by itself.
        origin: int64 ``[N + 1]``, which of ``few``; -1 - n: what ``found`` has reached after n steps.
    """

    imbalance: NDArray[np.float64]
    moved: NDArray[np.int64]
    seconds: NDArray[np.float64]
    found: Found
    anew: bool
    most_copies: int
    taken: int = 0
    few: Frontier | None = None
    origin: NDArray[np.int64] | None = None

    @property
    def steps(self) -> int:
        return len(self.imbalance) - 1

    def cut(self, steps: int) -> Trajectory:
        """The same after so many steps only."""
        if self.few is not None and self.origin is not None:
            place = int(self.origin[steps])
            if place >= 0:
                at = self.few.home_NE[place], self.few.replica_NRK[place]
                return replace(self, found=self.found._replace(home_E=at[0], replica_RK=at[1], steps=0))
            steps = -1 - place
        return replace(self, found=self.found.after(steps - self.anew))


def incremental(request: PlanRequest) -> Placement:
    """Search in the home layout, under ``max_moves``, ``max_bytes`` and the price of a move."""
    start = request.start
    if answers(request):
        return by_seconds(request, _Search(request, start).refined)
    found = _search(request, start)
    if request.current is None:
        ends = [one.found for one in found]
        return placed_anew(np.array([end.home_E for end in ends]), np.array([end.replica_RK for end in ends]))
    moves_L = np.array([one.taken > 0 for one in found])
    return where_it_pays(request, start, _at_the_end(start, [one.found for one in found], moves_L))


def answers(request: PlanRequest) -> bool:
    """Return whether this is a question of homes alone, whose moves cost little, as `by_seconds` answers."""
    return (
        request.current is not None
        and request.start.replica_slots == 0
        and request.start.homes_per_rank > 1
        and request.max_moves is None
        and request.max_bytes is None
        and request.speed_R is None
        and not request.declared
        and len(request.scenarios) >= WINDOWS_OF_SECONDS  # windows without tokens are none
        and (request.crossing_price == 0.0 or request.source_share_LNE is None)
        and (
            request.seconds_per_imbalance is None
            or bool(_seconds_of_all(request) * HYSTERESIS * request.trust <= CHEAP * request.seconds_per_imbalance)
        )
    )


def _seconds_of_all(request: PlanRequest) -> float:
    """Seconds in which a rank receives as many homes as it has, between nodes where there are several."""
    topology = request.topology
    bandwidth = topology.inter_node_bandwidth if topology.num_nodes > 1 else topology.intra_node_bandwidth
    return request.start.homes_per_rank * request.home_bytes / bandwidth


def _search(request: PlanRequest, start: Placement) -> list[Trajectory]:
    """How far each layer goes, and where that ends."""
    search = _Search(request, start)
    in_order = request.deadline is None
    order = list(range(request.num_layers)) if in_order else most_to_gain_first(request)
    trajectories = in_time(search.layer, search.not_searched, order, request.deadline)
    farthest = [search.worth_going(layer, one) for layer, one in enumerate(trajectories)]
    steps = _within_budget(trajectories, farthest, request)
    in_part = [one.few is not None or step < one.steps for one, step in zip(trajectories, steps, strict=True)]
    for layer in np.flatnonzero((steps > 0) & in_part).tolist():
        trajectories[layer] = trajectories[layer].cut(int(steps[layer]))
    return [replace(one, taken=int(step)) for one, step in zip(trajectories, steps, strict=True)]


class _Search:
    """The question of every layer, laid out for the compiled search."""

    def __init__(self, request: PlanRequest, start: Placement) -> None:
        topology = request.topology
        self._request = request
        self._loads: list[NDArray[np.int64]] = [np.empty((0, 0), dtype=np.int64)] * request.num_layers
        self._led_by_L = np.empty(request.num_layers, dtype=np.int64)
        self._lowest_L = np.empty(request.num_layers)
        for layers, leading in _leading(request):
            units_LWE = in_units(np.concatenate([leading, request.mixes[:, layers]])).transpose(1, 0, 2)
            self._led_by_L[layers] = len(leading)
            self._lowest_L[layers] = lowest_imbalance(request, leading).mean(axis=0)
            for layer, units_WE in zip(layers.tolist(), np.ascontiguousarray(units_LWE), strict=True):
                self._loads[layer] = units_WE
        self._home_LE = start.home_rank.copy()  # writable: one compiled version for all
        self._replica_LRK = start.replicas_LRK.copy()
        self._most_L = start.copy_count.max(axis=1)
        links = np.array([topology.intra_node_bandwidth, topology.inter_node_bandwidth])
        self._seconds = request.home_bytes / links, request.replica_bytes / links
        of_all_L = PRICE_OF_ALL * np.minimum(_stray(request) / STRAY, 1.0)
        unused_L = (start.replicas_LRK == EMPTY).all(axis=(1, 2)) & (start.replica_slots > 0)
        few = _allowed_moves(request) < FEW * start.replica_slots * topology.num_ranks * request.num_layers
        of_all_L[unused_L] = np.minimum(of_all_L[unused_L], FIRST_FEW if few else FIRST)
        if request.wanders_L is not None:
            of_all_L[request.wanders_L] *= WANDERING
        free_of_price = request.current is None or request.declared or answers(request)
        self._price_L = np.zeros_like(of_all_L) if free_of_price else of_all_L / request.num_slots
        self._seconds_price = _seconds_price(request)
        alike = request.speed_R is None and not request.crossing_price
        # Of ranks that are alike, each with one expert, none is better for any of them.
        pointless = alike and start.homes_per_rank == 1 and start.replica_slots == 0
        self._anew = not _is_limited(request) and not pointless
        one = len(request.scenarios) + len(request.mixes) == 1 and self._anew and start.replica_slots > 0
        free = self._seconds_price == 0.0 and request.crossing_price == 0.0
        self._may_pour = one and free and topology.num_ranks >= POURED_FROM
        # Of one window of a load that goes on nobody knows how far it strays: a search would fit it.
        grows = one and request.variance is not None and topology.num_ranks >= POURED_FROM
        self._variance_LE = _variance_in_units(request) if grows and request.crossing_price == 0.0 else None
        self._stride_K = strides(topology.num_ranks, start.replica_slots)
        self._most_moves = _few_moves(request)

    def layer(self, layer: int) -> Trajectory:
        question = self._question(layer)
        limits, fewer = self._limits(layer), self._limits(layer, of_most=False)
        found = self._explored(layer, question, limits)
        enough = limits.lowest * (1.0 + GOOD_ENOUGH) + LITTLE
        if fewer.max_copies != limits.max_copies and found.track.value_N[found.steps] > enough:
            with_fewer = self._explored(layer, question, fewer)
            if self._worth(layer, with_fewer) < self._worth(layer, found):
                found, limits = with_fewer, fewer
        track, reached = found.track, found.steps + 1
        value, moved, seconds = track.value_N[:reached], track.moved_N2[:reached], track.seconds_N[:reached]
        if found.start > 0:
            value = np.concatenate([[np.inf], value])
            moved = np.concatenate([np.zeros((1, 2), dtype=np.int64), moved])
            seconds = np.concatenate([[0.0], seconds])
        one = Trajectory(value, moved, seconds, found, found.start > 0, limits.max_copies)
        return one if self._most_moves == 0 else self._with_few_moves(layer, question, one)

    def not_searched(self, layer: int) -> Trajectory:
        """The layer as it is, of which nothing is judged."""
        assert self._request.deadline is not None
        self._request.deadline.left_out.add(layer)
        track, at = empty_track(1), (self._home_LE[layer], self._replica_LRK[layer])
        found = Found(*at, track, 0, 0, *at)
        return Trajectory(track.value_N, track.moved_N2, track.seconds_N, found, False, 0)

    def _with_few_moves(self, layer: int, question: LayersQuestion, one: Trajectory) -> Trajectory:
        """The same with what a search under the budget reaches; what costs more without being better is left out."""
        load_WE, ballast_WR = question[0][: self._led_by_L[layer]], question[1][: self._led_by_L[layer]]
        few = search_few_moves(load_WE, ballast_WR, question[2], one.most_copies, self._most_moves)
        better = np.flatnonzero(np.isfinite(few.value_N))[1:]
        value = np.concatenate([one.imbalance, few.value_N[better]])
        moved = np.concatenate([one.moved, few.moved_N2[better]])
        seconds = np.concatenate([one.seconds, few.seconds_N[better]])
        origin = np.concatenate([-1 - np.arange(len(one.imbalance)), better])
        cost = np.stack([moved.sum(axis=1), moved @ [self._request.home_bytes, self._request.replica_bytes], value])
        order = np.lexsort(cost[::-1])
        order = order[order != 0]
        left = [0]
        for point in order.tolist():
            if not (cost[:, left] <= cost[:, [point]]).all(axis=0).any():
                left.append(point)
        return replace(
            one, imbalance=value[left], moved=moved[left], seconds=seconds[left], few=few, origin=origin[left]
        )

    def refined(self, layer: int, home_E: NDArray[np.int32]) -> NDArray[np.int32]:
        """Where a search from these home ranks gets, by steps that pay for their seconds."""
        question, limits = self._question(layer), self._limits(layer)
        begin = Starts(home_E[None], self._replica_LRK[layer, None])
        found = search_layer(*question, self._seconds_price, limits, begin)
        reached = slice(found.steps + 1)
        worth = found.track.value_N[reached] + self._seconds_price * found.track.seconds_N[reached]
        steps = int(np.argmax(worth <= worth.min() + LEAST_GAIN / 10))
        return found.after(steps).home_E

    def _explored(self, layer: int, question: LayersQuestion, limits: Limits) -> Found:
        """The layer's search; none, where pouring alone comes near to the bound."""
        load_WE, ballast_WR = question[0][: self._led_by_L[layer]], question[1][: self._led_by_L[layer]]
        poured = None
        if self._variance_LE is not None:
            return grow_anew(load_WE, ballast_WR, self._variance_LE[layer], question[2], self._seconds_price, limits)
        if self._may_pour and self._price_L[layer] == 0.0:
            found, poured = pour_anew(load_WE, ballast_WR, question[2], limits)
            if found.track.value_N[0] <= limits.lowest * (1.0 + GOOD_ENOUGH) + LITTLE:
                return found
        starts = make_starts(load_WE, ballast_WR, question[2], self._stride_K, self._anew)
        if poured is not None:
            starts = Starts(*(np.concatenate([one, two[1:]]) for one, two in zip(starts, poured, strict=True)))
        return search_layer(*question, self._seconds_price, limits, starts)

    def worth_going(self, layer: int, one: Trajectory) -> int:
        """Steps to where the best is reached, or nearly: the fewest within a tenth of ``LEAST_GAIN`` of the best."""
        least = int(one.anew)
        value = one.imbalance + self._seconds_price * one.seconds + one.moved @ self._prices(layer)
        value = value[least:]
        if self._request.current is None:
            return one.steps
        if least == 0 and value[0] - value.min() < LEAST_GAIN:
            return 0
        return least + int(np.argmax(value <= value.min() + LEAST_GAIN / 10))

    def _prices(self, layer: int) -> tuple[float, float]:
        """Of a home and of a replica."""
        return float(self._price_L[layer]), float(self._price_L[layer])

    def _question(self, layer: int) -> LayersQuestion:
        load_WE = self._loads[layer]
        speed_R = self._request.speed_R
        ballast_WR = np.zeros((len(load_WE), self._request.topology.num_ranks), dtype=np.int64)
        if speed_R is not None:
            ballast_WR = ballast(load_WE.sum(axis=1) / speed_R.sum(), speed_R)
        node = self._request.topology.ranks_per_node
        question = Question(
            self._home_LE[layer],
            self._replica_LRK[layer],
            node,
            *self._prices(layer),
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

    def _worth(self, layer: int, found: Found) -> float:
        """Imbalance where a search ended, and what going there costs."""
        track, end = found.track, found.steps
        cost = self._seconds_price * track.seconds_N[end] + track.moved_N2[end] @ self._prices(layer)
        return float(track.value_N[end] + cost)

    def _limits(self, layer: int, of_most: bool = True) -> Limits:
        """Limits of the search, with copies of an expert for the scenario in which one needs most of them, or for that
        in which it needs fewest: where slots are few, copies for the former are missed elsewhere."""
        load_WE, ranks = self._loads[layer], self._request.topology.num_ranks
        needed_W = -(-load_WE.max(axis=1) * ranks // np.maximum(load_WE.sum(axis=1), 1))
        needed_W = needed_W[needed_W > 0] if needed_W.any() else needed_W
        needed = needed_W.max() if of_most else needed_W.min()
        most = max(int(needed) + SPARE_COPIES, int(self._most_L[layer]))
        slots = self._replica_LRK.shape[2]
        room = MOST_SHARES // (len(load_WE) * max(min(ranks * slots, load_WE.shape[1]), 1))
        max_copies = min(ranks, max(most, room), 1 + ranks * slots)
        max_steps = 2 * load_WE.shape[1] + 2 * ranks * slots
        led_by = int(self._led_by_L[layer])
        return Limits(max_copies, max_steps, led_by, led_by > LEADING, float(self._lowest_L[layer]), self._stride_K)


def _leading(request: PlanRequest) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Numbers of layers, and the loads that lead their search, float64 ``[W, L, E]``: `LEADING` at most where there are
    copies and many ranks.

    Each stands for several scenarios and strays from the forecast as far as one of them: by the sum of their ways, over
    the root of their number. Splits even out what strays, so fewer loads lead to placements that are as good. Homes
    alone, loads that surely move on and those that do not stray by chance need all, and where moves are limited each
    has to count.
    """
    loads, all_layers, ranks = request.scenarios, np.arange(request.num_layers), request.topology.num_ranks
    need_all = request.declared or request.start.replica_slots == 0 or _is_limited(request)
    if len(loads) <= LEADING or need_all or ranks < LED_FROM:
        return [(all_layers, loads)]
    stray = loads - request.forecast
    parts = np.array_split(np.arange(len(loads)), LEADING)
    merged = np.stack([stray[part].sum(axis=0) / np.sqrt(len(part)) for part in parts])
    all_L = ~_by_chance(request, stray, merged, parts)
    if request.wanders_L is not None:
        all_L |= request.wanders_L
    few, every = np.flatnonzero(~all_L), np.flatnonzero(all_L)
    groups = [(few, np.maximum(request.forecast[few] + merged[:, few], 0.0)), (every, loads[:, every])]
    return [(layers, leading) for layers, leading in groups if len(layers)]


def _by_chance(
    request: PlanRequest,
    stray_WLE: NDArray[np.float64],
    merged_NLE: NDArray[np.float64],
    parts: list[NDArray[np.int64]],
) -> NDArray[np.bool_]:
    """bool ``[L]``: whether each merged load strays as far as the scenarios of its part.

    Args:
        parts: of each merged load, the scenarios that it stands for.
    """
    usual_LE = request.forecast + request.scenarios.mean(axis=0)
    usual_LE = np.maximum(usual_LE, RARE * usual_LE.mean(axis=1, keepdims=True))  # a few hot experts say little
    scale_LE = np.divide(1.0, usual_LE, out=np.zeros_like(usual_LE), where=usual_LE > 0)
    of_each_WL = ((stray_WLE * scale_LE) ** 2).sum(axis=2)
    merged_NL = ((merged_NLE * scale_LE) ** 2).sum(axis=2)
    each_NL = np.stack([of_each_WL[part].mean(axis=0) for part in parts])
    ratio_NL = np.divide(merged_NL, each_NL, out=np.ones_like(each_NL), where=each_NL > 0)
    return np.asarray(((ratio_NL >= BY_CHANCE[0]) & (ratio_NL <= BY_CHANCE[1])).all(axis=0))


def _variance_in_units(request: PlanRequest) -> NDArray[np.float64]:
    """float64 ``[L, E]``: of the loads as `in_units` has them."""
    total_L1 = request.scenarios[0].sum(axis=1, keepdims=True)
    assert request.variance is not None
    return np.asarray(request.variance * (UNITS / np.where(total_L1 > 0, total_L1, 1.0)) ** 2)


def _is_limited(request: PlanRequest) -> bool:
    """Return whether only so many moves, or bytes, are allowed."""
    return request.max_moves is not None or request.max_bytes is not None


def _allowed_moves(request: PlanRequest) -> float:
    """Replicas that the limits allow."""
    by_bytes = np.inf
    if request.max_bytes is not None and request.replica_bytes:
        by_bytes = request.max_bytes / request.replica_bytes
    return float(min(by_bytes, np.inf if request.max_moves is None else request.max_moves))


def _few_moves(request: PlanRequest) -> int:
    """Moves of a layer up to which a search under the budget is worth while; 0 where there is no budget."""
    sizes = [size for size in (request.home_bytes, request.replica_bytes) if size]
    most = [] if request.max_moves is None else [request.max_moves]
    if request.max_bytes is not None and sizes:
        most.append(request.max_bytes // min(sizes))
    return int(min([*most, MOST_MOVES])) if most else 0


def _stray(request: PlanRequest) -> NDArray[np.float64]:
    """float64 ``[L]``: the share of tokens that go to other experts than on average, mean over the scenarios."""
    mean = request.scenarios.mean(axis=0)
    expected = mean / np.maximum(mean.sum(axis=1, keepdims=True), 1e-300)
    come = request.scenarios / np.maximum(request.scenarios.sum(axis=2, keepdims=True), 1e-300)
    return np.asarray(0.5 * np.abs(come - expected).sum(axis=2).mean(axis=0))


def _within_budget(trajectories: list[Trajectory], farthest: list[int], request: PlanRequest) -> NDArray[np.int64]:
    """Steps of each layer that the budgets allow, at most ``farthest``."""
    size = np.array([request.home_bytes, request.replica_bytes])
    cut = [(one.imbalance[: end + 1], one.moved[: end + 1]) for one, end in zip(trajectories, farthest, strict=True)]
    return share_out(
        [value for value, _ in cut],
        [np.stack([moved.sum(axis=1), moved @ size], axis=1) for _, moved in cut],
        (request.max_moves, request.max_bytes),
    )


def _at_the_end(start: Placement, ends: list[Found], moves: NDArray[np.bool_]) -> Placement:
    """Layers that move stand as their search ended, the others as in ``start``."""
    home_rank, replicas = start.home_rank.copy(), start.replicas_LRK.copy()
    for layer in np.flatnonzero(moves).tolist():
        home_rank[layer], replicas[layer] = ends[layer].home_E, ends[layer].replica_RK
    return align(start, home_rank, replicas)


def _seconds_price(request: PlanRequest) -> float:
    """Imbalance that a second of carrying must be worth."""
    if request.seconds_per_imbalance is None:
        return 0.0
    return HYSTERESIS / max(request.seconds_per_imbalance, 1e-300)
