"""Move as few experts as pay: search each layer from a few starts, and choose by gain, price and certainty.

- scenarios: a placement is worth its mean imbalance over the loads that may come (`planner.forecast`), tokens split
  over replicas by water-filling.
- starts (`search.starts`): the current placement, and placements dealt again.
- descent (`search.descent`): from the best starts, relieve the busiest rank step by step.
- choice: the shortest way that is nearly as good as the best one, by imbalance and what its moves cost; and only where
  the gain is more than noise on scenarios that did not lead the search.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ..cost import HYSTERESIS
from ..forecast import shares
from ..search.align import align, share_out
from ..search.descent import HOMES, REPLICAS, VALUE, after, descend, held_by, moved
from ..search.layer import FloatArray, IntArray, Layer, fill_to_level, judge, split_evenly
from ..search.starts import starts
from ..types import PlanRequest

SURE, EACH = 2.5, 1.0
"""Errors by which all layers together must gain, and each layer then."""


@dataclass(frozen=True)
class SearchParameters:
    """Constants of the search, tuned on one seed of the families in ``tests/benchmarks/planner``.

    Args:
        least_price: imbalance that moving all slots of a layer must be worth on top of its seconds: of ways that are as
            good, the shorter.
        price_of_all: the same with replica slots.
        first_price: the same while no replica slot is in use: a first plan lasts.
        wandering: factor of both where the load moves on: a gain is one on the next window there.
        deviation: the share of tokens that scenarios send to other experts at which prices hold; less: steadier loads.
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
        virtual_R, source_EN, crossing_price: as in `search.layer.Layer`.
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
    prices: FloatArray
    starts_anew: bool

    def layer(self, load_WE: FloatArray) -> Layer:
        """A layer of these scenarios, with room for the replicas of each expert; nothing is placed."""
        ranks, experts = self.held_RE.shape
        slots = len(self.now_P)
        replicas = slots - ranks * self.homes
        needed = int(np.ceil(load_WE.max(initial=0.0))) + PARAMETERS.spare_replicas
        room = PARAMETERS.most_shares // (len(load_WE) * max(min(replicas, experts), 1))
        return Layer(
            np.empty(slots, dtype=np.int64),
            self.homes,
            slots // ranks,
            load_WE,
            self.virtual_R,
            np.empty((experts, max(1, min(ranks, max(needed, room), 1 + replicas))), dtype=np.int64),
            np.empty(experts, dtype=np.int64),
            np.empty((len(load_WE), slots)),
            np.empty((len(load_WE), ranks)),
            self.source_EN,
            np.arange(slots) // (slots // ranks),
            self.crossing_price,
        )


@dataclass(frozen=True)
class _Solution:
    """Where the search of one layer ended.

    Args:
        begin_P: the start of the best descent.
        track_NX: its steps, as in `search.descent`, up to the chosen one.
        before_W, after_W: what the current placement and the last of the track are worth in each scenario that judges.
        cost: price of the moves.
    """

    begin_P: IntArray
    track_NX: FloatArray
    before_W: FloatArray
    after_W: FloatArray
    cost: float = 0.0

    @property
    def moves(self) -> bool:
        return bool(self.track_NX[-1, [HOMES, REPLICAS]].any())

    @property
    def gain(self) -> float:
        """Imbalance by which the layer falls, less the price of its moves."""
        return float((self.before_W - self.after_W).mean()) - self.cost


def incremental(request: PlanRequest) -> Placement:
    """Search in the home layout, under ``max_moves``, ``max_bytes`` and the price of a move."""
    questions = _questions(request)
    solutions = [_solve(question) for question in questions]
    sure_L = np.ones(len(questions), dtype=bool)
    if request.current is not None:
        gain_L, error_L = np.array(
            [_surely(request, layer, questions[layer], found) for layer, found in enumerate(solutions)]
        ).T
        sure_L = _surely_gains(gain_L, error_L)
        request.held.update(dict.fromkeys(np.flatnonzero((gain_L != 0.0) & ~sure_L).tolist(), "noise"))
        if not gain_L.any() and request.seconds_per_imbalance is not None:
            _note_price(request, questions, solutions)
    return _placed(request, questions, solutions, sure_L)


def _questions(request: PlanRequest) -> list[_Question]:
    start, ranks = request.start, request.topology.num_ranks
    homes, experts, nodes = start.homes_per_rank, request.num_experts, request.topology.num_nodes
    speed_R = np.ones(ranks) if request.speed_R is None else request.speed_R
    source_LEN = np.full((request.num_layers, experts, nodes), 1.0 / nodes)
    if request.source_share_LNE is not None:
        source_LEN[:] = request.source_share_LNE.transpose(0, 2, 1)
    # in units of what each rank computes when all take equally long at speed 1
    judge_LWE = np.ascontiguousarray((shares(request.to_come.windows) * speed_R.sum()).transpose(1, 0, 2))
    lead = len(request.to_come.scenarios)
    slot_LRS = np.concatenate([start.homes_LRH, start.replicas_LRK], axis=2).astype(np.int64)
    limited = request.max_moves is not None or request.max_bytes is not None
    return [
        _Question(
            slot_RS.ravel(),
            homes,
            held_by(slot_RS, homes, experts),
            judge_WE[:lead],
            judge_WE,
            1.0 - speed_R,
            source_EN,
            request.crossing_price,
            prices,
            not limited,
        )
        for slot_RS, judge_WE, source_EN, prices in zip(slot_LRS, judge_LWE, source_LEN, _prices(request), strict=True)
    ]


