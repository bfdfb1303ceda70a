"""DeepSeek's EPLB at compiled speed, equal except for ties: the reference that other planners are compared with.

Source of the algorithm: deepseek-ai/EPLB, ``rebalance_experts`` (hierarchical and global policy). Written from its
behaviour, with float32 arithmetic as there. Equal loads go to the lower id here and, after torch's sort, which is not
stable, to any of them there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...load.forecast import deal_homes
from ...placement import EMPTY, Placement
from ...utils.jit import jit
from ..search.align import align, settle
from ..types import PlanError

if TYPE_CHECKING:
    from ..types import PlanRequest

Array = NDArray[np.int32]
MOST = 1e30
"""Tokens of an expert: sums of more leave float32."""


def deepseek(request: PlanRequest) -> Placement:
    """The policy ``deepseek``: what DeepSeek's EPLB plans for the forecast, except for ties.

    In the free layout only a budget of moves makes it look at what stands: then layers wait their turn (`settle`). In
    the home layout, without replicas, homes are dealt out near the current ones, by nothing that is compiled.

    Raises:
        PlanError: replica slots of the current placement hold experts.
    """
    topology, ranks, start = request.topology, request.topology.num_ranks, request.start
    if request.layout == "free":
        planned, _, _ = balance(request.forecast, request.num_slots, request.groups, topology.num_nodes, ranks)
        is_limited = request.max_moves is not None or request.max_bytes is not None
        return settle(request, planned, request.current if is_limited else None)
    if (start.replicas_LRK != EMPTY).any():
        raise PlanError("policy 'deepseek' moves homes alone, and replicas stand: choose incremental")
    planned = deal_homes(request.forecast, ranks)
    near = settle(request, planned, Placement(start.homes_LRH.reshape(planned.shape), request.num_experts, ranks))
    return align(start, near.rank_of(near.logical_to_physical[:, :, 0]), start.replicas_LRK)


def balance(
    load: ArrayLike, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> tuple[Array, Array, Array]:
    """Plan every layer as DeepSeek's EPLB does.

    Groups are packed onto nodes, the hottest experts of a node get its spare slots, and the copies are packed onto the
    node's ranks; each step is greedy. If ``num_nodes`` does not divide ``num_groups`` the group rule is dropped and
    all ranks are one node.

    Args:
        load: ``[L, E]``, tokens of each logical expert; taken in float32.
        num_slots: P, all slots of a layer.
        num_groups: expert groups, each of E / num_groups consecutive experts.
        num_nodes: nodes.
        num_ranks: R.

    Returns:
        ``physical_to_logical`` int32 ``[L, P]``; ``logical_to_physical`` int32 ``[L, E, C]``, padded with -1, C the
        largest copy count of any layer; ``copy_count`` int32 ``[L, E]``.

    Raises:
        PlanError: sizes that do not divide each other, or fewer slots than experts.
    """
    weight = np.minimum(np.asarray(load, dtype=np.float64), MOST).astype(np.float32)
    if weight.ndim != 2:
        raise PlanError(f"load has shape {weight.shape}; it must be [layers, experts]")
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    layers, experts = weight.shape
    for whole, whole_name, part, part_name in (
        (experts, "experts", num_groups, "groups"),
        (num_ranks, "ranks", num_nodes, "nodes"),
        (num_slots, "slots", num_ranks, "ranks"),
    ):
        if part < 1 or whole % part:
            raise PlanError(f"{whole} {whole_name} cannot be divided evenly over {part} {part_name}")
    if num_slots < experts:
        raise PlanError(f"{num_slots} slots cannot hold {experts} experts: give each expert at least one slot")

    group_load = weight.reshape(layers, num_groups, -1).sum(axis=2)
    physical_to_logical = np.empty((layers, num_slots), dtype=np.int32)
    copy_index = np.empty((layers, num_slots), dtype=np.int32)
    copy_count = np.empty((layers, experts), dtype=np.int32)
    _balance(weight, group_load, num_nodes, num_ranks, physical_to_logical, copy_index, copy_count)
    logical_to_physical = np.full((layers, experts, int(copy_count.max())), -1, dtype=np.int32)
    logical_to_physical[np.arange(layers)[:, None], physical_to_logical, copy_index] = np.arange(num_slots)
    return physical_to_logical, logical_to_physical, copy_count


@jit
def pack(weight: NDArray[np.float32], num_packs: int, item_pack: Array, position: Array) -> None:
    """Put equally many items into each pack, heaviest first, each into the lightest pack that has room.

    Args:
        weight: float32 ``[n]``; n is a multiple of ``num_packs``.
        item_pack: out, int32 ``[n]``, the pack of each item.
        position: out, int32 ``[n]``, its place within the pack.
    """
    capacity = weight.size // num_packs
    filled, total = np.zeros(num_packs, dtype=np.int32), np.zeros(num_packs, dtype=np.float32)
    order = np.argsort(-weight, kind="mergesort") if capacity > 1 else np.arange(num_packs)
    for item in order:
        lightest = np.argmin(total)
        item_pack[item] = lightest
        position[item] = filled[lightest]
        filled[lightest] += 1
        total[lightest] = total[lightest] + weight[item] if filled[lightest] < capacity else np.inf


@jit
def replicate(weight: NDArray[np.float32], num_slots: int, slot_expert: Array, slot_copy: Array, count: Array) -> None:
    """Give each spare slot to the expert whose copies are hottest; ties to the lower id.

    Args:
        weight: float32 ``[n]``.
        slot_expert: out, int32 ``[num_slots]``; first the experts in order, then the spare copies as they are given.
        slot_copy: out, int32 ``[num_slots]``: which copy of its expert a slot holds.
        count: out, int32 ``[n]``.
    """
    each = weight.copy()
    for slot in range(num_slots):
        expert = slot if slot < weight.size else np.argmax(each)
        if slot < weight.size:
            count[expert] = 0
        slot_expert[slot] = expert
        slot_copy[slot] = count[expert]
        count[expert] += 1
        each[expert] = np.float32(weight[expert] / np.float32(count[expert]))


@jit
def _balance(
    weight: NDArray[np.float32],
    group_load: NDArray[np.float32],
    num_nodes: int,
    num_ranks: int,
    physical_to_logical: Array,
    copy_index: Array,
    copy_count: Array,
) -> None:
    layers, experts = weight.shape
    groups = group_load.shape[1]
    group_size = experts // groups
    node_groups = groups // num_nodes
    node_experts = experts // num_nodes
    node_slots = physical_to_logical.shape[1] // num_nodes
    node_ranks = num_ranks // num_nodes
    rank_slots = node_slots // node_ranks

    group_node = np.empty(groups, dtype=np.int32)
    group_position = np.empty(groups, dtype=np.int32)
    member = np.empty(experts, dtype=np.int32)  # the experts, node by node
    node_weight = np.empty(node_experts, dtype=np.float32)
    slot_expert = np.empty(node_slots, dtype=np.int32)
    slot_copy = np.empty(node_slots, dtype=np.int32)
    count = np.empty(node_experts, dtype=np.int32)
    slot_weight = np.empty(node_slots, dtype=np.float32)
    slot_rank = np.empty(node_slots, dtype=np.int32)
    slot_position = np.empty(node_slots, dtype=np.int32)

    for layer in range(layers):
        pack(group_load[layer], num_nodes, group_node, group_position)
        for group in range(groups):
            start = (group_node[group] * node_groups + group_position[group]) * group_size
            for offset in range(group_size):
                member[start + offset] = group * group_size + offset
        for node in range(num_nodes):
            first = node * node_experts
            for index in range(node_experts):
                node_weight[index] = weight[layer, member[first + index]]
            replicate(node_weight, node_slots, slot_expert, slot_copy, count)
            for slot in range(node_slots):
                index = slot_expert[slot]
                slot_weight[slot] = np.float32(node_weight[index] / np.float32(count[index]))
            pack(slot_weight, node_ranks, slot_rank, slot_position)
            for slot in range(node_slots):
                place = node * node_slots + slot_rank[slot] * rank_slots + slot_position[slot]
                physical_to_logical[layer, place] = member[first + slot_expert[slot]]
                copy_index[layer, place] = slot_copy[slot]
            for index in range(node_experts):
                copy_count[layer, member[first + index]] = count[index]
