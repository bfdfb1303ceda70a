"""What a layer's search is asked, what a placement that it reaches is worth and costs, and the track that it leaves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit
from .scenarios import LayerLoads

SPREAD_WEIGHT = 0.1
"""Of the mean squared deviation of rank loads, beside the busiest rank: it leads over plateaus."""


NOW = 0
"""The step of a track before any other."""


class Question(NamedTuple):
    """What does not change during a search.

    Args:
        start_home_E: int32, where homes stand now, for the price of what is reached.
        start_replica_RK: int32, likewise replicas.
        ranks_per_node: consecutive ranks that share a node.
        home_price, replica_price: of moving one, in imbalance.
        home_seconds, replica_seconds: float64 ``[2]``, of carrying one expert inside a node and between nodes.
        source_EN: float64 ``[E, N]``, the share of each expert's tokens that comes from each node.
        crossing_price: imbalance that it is worth if no token crosses nodes instead of all; 0: nothing.
    """

    start_home_E: NDArray[np.int32]
    start_replica_RK: NDArray[np.int32]
    ranks_per_node: int
    home_price: float
    replica_price: float
    home_seconds: NDArray[np.float64]
    replica_seconds: NDArray[np.float64]
    source_EN: NDArray[np.float64]
    crossing_price: float


class Track(NamedTuple):
    """What a search has reached after 0, 1, ... N steps; filled from the front.

    Args:
        value_N: float64, mean over scenarios of max / mean rank load, and the price of tokens that cross nodes.
        moved_N2: int64 ``[N, 2]``, homes and replicas that have moved by then.
        seconds_N: float64, of the busiest link to carry these.
        step_N4: int64 ``[N, 4]``, what was done last: its kind and the three numbers that name it (``descent.take``).
    """

    value_N: NDArray[np.float64]
    moved_N2: NDArray[np.int64]
    seconds_N: NDArray[np.float64]
    step_N4: NDArray[np.int64]


@jit
def empty_track(room: int) -> Track:
    """A track for ``room - 1`` steps."""
    return Track(
        np.zeros(room), np.zeros((room, 2), dtype=np.int64), np.zeros(room), np.zeros((room, 4), dtype=np.int64)
    )


@jit(error_model="numpy")
def judge(layer: LayerLoads, peak_W: NDArray[np.float64]) -> tuple[float, float]:
    """Mean over scenarios of max / mean rank load; the same with a little of the spread, which the search lowers.

    Args:
        peak_W: out, max / mean rank load of each scenario.
    """
    scenarios, ranks = layer.load_WR.shape
    peaks, spread = 0.0, 0.0
    for scenario in range(scenarios):
        total, squares, peak = 0.0, 0.0, 0.0
        for rank in range(ranks):
            load = float(layer.load_WR[scenario, rank])
            total += load
            squares += load * load
            peak = max(peak, load)
        if total > 0.0:
            mean = total / ranks
            peak_W[scenario] = peak / mean
            peaks += peak_W[scenario]
            spread += squares / (mean * mean * ranks) - 1.0
        else:
            peak_W[scenario] = 1.0
            peaks += 1.0
    return peaks / scenarios, (peaks + SPREAD_WEIGHT * spread) / scenarios


@jit(error_model="numpy")
def crossing_cost(layer: LayerLoads, question: Question) -> float:
    """What the tokens that cross nodes cost, mean over the scenarios; in imbalance."""
    if question.crossing_price == 0.0:
        return 0.0
    nodes, node_ranks = question.source_EN.shape[1], question.ranks_per_node
    computed_N = np.empty(nodes)
    crossing = 0.0
    for scenario in range(layer.load_WE.shape[0]):
        total, near = 0.0, 0.0
        for expert in range(layer.home_E.size):
            load, row = float(layer.load_WE[scenario, expert]), layer.row_E[expert]
            total += load
            if row < 0:
                near += load * question.source_EN[expert, layer.home_E[expert] // node_ranks]
                continue
            computed_N[:] = 0.0
            for copy in range(layer.count_N[row]):
                computed_N[layer.ranks_NC[row, copy] // node_ranks] += layer.share_WNC[scenario, row, copy]
            for node in range(nodes):
                near += min(load * question.source_EN[expert, node], computed_N[node])
        crossing += 1.0 - near / max(total, 1.0)
    return float(question.crossing_price * crossing / layer.load_WE.shape[0])


@jit(error_model="numpy")
def price_of_moves(layer: LayerLoads, question: Question) -> float:
    """Of homes on another rank than now, and of replicas on a rank that does not hold the expert now; in imbalance."""
    homes, replicas = 0, 0
    for expert in range(layer.home_E.size):
        if layer.home_E[expert] != question.start_home_E[expert]:
            homes += 1
    for rank in range(layer.replica_RK.shape[0]):
        for slot in range(layer.replica_RK.shape[1]):
            expert = layer.replica_RK[rank, slot]
            if expert != EMPTY and not _stood_on(question, expert, rank):
                replicas += 1
    return question.home_price * homes + question.replica_price * replicas


@jit(error_model="numpy")
def _stood_on(question: Question, expert: int, rank: int) -> bool:
    if question.start_home_E[expert] == rank:
        return True
    found = False
    for slot in range(question.start_replica_RK.shape[1]):
        found = found or question.start_replica_RK[rank, slot] == expert
    return found


@jit(error_model="numpy")
def record(layer: LayerLoads, question: Question, track: Track, step: int, value: float) -> None:
    """Write down what has been reached and what it costs: as ``CostModel.transfer_seconds``."""
    ranks, node = layer.replica_RK.shape[0], question.ranks_per_node
    sent_R, received_R = np.zeros(ranks), np.zeros(ranks)
    track.value_N[step] = value
    track.moved_N2[step] = 0
    for expert in range(layer.home_E.size):
        source, rank = question.start_home_E[expert], layer.home_E[expert]
        if source != rank:
            seconds = question.home_seconds[1 if source // node != rank // node else 0]
            sent_R[source] += seconds
            received_R[rank] += seconds
            track.moved_N2[step, 0] += 1
    for rank in range(ranks):
        for slot in range(layer.replica_RK.shape[1]):
            expert = layer.replica_RK[rank, slot]
            if expert != EMPTY and not _stood_on(question, expert, rank):
                source = question.start_home_E[expert]
                seconds = question.replica_seconds[1 if source // node != rank // node else 0]
                sent_R[source] += seconds
                received_R[rank] += seconds
                track.moved_N2[step, 1] += 1
    track.seconds_N[step] = max(sent_R.max(), received_R.max())