def _prices(request: PlanRequest) -> FloatArray:
    """float64 ``[L, 2]``: imbalance that moving a home, and a replica, must be worth."""
    start, topology, layers = request.start, request.topology, request.num_layers
    price_L = np.full(layers, 0.0 if request.current is None else PARAMETERS.least_price)
    if start.replica_slots and request.current is not None and request.declared is None:
        unused_L = (start.replicas_LRK == EMPTY).all(axis=(1, 2))
        price_L = np.where(unused_L, PARAMETERS.first_price, PARAMETERS.price_of_all)
        share = shares(request.to_come.scenarios)  # the share of tokens that go to other experts than on average:
        deviation_L = 0.5 * np.abs(share - share.mean(axis=0)).sum(axis=2).mean(axis=0)
        price_L *= np.minimum(deviation_L / PARAMETERS.deviation, 1.0)
        price_L[request.to_come.wanders_L] *= PARAMETERS.wandering
        price_L = np.maximum(price_L, PARAMETERS.least_price)
    prices_L2 = np.repeat(price_L[:, None] / request.num_slots, 2, axis=1)
    if request.seconds_per_imbalance is not None:
        bandwidth = topology.inter_node_bandwidth if topology.num_nodes > 1 else topology.intra_node_bandwidth
        seconds_2 = PARAMETERS.busiest_link * np.array(request.slot_bytes) / bandwidth / topology.num_ranks
        second = HYSTERESIS / max(request.seconds_per_imbalance, 1e-300)
        prices_L2 += np.where(seconds_2 > 0, seconds_2 * second, 0.0)
    return prices_L2


def _solve(question: _Question) -> _Solution:
    """Search one layer: descend from the best starts, and keep the best end."""
    ranks, experts = question.held_RE.shape
    lead, judging = question.layer(question.lead_WE), question.layer(question.judge_WE)
    least, before_W = _worth(judging, question.now_P)
    best = _Solution(question.now_P, np.zeros((1, 6)), before_W, before_W)
    if not question.lead_WE.any():
        return best
    begins = [question.now_P]
    if question.starts_anew and ranks > 1:
        load_E = question.lead_WE.mean(axis=0)
        begins += starts(load_E, question.now_P, ranks, question.homes, question.source_EN, question.crossing_price)
    held_as = (question.homes, question.held_RE)
    worth = [_worth(lead, begin_P)[0] + moved(lead.slot_P, *held_as) @ question.prices for begin_P in begins]
    room = 2 * experts + 2 * ranks * (lead.per_rank - lead.homes) + 2
    for number in np.argsort(worth, kind="stable")[: PARAMETERS.starts].tolist():
        if number and worth[number] > least + PARAMETERS.start_margin:
            break
        _worth(lead, begins[number])
        begin_P, track_NX = lead.slot_P.copy(), np.empty((room, 6))
        track_NX[0, [HOMES, REPLICAS]] = moved(begin_P, *held_as)
        home_price, replica_price = question.prices.tolist()
        enough, stuck_ranks = PARAMETERS.enough, PARAMETERS.stuck_ranks
        steps = descend(lead, question.held_RE, home_price, replica_price, enough, stuck_ranks, track_NX)
        way_N = track_NX[: steps + 1, VALUE] + track_NX[: steps + 1, [HOMES, REPLICAS]] @ question.prices
        short = int(np.argmax(way_N <= way_N.min() + PARAMETERS.nearly * PARAMETERS.least_gain))
        value, after_W = _worth(judging, after(begin_P, track_NX[: short + 1]))
        cost = float(track_NX[short, [HOMES, REPLICAS]] @ question.prices)
        if value + cost < least - 1e-6:
            least = value + cost
            best = _Solution(begin_P, track_NX[: short + 1], before_W, after_W, cost)
    return best


def _worth(layer: Layer, slot_P: IntArray) -> tuple[float, FloatArray]:
    """Put a placement into the layer; return what it is worth, the mean and in each scenario."""
    layer.slot_P[:] = slot_P
    split_evenly(layer)
    fill_to_level(layer, PARAMETERS.sweeps, PARAMETERS.tolerance)
    peak_W = np.empty(len(layer.load_WE))
    return judge(layer, peak_W)[0], peak_W


