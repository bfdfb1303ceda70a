"""The best static placement under the group rule: all experts of a group on one node, so that group-limited routing
sends each token to few nodes.

Groups are packed onto nodes, then every node is planned like a small job of its own with the means of ``free``.
``rule_cost`` says what the rule costs.
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


def hierarchical(request: PlanRequest) -> Placement:
    """The policy ``hierarchical``: ``balance`` of the forecast, settled near the current placement by whole nodes."""
    topology = request.topology
    planned = balance(
        request.forecast,
        topology.num_ranks,
        request.slots_per_rank,
        request.groups,
        topology.num_nodes,
    )
    return settle(request, planned, keep_nodes=has_rule(request.groups, topology.num_nodes))


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


def balance(
    load: ArrayLike,
    num_ranks: int,
    slots_per_rank: int,
    groups: int,
    num_nodes: int,
) -> IntArray:
    """Plan every layer inside the group rule.

    Args:
        load: ``[L, E]``, tokens of each expert, finite and not negative.
        num_ranks: R, R / num_nodes consecutive ones a node.
        slots_per_rank: S.
        groups: expert groups, each of E / groups consecutive experts. If ``num_nodes`` does not divide it there is no
            rule to keep, and the plan is that of ``free`` (as in DeepSeek's EPLB).
        num_nodes: nodes.

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
    return _balance(weight, num_ranks, slots_per_rank, groups, num_nodes)


def has_rule(groups: int, num_nodes: int) -> bool:
    """Whether whole groups can be dealt out evenly to nodes, so that there is a rule to keep."""
    return groups > 1 and num_nodes > 1 and groups % num_nodes == 0


@jit
def _balance(weight: FloatArray, num_ranks: int, slots_per_rank: int, groups: int, num_nodes: int) -> IntArray:
    layers, experts = weight.shape
    node_ranks = num_ranks // num_nodes
    group_size = experts // groups
    result = np.empty((layers, num_ranks * slots_per_rank), dtype=np.int32)
    on_node = np.empty((num_nodes, experts), dtype=np.bool_)
    for index in range(layers):
        group_load = np.empty(groups)
        for group in range(groups):
            group_load[group] = weight[index, group * group_size : (group + 1) * group_size].sum()
        nodes = empty_layer(group_load, num_nodes, groups // num_nodes)
        plan_layer(nodes, floor(group_load, num_nodes, groups // num_nodes))
        on_node[:] = False
        for node in range(num_nodes):
            for group in nodes.expert[node]:
                on_node[node, group * group_size : (group + 1) * group_size] = True
        hottest = 0.0
        for node in np.argsort(-nodes.load, kind="mergesort"):
            start = node * node_ranks * slots_per_rank
            slots = result[index, start : start + node_ranks * slots_per_rank]
            hottest = _plan_node(weight[index], np.flatnonzero(on_node[node]), node_ranks, hottest, slots)
    return result


@jit
def _plan_node(
    weight: FloatArray, members: NDArray[np.int64], node_ranks: int, hottest: float, slots: IntArray
) -> float:
    """Plan one node's ranks as a layer of their own into ``slots``; no better than ``hottest`` needs to be.

    Args:
        members: experts of this node.

    Returns:
        Tokens of the hottest rank so far.
    """
    slots_per_rank = slots.size // node_ranks
    tokens = weight[members]
    layer = empty_layer(tokens, node_ranks, slots_per_rank)
    plan_layer(layer, max(hottest, floor(tokens, node_ranks, slots_per_rank)))
    for rank in range(node_ranks):
        for slot in range(slots_per_rank):
            slots[rank * slots_per_rank + slot] = members[layer.expert[rank, slot]]
    return max(hottest, float(layer.load.max()))
