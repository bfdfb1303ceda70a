"""Move as few experts as pay: search each layer from a few starts, and choose by gain, price and certainty.

- scenarios: a placement is worth its mean imbalance over the loads that may come (`load.forecast`), tokens split over
  replicas by water-filling.
- starts (`search.starts`): the current placement, and placements dealt again.
- descent (`search.descent`): from the best starts, relieve the busiest rank step by step.
- choice: the shortest way that is nearly as good as the best one, by imbalance and what its moves cost; and only where
  the gain is more than noise on scenarios that did not lead the search.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ..cost import HYSTERESIS
from ..evaluate import SURE, error_of, error_of_one, surely_gains
from ..search.align import align
from ..search.descent import HOMES, KIND, OTHER, REPLICAS, SLOT, SWAP, VALUE, descend, held_by, moved
from ..search.layer import FloatArray, IntArray, Layer, fill_to_level, judge, split_evenly
from ..search.starts import starts
from ..types import PlanRequest


@dataclass(frozen=True)
class SearchParameters:
    """Constants of the search, tuned on one seed of the families in ``tests/benchmarks/planner``.

    Args:
        least_price: imbalance that moving all slots of a layer must be worth besides its seconds: of ways that are as
            good, the shorter.
        price_of_all: the same with replica slots.
        first_price: the same while no replica slot is in use: a first plan lasts.
        wandering: factor of both where the load moves on: a gain is one on the next window there.
        deviation: the share of tokens that scenarios send elsewhere at which prices hold; less for steadier loads.
        least_gain: imbalance by which a layer must fall.
        nearly: share of ``least_gain`` that a shorter way may be worse than the best.
        starts: the best starts, from which a search descends.
        start_margin: a start that is worse than the best result by more is left out.
        stuck_ranks: busiest ranks without a step that helps, after which a descent ends.
        enough: imbalance at which a descent ends.
        sweeps, tolerance: of water-filling where a placement is judged.
        spare_replicas, most_shares: an expert may have as many replicas as its load needs and so many more, or as many
            as keep the shares of all experts over all scenarios below ``most_shares``.
        busiest_link: moves over the busiest link, in units of the mean link.
    """

    least_price: float = 0.005
    price_of_all: float = 0.2
    first_price: float = 0.02
    wandering: float = 0.2
    deviation: float = 0.1
    least_gain: float = 0.005
    nearly: float = 0.1
    starts: int = 2
    start_margin: float = 0.05
    stuck_ranks: int = 6
    enough: float = 1.001
    sweeps: int = 16
    tolerance: float = 1e-4
    spare_replicas: int = 4
    most_shares: int = 2**18
    busiest_link: float = 1.5


PARAMETERS = SearchParameters()


@dataclass(frozen=True)
class _Question:
    """One layer, laid out for the search.

    Args:
        now_P: int64, the current placement.
        held_RE: int8, how each rank holds each expert now.
        lead_WE, judge_WE: scenarios that lead the search, and all by which its end is judged, in units of the even rank
            load.
        prices: imbalance that moving a home, and a replica, must be worth.
        starts_anew: other starts than the current placement are allowed.
    """

    now_P: IntArray
    homes: int
    held_RE: NDArray[np.int8]
    lead_WE: FloatArray
    judge_WE: FloatArray
    virtual_R: FloatArray
    source_EN: FloatArray
    crossing_price: float
    prices: tuple[float, float]
    starts_anew: bool


@dataclass(frozen=True)
class _Solution:
    """Where the search of one layer ended.

    Args:
        begin_P: the start of the best descent.
        track_NX: its steps, as in `search.descent`, up to the chosen one.
        slot_P: the placement there.
        before_W, after_W: what ``now_P`` and ``slot_P`` are worth in each scenario that judges.
        cost: price of the moves.
    """

    begin_P: IntArray
    track_NX: FloatArray
    slot_P: IntArray
    before_W: FloatArray
    after_W: FloatArray
    cost: float

    @property
    def moves(self) -> bool:
        return bool(self.track_NX[-1, [HOMES, REPLICAS]].any())

    def after(self, steps: int) -> IntArray:
        """The placement after so many steps."""
        slot_P = self.begin_P.copy()
        for kind, slot, other in self.track_NX[1 : steps + 1, [KIND, SLOT, OTHER]].astype(np.int64).tolist():
            slot_P[slot], swapped = (slot_P[other], slot_P[slot]) if kind == SWAP else (other, -1)
            if kind == SWAP:
                slot_P[other] = swapped
        return slot_P


def incremental(request: PlanRequest) -> Placement:
    """Search in the home layout, under ``max_moves``, ``max_bytes`` and the price of a move."""
    questions = _questions(request)
    solutions = [_solve(question) for question in questions]
    taken_L = _worth_it(request, questions, solutions)
    return _placed(request, questions, [one if take else None for one, take in zip(solutions, taken_L, strict=True)])


def _questions(request: PlanRequest) -> list[_Question]:
    start, ranks = request.start, request.topology.num_ranks
    homes, experts = start.homes_per_rank, request.num_experts
    speed_R = np.ones(ranks) if request.speed_R is None else request.speed_R
    nodes = request.topology.num_nodes
    source_LNE = request.source_share_LNE
    lead = _in_even_loads(request.to_come.scenarios, speed_R)
    judging = np.concatenate([lead, _in_even_loads(request.to_come.mixes, speed_R)])
    prices_L2 = _prices(request)
    limited = request.max_moves is not None or request.max_bytes is not None
    now_LP = np.concatenate([start.homes_LRH, start.replicas_LRK], axis=2).astype(np.int64).reshape(len(prices_L2), -1)
    result = []
    for layer, now_P in enumerate(now_LP):
        source_EN = np.full((experts, nodes), 1.0 / nodes) if source_LNE is None else source_LNE[layer].T
        result.append(
            _Question(
                now_P,
                homes,
                held_by(now_P.reshape(ranks, -1), homes, experts),
                np.ascontiguousarray(lead[:, layer]),
                np.ascontiguousarray(judging[:, layer]),
                1.0 - speed_R,
                np.ascontiguousarray(source_EN),
                request.crossing_price,
                (float(prices_L2[layer, 0]), float(prices_L2[layer, 1])),
                not limited,
            )
        )
    return result


def _in_even_loads(load: FloatArray, speed_R: FloatArray) -> FloatArray:
    """Loads ``[W, L, E]`` in units of what each rank computes when all take equally long at speed 1."""
    total = load.sum(axis=2, keepdims=True)
    return np.asarray(np.divide(load, total, out=np.zeros_like(load), where=total > 0) * speed_R.sum())


def _prices(request: PlanRequest) -> FloatArray:
    """float64 ``[L, 2]``: imbalance that moving a home, and a replica, must be worth."""
    start, topology, layers = request.start, request.topology, request.num_layers
    price_L = np.full(layers, 0.0 if request.current is None else PARAMETERS.least_price)
    if start.replica_slots and request.current is not None and request.declared is None:
        unused_L = (start.replicas_LRK == EMPTY).all(axis=(1, 2))
        price_L = np.where(unused_L, PARAMETERS.first_price, PARAMETERS.price_of_all)
        price_L *= np.minimum(_deviation(request) / PARAMETERS.deviation, 1.0)
        price_L[request.to_come.wanders_L] *= PARAMETERS.wandering
        price_L = np.maximum(price_L, PARAMETERS.least_price)
    bytes_2 = np.array(request.slot_bytes, dtype=np.float64)
    if request.seconds_per_imbalance is None:
        bytes_2[:] = 0.0
    bandwidth = topology.inter_node_bandwidth if topology.num_nodes > 1 else topology.intra_node_bandwidth
    seconds_2 = PARAMETERS.busiest_link * bytes_2 / bandwidth / topology.num_ranks
    second = HYSTERESIS / max(request.seconds_per_imbalance or 0.0, 1e-300)
    return price_L[:, None] / request.num_slots + np.where(seconds_2 > 0, seconds_2 * second, 0.0)


def _deviation(request: PlanRequest) -> FloatArray:
    """float64 ``[L]``: the share of tokens that go to other experts than on average, mean over the scenarios."""
    share = _in_even_loads(request.to_come.scenarios, np.ones(1))
    return np.asarray(0.5 * np.abs(share - share.mean(axis=0)).sum(axis=2).mean(axis=0))


def _solve(question: _Question) -> _Solution:
    """Search one layer: descend from the best starts, and keep the best end."""
    ranks, experts = question.held_RE.shape
    lead, judging = _layer(question, question.lead_WE), _layer(question, question.judge_WE)
    value, before_W = _worth(judging, question.now_P)
    best = _Solution(question.now_P, np.zeros((1, 6)), question.now_P, before_W, before_W, 0.0)
    if not question.lead_WE.any():
        return best
    least = value
    begins = [question.now_P]
    if question.starts_anew and ranks > 1:
        load_E = question.lead_WE.mean(axis=0)
        begins += starts(load_E, question.now_P, ranks, question.homes, question.source_EN, question.crossing_price)
    worth = [_worth(lead, begin_P)[0] + np.dot(moved(lead, question.held_RE), question.prices) for begin_P in begins]
    room = 2 * experts + 2 * ranks * (lead.per_rank - lead.homes) + 2
    for number in np.argsort(worth, kind="stable")[: PARAMETERS.starts].tolist():
        if number and worth[number] > least + PARAMETERS.start_margin:
            break
        _worth(lead, begins[number])
        begin_P, track_NX = lead.slot_P.copy(), np.empty((room, 6))
        limits = (*question.prices, PARAMETERS.enough, PARAMETERS.stuck_ranks)
        steps = descend(lead, question.held_RE, *limits, track_NX)
        way_N = track_NX[: steps + 1, VALUE] + track_NX[: steps + 1, [HOMES, REPLICAS]] @ question.prices
        short = int(np.argmax(way_N <= way_N.min() + PARAMETERS.nearly * PARAMETERS.least_gain))
        found = _Solution(begin_P, track_NX[: short + 1], begin_P, before_W, before_W, 0.0)
        slot_P = found.after(short)
        value, after_W = _worth(judging, slot_P)
        cost = float(track_NX[short, [HOMES, REPLICAS]] @ question.prices)
        if value + cost < least - 1e-6:
            least = value + cost
            best = _Solution(begin_P, found.track_NX, slot_P, before_W, after_W, cost)
    return best


def _layer(question: _Question, load_WE: FloatArray) -> Layer:
    """A layer of these scenarios, with room for the replicas of each expert; nothing is placed."""
    ranks, experts = question.held_RE.shape
    scenarios, slots = len(load_WE), len(question.now_P)
    replica_slots = slots - ranks * question.homes
    needed = int(np.ceil(load_WE.max(initial=0.0))) + PARAMETERS.spare_replicas
    room = PARAMETERS.most_shares // (scenarios * max(min(replica_slots, experts), 1))
    copies = max(1, min(ranks, max(needed, room), 1 + replica_slots))
    return Layer(
        np.empty(slots, dtype=np.int64),
        question.homes,
        slots // ranks,
        load_WE,
        question.virtual_R,
        np.empty((experts, copies), dtype=np.int64),
        np.empty(experts, dtype=np.int64),
        np.empty((scenarios, slots)),
        np.empty((scenarios, ranks)),
        question.source_EN,
        np.arange(slots) // (slots // ranks),
        question.crossing_price,
    )


def _worth(layer: Layer, slot_P: IntArray) -> tuple[float, FloatArray]:
    """Put a placement into the layer; return what it is worth, the mean and in each scenario."""
    layer.slot_P[:] = slot_P
    split_evenly(layer)
    fill_to_level(layer, PARAMETERS.sweeps, PARAMETERS.tolerance)
    peak_W = np.empty(len(layer.load_WE))
    return judge(layer, peak_W)[0], peak_W


def _worth_it(request: PlanRequest, questions: list[_Question], solutions: list[_Solution]) -> NDArray[np.bool_]:
    """bool ``[L]``: layers that gain more than noise, or more than their price where certainty is not asked for."""
    if request.current is None:
        return np.ones(request.num_layers, dtype=bool)
    gain_L, error_L = np.zeros(request.num_layers), np.zeros(request.num_layers)
    for layer, (question, found) in enumerate(zip(questions, solutions, strict=True)):
        if not found.moves:
            continue
        gain_W = found.before_W - found.after_W
        if (gain := gain_W.mean() - found.cost) <= PARAMETERS.least_gain:
            continue
        gain_L[layer], alone = gain, len(gain_W) == 1
        if request.gate != "payoff" or request.declared is not None or (alone and not request.one_known):
            continue
        if _lasts(request, question, layer):
            error_L[layer] = 0.0 if alone else gain_W.std(ddof=1) / np.sqrt(len(gain_W)) / SURE
        elif alone:
            error_L[layer] = error_of_one(request.forecast[layer], request.topology.num_ranks)
        else:
            gain_L[layer], error_L[layer] = _unled_gain(question)
    sure_L = surely_gains(gain_L, error_L)
    request.held.update(dict.fromkeys(np.flatnonzero((gain_L != 0.0) & ~sure_L).tolist(), "noise"))
    if not gain_L.any() and request.seconds_per_imbalance is not None:
        _note_price(request, questions, solutions)
    return sure_L


def _note_price(request: PlanRequest, questions: list[_Question], solutions: list[_Solution]) -> None:
    """Note whether the worst layer would gain if plans were trusted in full, or if moves cost no seconds."""
    layer = int(np.argmax([found.before_W.mean() for found in solutions]))
    for code, terms in (("trust", replace(request, trust=1.0)), ("price", replace(request, gate="always"))):
        home, replica = _prices(terms)[layer].tolist()
        found = _solve(replace(questions[layer], prices=(home, replica)))
        if (found.before_W - found.after_W).mean() - found.cost > PARAMETERS.least_gain:
            request.held[layer] = code
            return


def _lasts(request: PlanRequest, question: _Question, layer: int) -> bool:
    """Return whether a gain needs little proof: the load wanders, so that scenarios are errors of forecasts; or the
    layer gets its first replicas."""
    wanders = bool(request.to_come.wanders_L[layer])
    replica_RK = question.now_P.reshape(len(question.held_RE), -1)[:, question.homes :]
    return wanders or bool(replica_RK.size and (replica_RK == EMPTY).all())


def _unled_gain(question: _Question) -> tuple[float, float]:
    """The mean gain, less its price, of plans for half of the scenarios on the other half, and its error."""
    halves = (question.lead_WE[::2].copy(), question.lead_WE[1::2].copy())
    gains, cost = [], 0.0
    for lead_WE, judge_WE in (halves, halves[::-1]):
        found = _solve(replace(question, lead_WE=lead_WE, judge_WE=lead_WE))
        judging = _layer(question, judge_WE)
        gains.append(_worth(judging, question.now_P)[1] - _worth(judging, found.slot_P)[1])
        cost += found.cost / 2.0
    return float(np.concatenate(gains).mean()) - cost, error_of(np.concatenate(gains))


def _placed(request: PlanRequest, questions: list[_Question], solutions: list[_Solution | None]) -> Placement:
    """The placement of these solutions, within the budgets; None: the layer stays."""
    start, ranks = request.start, request.topology.num_ranks
    home_LE, replica_LRK = start.home_rank.copy(), start.replicas_LRK.copy()
    size = np.array(request.slot_bytes)
    tracks = [np.zeros((1, 6)) if one is None else one.track_NX for one in solutions]
    value, cost = [], []
    for track_NX, question in zip(tracks, questions, strict=True):
        moved = track_NX[:, [HOMES, REPLICAS]]
        value.append(track_NX[:, VALUE] + moved @ question.prices)
        cost.append(np.stack([moved.sum(axis=1), moved @ size], axis=1).astype(np.int64))
    steps_L = _share_out(value, cost, (request.max_moves, request.max_bytes))
    for layer, found in enumerate(solutions):
        if found is None:
            continue
        if steps_L[layer] == 0 and found.moves:
            request.held[layer] = "limits"
        slot_RS = found.after(int(steps_L[layer])).reshape(ranks, -1)
        homes = start.homes_per_rank
        home_LE[layer, slot_RS[:, :homes].ravel()] = np.repeat(np.arange(ranks), homes)
        replica_LRK[layer] = slot_RS[:, homes:]
    return align(start, home_LE, replica_LRK)


def _share_out(
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
