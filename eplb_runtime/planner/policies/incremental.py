"""Move as few experts as pay: search each layer from a few starts, and choose by gain, price and certainty.

- scenarios: a placement is worth its mean imbalance over the loads that may come (`planner.forecast`), tokens split
  over replicas by water-filling.
- starts (`starts`): the current placement, and placements dealt again.
- descent (`descent`): from the best starts, relieve the busiest rank step by step.
- choice: the shortest of the ways that are best by imbalance and what their moves cost; and only where
  the gain is more than noise on scenarios that did not lead the search.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ..cost import HYSTERESIS
from ..forecast import foretell, shares
from ..parameters import PARAMETERS
from ..types import PlanRequest
from .align import align, share_out
from .descent import HOMES, REPLICAS, VALUE, after, descend, moved
from .layer import FloatArray, IntArray, Layer, begun, worth
from .starts import starts


@dataclass(frozen=True)
class _Solution:
    """Where the search of one layer ended."""

    begin_P: IntArray  # the start of the best descent
    track_NX: FloatArray  # its steps, as in `descent`, up to the chosen one
    before_W: FloatArray  # what the current placement is worth in each scenario that judges
    after_W: FloatArray  # and the last of the track
    cost: float = 0.0  # price of the moves

    @property
    def moves(self) -> bool:
        return bool(self.track_NX[-1, [HOMES, REPLICAS]].any())

    @property
    def gain(self) -> float:
        """Return the imbalance by which the layer falls, less the price of its moves."""
        return float((self.before_W - self.after_W).mean()) - self.cost


def incremental(request: PlanRequest) -> Placement:
    """Return a placement in the home layout that moves few experts, within ``max_moves`` and ``max_bytes``. A layer
    stays where its gain is not sure or not worth its moves; ``request.held`` says why, if a better placement is
    known."""
    layers = _layers(request)
    solutions = [_solve(request, layer) for layer in layers]
    sure_L = np.ones(len(layers), dtype=bool)
    if request.current is not None:
        gain_L, error_L = np.array([_surely(request, *one) for one in enumerate(zip(layers, solutions, strict=True))]).T
        sure_L = _surely_gains(gain_L, error_L)
        request.held.update(dict.fromkeys(np.flatnonzero((gain_L != 0.0) & ~sure_L).tolist(), "noise"))
        if not gain_L.any() and request.seconds_per_imbalance is not None:
            _note_price(request, layers, solutions)
    return _placed(request, layers, solutions, sure_L)


def _layers(request: PlanRequest) -> list[Layer]:
    """The question about each layer."""
    start, topology, experts = request.start, request.topology, request.num_experts
    ranks, homes, slots = topology.num_ranks, start.homes_per_rank, start.slots_per_rank
    speed_R = np.ones(ranks) if request.speed_R is None else request.speed_R  # 1: loads are in units of its tokens
    load_LWE = np.ascontiguousarray((shares(request.to_come.windows) * speed_R.sum()).transpose(1, 0, 2))
    slot_LRS = np.concatenate([start.homes_LRH, start.replicas_LRK], axis=2).astype(np.int64)
    home_LE, prices_L2, rank_P = start.home_rank.astype(np.int64), _prices(request), np.arange(ranks * slots) // slots
    source_LEN = [np.full((experts, topology.num_nodes), 1.0 / topology.num_nodes)] * request.num_layers
    if request.source_share_LNE is not None:
        source_LEN = list(np.ascontiguousarray(request.source_share_LNE.transpose(0, 2, 1)))
    price = request.crossing_price
    return [
        Layer(homes, slots, slot_RS.ravel(), home_E, 1.0 - speed_R, source_EN, price, prices_2, load_WE, rank_P)
        for slot_RS, home_E, source_EN, prices_2, load_WE in zip(
            slot_LRS, home_LE, source_LEN, prices_L2, load_LWE, strict=True
        )
    ]


def _prices(request: PlanRequest) -> FloatArray:
    """float64 ``[L, 2]``: imbalance that moving a home, and a replica, must be worth."""
    start, topology, layers = request.start, request.topology, request.num_layers
    price_L = np.full(layers, 0.0 if request.current is None else PARAMETERS.least_price)
    if request.current is not None and request.declared is None:
        has_replicas, unused_L = start.replica_slots > 0, (start.replicas_LRK == EMPTY).all(axis=(1, 2))
        is_proved = request.gate == "payoff" or not has_replicas
        price_L[:] = PARAMETERS.price_of_all if is_proved else PARAMETERS.price_unproved
        price_L[request.to_come.moves_on_L & has_replicas] = PARAMETERS.price_unproved
        wandering = PARAMETERS.price_wandering if has_replicas else PARAMETERS.least_price
        price_L[request.to_come.nonstationary_L] = wandering
        price_L[unused_L & has_replicas] = PARAMETERS.first_price
        share = shares(request.to_come.scenarios)
        # the share of tokens that go to other experts than on average
        deviation_L = 0.5 * np.abs(share - share.mean(axis=0)).sum(axis=2).mean(axis=0)
        price_L = np.maximum(price_L * np.minimum(deviation_L / PARAMETERS.deviation, 1.0), PARAMETERS.least_price)
    prices_L2 = np.repeat(price_L[:, None] / request.num_slots, 2, axis=1)
    if request.seconds_per_imbalance is not None:
        bandwidth = topology.inter_node_bandwidth if topology.num_nodes > 1 else topology.intra_node_bandwidth
        seconds_2 = np.array(request.slot_bytes) / bandwidth / topology.num_ranks
        second = HYSTERESIS / max(request.seconds_per_imbalance, 1e-300)
        prices_L2 += np.where(seconds_2 > 0, seconds_2 * second, 0.0)
    return prices_L2


def _solve(request: PlanRequest, layer: Layer, lead: int | None = None) -> _Solution:
    """Search one layer, led by the first ``lead`` scenarios: descend from the best starts, and keep the best end."""
    lead = len(request.to_come.scenarios) if lead is None else lead
    judging = begun(layer, layer.load_WE)
    least, before_W = worth(judging, layer.now_P)
    best = _Solution(layer.now_P, np.zeros((1, 6)), before_W, before_W)
    if not layer.load_WE[:lead].any():
        return best
    begins = [layer.now_P]
    if not request.is_limited and layer.virtual_R.size > 1:
        begins += starts(layer, layer.load_WE[:lead].mean(axis=0))
    states = [begun(layer, layer.load_WE[:lead]) for _ in begins]
    worths = [worth(*one)[0] + moved(one[0]) @ layer.prices for one in zip(states, begins, strict=True)]
    for number in np.argsort(worths, kind="stable")[: PARAMETERS.starts].tolist():
        leading, begin_P = states[number], begins[number]
        track_NX = np.empty((2 * (layer.virtual_R.size + layer.home_E.size) * layer.per_rank, 6))
        track_NX = track_NX[: descend(leading, track_NX) + 1]
        way_N = track_NX[:, VALUE] + track_NX[:, [HOMES, REPLICAS]] @ layer.prices
        track_NX = track_NX[: int(way_N.argmin()) + 1]
        value, after_W = worth(judging, after(begin_P, track_NX))
        cost = float(track_NX[-1, [HOMES, REPLICAS]] @ layer.prices)
        if value + cost < least:
            least, best = value + cost, _Solution(begin_P, track_NX, before_W, after_W, cost)
    return best


def _surely(request: PlanRequest, number: int, searched: tuple[Layer, _Solution]) -> tuple[float, float]:
    """Return what a layer gains and the error of that; 0 where certainty is not asked for, or nothing is gained."""
    layer, found = searched
    gain, gain_W = found.gain, found.before_W - found.after_W
    alone = len(gain_W) == 1
    if not found.moves or gain <= PARAMETERS.least_gain:
        return 0.0, 0.0
    if request.gate != "payoff" or request.declared is not None or (alone and not request.one_known):
        return gain, 0.0
    replica_RK = layer.now_P.reshape(-1, layer.per_rank)[:, layer.homes :]
    first = bool(replica_RK.size and (replica_RK == EMPTY).all())
    if first or request.to_come.nonstationary_L[number]:  # little proof: first replicas, or errors of forecasts
        return gain, 0.0 if alone else gain_W.std(ddof=1) / np.sqrt(len(gain_W)) / PARAMETERS.sure
    if request.to_come.moves_on_L[number]:
        return gain, _error_of(gain_W)
    if alone:
        return gain, _error_of_one(request.forecast[number], request.topology.num_ranks)
    gains, cost = [], 0.0  # of plans for a part of the windows on the others
    windows, tokens = request.load[-PARAMETERS.scenarios :, number : number + 1], layer.load_WE[0].sum()
    folds = min(PARAMETERS.folds, len(windows))
    for fold in range(folds):
        is_judge_T = np.arange(len(windows)) % folds == fold
        known_WE, came_WE = (
            np.ascontiguousarray(shares(one)[:, 0]) * tokens
            for one in (foretell(windows[~is_judge_T], stays=True).scenarios, windows[is_judge_T])
        )
        part, judging = _solve(request, layer._replace(load_WE=known_WE), len(known_WE)), begun(layer, came_WE)
        gains.append(worth(judging, layer.now_P)[1] - worth(judging, after(part.begin_P, part.track_NX))[1])
        cost += part.cost / folds
    return float(np.concatenate(gains).mean()) - cost, _error_of(np.concatenate(gains))


def _note_price(request: PlanRequest, layers: list[Layer], solutions: list[_Solution]) -> None:
    """Note whether the worst layer would gain if plans were trusted in full, or if moves cost no seconds."""
    number = int(np.argmax([found.before_W.mean() for found in solutions]))
    for code, terms in (("trust", replace(request, trust=1.0)), ("price", replace(request, cost=None))):
        if _solve(request, layers[number]._replace(prices=_prices(terms)[number])).gain > PARAMETERS.least_gain:
            request.held[number] = code
            return


def _placed(
    request: PlanRequest, layers: list[Layer], solutions: list[_Solution], taken_L: NDArray[np.bool_]
) -> Placement:
    """The placement of the solutions that are taken, within the budgets."""
    start, ranks, homes = request.start, request.topology.num_ranks, request.start.homes_per_rank
    value, cost = [], []
    for layer, found, taken in zip(layers, solutions, taken_L, strict=True):
        track_NX = found.track_NX if taken else np.zeros((1, 6))
        moves_N2 = track_NX[:, [HOMES, REPLICAS]]
        value.append(track_NX[:, VALUE] + moves_N2 @ layer.prices)
        cost.append(np.stack([moves_N2.sum(axis=1), moves_N2 @ request.slot_bytes], axis=1).astype(np.int64))
    steps_L = share_out(value, cost, (request.max_moves, request.max_bytes))
    home_LE, replica_LRK = start.home_rank.copy(), start.replicas_LRK.copy()
    for number in np.flatnonzero(taken_L).tolist():
        found = solutions[number]
        if steps_L[number] == 0 and found.moves:
            request.held[number] = "limits"
        slot_RS = after(found.begin_P, found.track_NX[: steps_L[number] + 1]).reshape(ranks, -1)
        home_LE[number, slot_RS[:, :homes].ravel()] = np.repeat(np.arange(ranks), homes)
        replica_LRK[number] = slot_RS[:, homes:]
    return align(start, home_LE, replica_LRK)


def _error_of(gain_W: FloatArray) -> float:
    """Return the standard error of a mean over windows, larger where they are few: `sure` of them is as rare as of a
    normal distribution (the expansion of Student's t in 1 / degrees of freedom, Abramowitz and Stegun 26.7.5)."""
    free, square = len(gain_W) - 1, PARAMETERS.sure**2
    few = 1.0 + (square + 1.0) / (4.0 * free) + (5.0 * square**2 + 16.0 * square + 3.0) / (96.0 * free**2)
    return max(few * float(gain_W.std(ddof=1)) / float(np.sqrt(len(gain_W))), 1e-12)


def _error_of_one(load_E: FloatArray, ranks: int) -> float:
    """Return the error of a gain that one window shows, where its tokens went to experts by chance: `sure` of them is
    what the busiest of all ranks has by chance, and `sure` deviations of a rank."""
    return float(np.sqrt(ranks / load_E.sum()) * (1.0 + np.sqrt(2.0 * np.log(ranks)) / PARAMETERS.sure))


def _surely_gains(gain_L: FloatArray, error_L: FloatArray) -> NDArray[np.bool_]:
    """Return the layers that surely gain: by `each` errors where all together are sure, and else alone. Of many layers
    some gain much by chance, so that one alone must gain by more."""
    doubted_L = error_L > 0
    together = gain_L[doubted_L].sum() > PARAMETERS.sure * np.sqrt((error_L[doubted_L] ** 2).sum())
    alone = np.sqrt(PARAMETERS.sure**2 + 2.0 * np.log(max(doubted_L.sum(), 1)))
    return np.asarray(gain_L > (PARAMETERS.each if together else alone) * error_L)
