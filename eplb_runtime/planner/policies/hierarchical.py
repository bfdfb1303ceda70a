"""The best static placement under the group rule: all experts of a group on one node, so that group-limited routing
sends each token to few nodes.

Groups are packed onto nodes, then every node is planned like a small job of its own with the means of ``free``. The
rule can be bent in two ways, both off unless asked for: a few experts of a layer may spill to other nodes, and a layer
may drop the rule where it costs too much. ``rule_cost`` says what it costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...placement import Placement
from ...utils.jit import jit
from ..evaluate import predicted_imbalance
from ..search.bounds import floor, lower_bound
from ..search.packing import FloatArray, IntArray, empty_layer
from ..search.settle import settle
from ..types import PlanError
from .free import balance as balance_free
from .free import plan_layer

if TYPE_CHECKING:
    from ..types import PlanRequest

MAX_COPIES_AT_HOME = 6
MAX_COPIES_SPILLED = 6
WORTH_SPILLING = 1.0 - 1e-3
"""A spill must cool the hottest node by this factor, or it is not worth the traffic."""


def hierarchical(request: PlanRequest) -> Placement:
    """The policy ``hierarchical``: ``balance`` of the forecast, settled near the current placement by whole nodes.

    Options: ``spilled_experts`` (int, default 0) and ``global_above`` (share, default None), as in ``balance``.
    """
    topology = request.topology
    planned = balance(
        request.forecast,
        topology.num_ranks,
        request.slots_per_rank,
        request.groups,
        topology.num_nodes,
        spilled_experts=int(request.options.get("spilled_experts", 0)),
        global_above=request.options.get("global_above"),
    )
    return settle(request, planned, keep_nodes=has_rule(request.groups, topology.num_nodes))


def rule_cost(request: PlanRequest, placement: Placement) -> str:
    """One clause for the plan's reason: what keeping whole groups on a node costs in ``placement``, and where it bends.

    The cost is the imbalance above the lower bound of a plan without the rule, so it is the most that the rule costs.
    """
    topology, groups = request.topology, request.groups
    if not has_rule(groups, topology.num_nodes):
        return f"no group rule to keep: {groups} groups on {topology.num_nodes} nodes"
    unruled = lower_bound(request.forecast, topology.num_ranks, request.slots_per_rank)
    cost = predicted_imbalance(request.forecast, placement) / unruled - 1.0
    away = _experts_off_their_node(placement, groups, topology.num_nodes)
    allowed = int(request.options.get("spilled_experts", 0))
    clause = (
        f"the group rule costs at most {cost.mean():.1%} of imbalance on average, {cost.max():.1%} in layer "
        f"{int(cost.argmax())}"
    )
    spilled = int(away[away <= allowed].sum())
    if spilled:
        clause += f"; {spilled} experts spill"
    dropped = int(np.count_nonzero(away > allowed))
    if dropped:
        clause += f"; {dropped} layers drop the rule"
    return clause


def _experts_off_their_node(placement: Placement, groups: int, num_nodes: int) -> NDArray[np.int64]:
    """int64 ``[L]``: experts with a copy on another node than the one that holds most of their group's slots."""
    layers, experts = placement.num_layers, placement.num_experts
    node = np.arange(placement.num_slots) // (placement.num_slots // num_nodes)
    copies = np.zeros((layers, experts, num_nodes), dtype=np.int64)
    np.add.at(copies, (np.arange(layers)[:, None], placement.physical_to_logical, node), 1)
    by_group = (copies > 0).reshape(layers, groups, -1, num_nodes).sum(axis=2)
    home = np.repeat(by_group.argmax(axis=2), experts // groups, axis=1)
    elsewhere = copies.sum(axis=2) > np.take_along_axis(copies, home[:, :, None], axis=2)[:, :, 0]
    return np.asarray(elsewhere.sum(axis=1))


def balance(
    load: ArrayLike,
    num_ranks: int,
    slots_per_rank: int,
    groups: int,
    num_nodes: int,
    *,
    spilled_experts: int = 0,
    global_above: float | None = None,
) -> IntArray:
    """Plan every layer inside the group rule.

    Args:
        load: ``[L, E]``, tokens of each expert, finite and not negative.
        num_ranks: R, R / num_nodes consecutive ones a node.
        slots_per_rank: S.
        groups: expert groups, each of E / groups consecutive experts. If ``num_nodes`` does not divide it there is no
            rule to keep, and the plan is that of ``free`` (as in DeepSeek's EPLB).
        num_nodes: nodes.
        spilled_experts: at most so many experts of a layer may have copies off their group's node.
        global_above: drop the rule in layers whose imbalance it makes worse by more than this share of the imbalance
            without it (0.1: ten percent); None: never.

    Returns:
        int32 ``[L, R * S]``, the expert of each slot.

    Raises:
        PlanError: sizes that do not fit.
    """
    weight = np.ascontiguousarray(load, dtype=np.float64)
    experts = weight.shape[1]
    if not has_rule(groups, num_nodes):
        return balance_free(weight, num_ranks, slots_per_rank)
    if experts % groups or num_ranks % num_nodes:
        raise PlanError(f"{experts} experts in {groups} groups on {num_ranks} ranks of {num_nodes} nodes: not even")
    if experts > num_ranks * slots_per_rank:
        raise PlanError(f"{num_ranks} ranks x {slots_per_rank} slots cannot hold {experts} experts")
    if slots_per_rank > experts // num_nodes:
        raise PlanError(
            f"{slots_per_rank} slots per rank for {experts // num_nodes} experts per node: "
            "a rank would hold an expert twice"
        )
    planned, hottest = _balance(weight, num_ranks, slots_per_rank, groups, num_nodes, spilled_experts)
    if global_above is not None:
        mean = weight.sum(axis=1) / num_ranks
        bound = lower_bound(weight, num_ranks, slots_per_rank) * mean
        suspect = np.flatnonzero(hottest > (1.0 + global_above) * bound)
        if len(suspect):
            unruled = balance_free(weight[suspect], num_ranks, slots_per_rank)
            dear = hottest[suspect] > (1.0 + global_above) * hottest_rank(weight[suspect], unruled, num_ranks)
            planned[suspect[dear]] = unruled[dear]
    return planned


def has_rule(groups: int, num_nodes: int) -> bool:
    """Whether whole groups can be dealt out evenly to nodes, so that there is a rule to keep."""
    return groups > 1 and num_nodes > 1 and groups % num_nodes == 0


def hottest_rank(weight: FloatArray, physical_to_logical: IntArray, num_ranks: int) -> FloatArray:
    """float64 ``[L]``: tokens of the hottest rank by even split, of ``[L, E]`` tokens in ``[L, P]`` slots."""
    layers, experts = weight.shape
    flat = physical_to_logical + experts * np.arange(layers)[:, None]
    count = np.bincount(flat.ravel(), minlength=weight.size).reshape(weight.shape)
    tokens = np.take_along_axis(weight / count, physical_to_logical.astype(np.int64), axis=1)
    return np.asarray(tokens.reshape(layers, num_ranks, -1).sum(axis=2).max(axis=1))


@jit
def _balance(
    weight: FloatArray, num_ranks: int, slots_per_rank: int, groups: int, num_nodes: int, spilled_experts: int
) -> tuple[IntArray, FloatArray]:
    layers, experts = weight.shape
    node_ranks = num_ranks // num_nodes
    group_size = experts // groups
    result = np.empty((layers, num_ranks * slots_per_rank), dtype=np.int32)
    hottest = np.zeros(layers)
    copies = np.empty((num_nodes, experts), dtype=np.int32)
    for index in range(layers):
        group_load = np.empty(groups)
        for group in range(groups):
            group_load[group] = weight[index, group * group_size : (group + 1) * group_size].sum()
        nodes = empty_layer(group_load, num_nodes, groups // num_nodes)
        plan_layer(nodes, floor(group_load, num_nodes, groups // num_nodes))
        copies[:] = 0
        for node in range(num_nodes):
            for group in nodes.expert[node]:
                copies[node, group * group_size : (group + 1) * group_size] = 1
        locked, node_load = _spill(weight[index], nodes.load, copies, node_ranks, slots_per_rank, spilled_experts)
        for node in np.argsort(-node_load, kind="mergesort"):
            hottest[index] = _plan_node(
                weight[index], copies, locked, node, node_ranks, slots_per_rank, hottest[index], result[index]
            )
    return result, hottest


@jit
def _plan_node(
    weight: FloatArray,
    copies: IntArray,
    locked: NDArray[np.bool_],
    node: int,
    node_ranks: int,
    slots_per_rank: int,
    hottest: float,
    slots: IntArray,
) -> float:
    """Plan one node's ranks as a layer of their own into ``slots``; no better than ``hottest`` needs to be.

    Returns:
        Tokens of the hottest rank so far.
    """
    members = np.flatnonzero(copies[node] > 0)
    tokens = np.empty(members.size)
    lowest = 0.0
    for index in range(members.size):
        expert = members[index]
        tokens[index] = weight[expert]
        if locked[expert]:
            tokens[index] *= copies[node, expert] / copies[:, expert].sum()
            lowest = max(lowest, tokens[index] / copies[node, expert])
    layer = empty_layer(tokens, node_ranks, slots_per_rank)
    for index in range(members.size):
        if locked[members[index]]:
            layer.locked[index] = True
            layer.copies[index] = copies[node, members[index]]
    plan_layer(layer, max(hottest, lowest, floor(tokens, node_ranks, slots_per_rank)))
    start = node * node_ranks * slots_per_rank
    for rank in range(node_ranks):
        for slot in range(slots_per_rank):
            slots[start + rank * slots_per_rank + slot] = members[layer.expert[rank, slot]]
    return max(hottest, float(layer.load.max()))


@jit
def _spill(
    weight: FloatArray,
    group_load: FloatArray,
    copies: IntArray,
    node_ranks: int,
    slots_per_rank: int,
    spilled_experts: int,
) -> tuple[NDArray[np.bool_], FloatArray]:
    """Let experts of the hottest node have copies on cooler nodes, one after the other, while that cools it.

    Tokens are split evenly over all copies, so with a copies at home and b elsewhere b / (a + b) of an expert's tokens
    leave; a may be 0. Each spilled copy goes to the node that is coolest with it.

    Args:
        copies: in and out, int32 ``[N, E]``, copies of each expert on each node; 1 or 0 at first.

    Returns:
        Which experts have their copies fixed by this, and the tokens of each node.
    """
    num_nodes, experts = copies.shape
    node_slots = node_ranks * slots_per_rank
    node_load = group_load.copy()
    locked = np.zeros(experts, dtype=np.bool_)
    used = np.empty(num_nodes, dtype=np.int64)
    for node in range(num_nodes):
        used[node] = copies[node].sum()
    room = used * node_ranks  # slots a node can fill with at most one copy a rank
    trial = np.empty(num_nodes)
    given = np.empty(num_nodes, dtype=np.int32)
    best_given = np.empty(num_nodes, dtype=np.int32)
    for _ in range(spilled_experts):
        home = int(np.argmax(node_load))
        best = node_load[home] * WORTH_SPILLING
        best_expert = -1
        for expert in range(experts):
            if locked[expert] or copies[home, expert] == 0:
                continue
            for at_home in range(min(MAX_COPIES_AT_HOME, node_ranks) + 1):
                if used[home] + at_home - 1 > node_slots:
                    break
                if room[home] - node_ranks + at_home < node_slots:
                    continue
                for spilled in range(1, MAX_COPIES_SPILLED + 1):
                    unit = weight[expert] / (at_home + spilled)
                    trial[:] = node_load
                    given[:] = 0
                    given[home] = at_home
                    if not _give(trial, given, home, spilled, unit, used, node_ranks, node_slots):
                        break
                    worst = max(trial.max(), unit * node_ranks)
                    if worst < best * WORTH_SPILLING:
                        best = worst
                        best_expert = expert
                        best_given[:] = given
        if best_expert < 0:
            break
        unit = weight[best_expert] / best_given.sum()
        node_load[home] -= weight[best_expert]
        for node in range(num_nodes):
            used[node] += best_given[node] - copies[node, best_expert]
            room[node] += best_given[node] - node_ranks * copies[node, best_expert]
            node_load[node] += best_given[node] * unit
            copies[node, best_expert] = best_given[node]
        locked[best_expert] = True
    return locked, node_load


@jit
def _give(
    load: FloatArray,
    given: IntArray,
    home: int,
    spilled: int,
    unit: float,
    used: NDArray[np.int64],
    node_ranks: int,
    node_slots: int,
) -> bool:
    """Take so many copies' tokens from ``load[home]``, and give each copy to the node that is coolest by then.

    Returns:
        Whether there was room for all; what has been given until then stands.
    """
    load[home] -= spilled * unit
    for _ in range(spilled):
        target = -1
        for node in range(load.size):
            free_slot = used[node] + given[node] < node_slots and given[node] < node_ranks
            if node != home and free_slot and (target < 0 or load[node] < load[target]):
                target = node
        if target < 0:
            return False
        given[target] += 1
        load[target] += unit
    return True
