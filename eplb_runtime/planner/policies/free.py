"""The best static placement in the free layout: replicas anywhere, tokens split evenly over an expert's copies.

DeepSeek's rule begins. Then no rank holds an expert twice, and the busiest rank exchanges an expert, or two, with
others while that lowers it. ``hierarchical`` keeps all experts of a group on one node, so that group-limited routing
sends each token to few nodes: exchanges stay within a node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...placement import Placement
from ...utils.jit import jit
from ..evaluate import predicted_imbalance
from ..search.align import settle
from ..search.bounds import lower_bound
from ..types import PlanError
from .deepseek import balance as balance_deepseek

if TYPE_CHECKING:
    from ..types import PlanRequest

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]

MOST_SLOTS = 16
"""Slots of a rank up to which two experts are exchanged at once: there are many pairs of more, and little to gain."""
STRICTLY = 1.0 - 1e-9
"""An exchange must lower the busiest of two ranks by more than rounding could."""
ENOUGH = 1.0 + 2e-4
"""Tokens of the busiest rank, in mean loads, at which exchanges end."""


def free(request: PlanRequest) -> Placement:
    """The policy ``free``: ``balance`` of the forecast, near the current placement and within the budget."""
    planned = balance(request.forecast, request.topology.num_ranks, request.slots_per_rank)
    return settle(request, planned, request.current)


def hierarchical(request: PlanRequest) -> Placement:
    """The policy ``hierarchical``: ``balance`` by groups, near the current placement by whole nodes."""
    topology, groups = request.topology, request.groups
    nodes = topology.num_nodes
    planned = balance(request.forecast, topology.num_ranks, request.slots_per_rank, groups, nodes)
    return settle(request, planned, request.current, keep_nodes=has_rule(groups, nodes))


def rule_cost(request: PlanRequest, placement: Placement) -> str:
    """One clause for the plan's reason: what keeping whole groups on a node costs in ``placement``.

    The cost is the imbalance above the lower bound of a plan without the rule, so it is the most that the rule costs.
    """
    topology, groups = request.topology, request.groups
    if not has_rule(groups, topology.num_nodes):
        return f"no group rule to keep: {groups} groups on {topology.num_nodes} nodes"
    unruled = lower_bound(request.forecast, topology.num_ranks, request.slots_per_rank)
    cost = predicted_imbalance(request.forecast, placement) / unruled - 1.0
    return (
        f"the group rule costs at most {cost.mean():.1%} of imbalance on average, {cost.max():.1%} in layer "
        f"{int(cost.argmax())}"
    )


def has_rule(groups: int, num_nodes: int) -> bool:
    """Return whether whole groups can be dealt out evenly to nodes, so that there is a rule to keep."""
    return groups > 1 and num_nodes > 1 and groups % num_nodes == 0


def balance(load: ArrayLike, num_ranks: int, slots_per_rank: int, groups: int = 1, num_nodes: int = 1) -> IntArray:
    """Plan every layer on its own, without regard to any current placement.

    Args:
        load: ``[L, E]``, tokens of each expert, finite and not negative.
        num_ranks: R, R / num_nodes consecutive ones a node.
        slots_per_rank: S; R x S is at least E, and S at most the experts of a node.
        groups: expert groups, each of E / groups consecutive experts. If ``num_nodes`` does not divide it there is no
            rule to keep.
        num_nodes: nodes.

    Returns:
        int32 ``[L, R * S]``, the expert of each slot.

    Raises:
        PlanError: sizes that do not fit.
    """
    weight = np.ascontiguousarray(load, dtype=np.float64)
    groups, num_nodes = (groups, num_nodes) if has_rule(groups, num_nodes) else (1, 1)
    within_reach = weight.shape[1] // num_nodes
    if slots_per_rank > within_reach:
        raise PlanError(
            f"{slots_per_rank} slots per rank for {within_reach} experts{' per node' if num_nodes > 1 else ''}: "
            "a rank would hold an expert twice"
        )
    planned = balance_deepseek(weight, num_ranks * slots_per_rank, groups, num_nodes, num_ranks)[0]
    for slots_P, weight_E in zip(planned, weight, strict=True):
        _descend(slots_P.reshape(num_ranks, -1), weight_E, num_ranks // num_nodes)
    return planned


@jit
def _descend(slot_RS: IntArray, weight_E: FloatArray, node_ranks: int) -> None:
    """Exchange experts between ranks of a node, in place, until the busiest rank finds no exchange that lowers it."""
    ranks, slots = slot_RS.shape
    held_RE, unit_E, load_R = np.empty((ranks, weight_E.size), dtype=np.int64), weight_E.copy(), np.empty(ranks)
    _measure(slot_RS, weight_E, held_RE, unit_E, load_R)
    for rank in range(ranks):
        for slot in range(slots):
            if held_RE[rank, slot_RS[rank, slot]] > 1 and not _exchange(
                slot_RS, held_RE, unit_E, load_R, node_ranks, rank, slot, np.inf
            ):
                slot_RS[rank, slot] = _hottest_not_on(rank, slot_RS, held_RE, unit_E, node_ranks)
                _measure(slot_RS, weight_E, held_RE, unit_E, load_R)
    busiest = int(np.argmax(load_R))
    while load_R[busiest] > ENOUGH * load_R.mean() and _exchange(
        slot_RS, held_RE, unit_E, load_R, node_ranks, busiest, -1, load_R[busiest] * STRICTLY
    ):
        busiest = int(np.argmax(load_R))


@jit
def _measure(
    slot_RS: IntArray, weight_E: FloatArray, held_RE: NDArray[np.int64], unit_E: FloatArray, load_R: FloatArray
) -> None:
    """Count each rank's copies of each expert; find the tokens of a copy and of each rank."""
    held_RE[:] = 0
    load_R[:] = 0.0
    for rank in range(load_R.size):
        for expert in slot_RS[rank]:
            held_RE[rank, expert] += 1
    unit_E[:] = weight_E / held_RE.sum(axis=0)
    for rank in range(load_R.size):
        for expert in slot_RS[rank]:
            load_R[rank] += unit_E[expert]