def _surely(request: PlanRequest, layer: int, question: _Question, found: _Solution) -> tuple[float, float]:
    """Return what a layer gains and the error of that; 0 where certainty is not asked for, or nothing is gained."""
    gain, gain_W = found.gain, found.before_W - found.after_W
    alone = len(gain_W) == 1
    if not found.moves or gain <= PARAMETERS.least_gain:
        return 0.0, 0.0
    if request.gate != "payoff" or request.declared is not None or (alone and not request.one_known):
        return gain, 0.0
    replica_RK = question.now_P.reshape(len(question.held_RE), -1)[:, question.homes :]
    first = bool(replica_RK.size and (replica_RK == EMPTY).all())
    if first or request.to_come.wanders_L[layer]:  # little proof: first replicas, or scenarios are errors of forecasts
        return gain, 0.0 if alone else gain_W.std(ddof=1) / np.sqrt(len(gain_W)) / SURE
    if alone:
        return gain, _error_of_one(request.forecast[layer], request.topology.num_ranks)
    gains, cost = [], 0.0  # of plans for half of the scenarios on the other half
    halves = (question.lead_WE[::2].copy(), question.lead_WE[1::2].copy())
    for lead_WE, judge_WE in (halves, halves[::-1]):
        half = _solve(replace(question, lead_WE=lead_WE, judge_WE=lead_WE))
        judging = question.layer(judge_WE)
        slot_P = after(half.begin_P, half.track_NX)
        gains.append(_worth(judging, question.now_P)[1] - _worth(judging, slot_P)[1])
        cost += half.cost / 2.0
    return float(np.concatenate(gains).mean()) - cost, _error_of(np.concatenate(gains))


def _note_price(request: PlanRequest, questions: list[_Question], solutions: list[_Solution]) -> None:
    """Note whether the worst layer would gain if plans were trusted in full, or if moves cost no seconds."""
    layer = int(np.argmax([found.before_W.mean() for found in solutions]))
    for code, terms in (("trust", replace(request, trust=1.0)), ("price", replace(request, gate="always"))):
        if _solve(replace(questions[layer], prices=_prices(terms)[layer])).gain > PARAMETERS.least_gain:
            request.held[layer] = code
            return


def _placed(
    request: PlanRequest, questions: list[_Question], solutions: list[_Solution], taken_L: NDArray[np.bool_]
) -> Placement:
    """The placement of the solutions that are taken, within the budgets."""
    start, ranks, homes = request.start, request.topology.num_ranks, request.start.homes_per_rank
    value, cost = [], []
    for question, found, taken in zip(questions, solutions, taken_L, strict=True):
        track_NX = found.track_NX if taken else np.zeros((1, 6))
        moves_N2 = track_NX[:, [HOMES, REPLICAS]]
        value.append(track_NX[:, VALUE] + moves_N2 @ question.prices)
        cost.append(np.stack([moves_N2.sum(axis=1), moves_N2 @ request.slot_bytes], axis=1).astype(np.int64))
    steps_L = share_out(value, cost, (request.max_moves, request.max_bytes))
    home_LE, replica_LRK = start.home_rank.copy(), start.replicas_LRK.copy()
    for layer in np.flatnonzero(taken_L).tolist():
        found = solutions[layer]
        if steps_L[layer] == 0 and found.moves:
            request.held[layer] = "limits"
        slot_RS = after(found.begin_P, found.track_NX[: steps_L[layer] + 1]).reshape(ranks, -1)
        home_LE[layer, slot_RS[:, :homes].ravel()] = np.repeat(np.arange(ranks), homes)
        replica_LRK[layer] = slot_RS[:, homes:]
    return align(start, home_LE, replica_LRK)


def _error_of(gain_W: FloatArray) -> float:
    """Return the standard error of a mean over windows, larger where they are few: `SURE` of them is as rare as of a
    normal distribution (the expansion of Student's t in 1 / degrees of freedom, Abramowitz and Stegun 26.7.5)."""
    free, square = len(gain_W) - 1, SURE**2
    few = 1.0 + (square + 1.0) / (4.0 * free) + (5.0 * square**2 + 16.0 * square + 3.0) / (96.0 * free**2)
    return max(few * float(gain_W.std(ddof=1)) / float(np.sqrt(len(gain_W))), 1e-12)


def _error_of_one(load_E: FloatArray, ranks: int) -> float:
    """Return the error of a gain that one window shows, where its tokens went to experts by chance: `SURE` of them is
    what the busiest of all ranks has by chance, and `SURE` deviations of a rank."""
    return float(np.sqrt(ranks / load_E.sum()) * (1.0 + np.sqrt(2.0 * np.log(ranks)) / SURE))


def _surely_gains(gain_L: FloatArray, error_L: FloatArray) -> NDArray[np.bool_]:
    """Return the layers that surely gain: by `EACH` errors where all together are sure, and else alone. Of many layers
    some gain much by chance, so that one alone must gain by more."""
    doubted_L = error_L > 0
    together = gain_L[doubted_L].sum() > SURE * np.sqrt((error_L[doubted_L] ** 2).sum())
    alone = np.sqrt(SURE**2 + 2.0 * np.log(max(doubted_L.sum(), 1)))
    return np.asarray(gain_L > (EACH if together else alone) * error_L)