@jit
def _hottest_not_on(
    rank: int, slot_RS: IntArray, held_RE: NDArray[np.int64], unit_E: FloatArray, node_ranks: int
) -> int:
    """The expert of the rank's node with most tokens a copy that the rank does not hold."""
    best, first = -1, rank // node_ranks * node_ranks
    for other in range(first, first + node_ranks):
        for expert in slot_RS[other]:
            if held_RE[rank, expert] == 0 and (best < 0 or unit_E[expert] > unit_E[best]):
                best = expert
    return best


@jit
def _exchange(
    slot_RS: IntArray,
    held_RE: NDArray[np.int64],
    unit_E: FloatArray,
    load_R: FloatArray,
    node_ranks: int,
    rank: int,
    only: int,
    below: float,
) -> bool:
    """Exchange one or two experts with another rank of the node, so that the busier of the two is least loaded.

    Args:
        only: the one slot that the rank gives; -1: any.
        below: tokens that the busier of the two must stay below, or nothing is exchanged.
    """
    slots, first, best, partner = slot_RS.shape[1], rank // node_ranks * node_ranks, below, -1
    gives, takes = (-1, -1), (-1, -1)
    for there in range(first, first + node_ranks):
        if there == rank or 0.5 * (load_R[rank] + load_R[there]) >= best:
            continue
        own_S, their_S = slot_RS[rank], slot_RS[there]
        for one in range(slots):
            if held_RE[there, own_S[one]] or (only >= 0 and one != only):
                continue
            for two in range(-1, one if only < 0 and slots <= MOST_SLOTS else 0):  # -1: one alone
                if two >= 0 and held_RE[there, own_S[two]]:
                    continue
                given = unit_E[own_S[one]] + (unit_E[own_S[two]] if two >= 0 else 0.0)
                for three in range(slots):
                    if held_RE[rank, their_S[three]]:
                        continue
                    for four in range(-1 if two < 0 else 0, 0 if two < 0 else three):
                        change = given - unit_E[their_S[three]] - (unit_E[their_S[four]] if four >= 0 else 0.0)
                        worst = max(load_R[rank] - change, load_R[there] + change)
                        if worst < best and (four < 0 or held_RE[rank, their_S[four]] == 0):
                            best, partner, gives, takes = worst, there, (one, two), (three, four)
    for index in range(2):
        if partner >= 0 and gives[index] >= 0:
            own, their = slot_RS[rank, gives[index]], slot_RS[partner, takes[index]]
            slot_RS[rank, gives[index]], slot_RS[partner, takes[index]] = their, own
            held_RE[rank, own], held_RE[partner, own] = held_RE[rank, own] - 1, held_RE[partner, own] + 1
            held_RE[rank, their], held_RE[partner, their] = held_RE[rank, their] + 1, held_RE[partner, their] - 1
            load_R[rank] += unit_E[their] - unit_E[own]
            load_R[partner] += unit_E[own] - unit_E[their]
    return partner >= 0
