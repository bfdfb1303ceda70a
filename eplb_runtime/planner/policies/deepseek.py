"""DeepSeek's EPLB, equal except for ties: the reference that other planners are compared with.

Source of the algorithm: deepseek-ai/EPLB, ``rebalance_experts`` (hierarchical and global policy). Written from its
behaviour, with float32 arithmetic as there. Equal loads go to the lower id here and, after torch's sort, which is not
stable, to any of them there. Nothing is compiled.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...placement import EMPTY, Placement
from ..forecast import deal
from ..types import PlanError, PlanRequest
from .align import align, has_rule, resolve

Array = NDArray[np.int32]


def deepseek(request: PlanRequest) -> Placement:
    """Return the placement that DeepSeek's EPLB plans for the forecast, except for ties.

    In the free layout only a budget of moves makes it look at the current placement (`resolve`). In the home layout,
    without replicas, homes are dealt out near the current ones. `resolve` may write to ``request.held``.

    Raises:
        PlanError: replica slots of the current placement hold experts.
    """
    nodes, ranks, start = request.topology.num_nodes, request.topology.num_ranks, request.start
    if request.layout == "free":
        planned, _, _ = balance(request.forecast, request.num_slots, request.groups, nodes, ranks)
        current = request.current if request.is_limited else None
        return resolve(request, planned, current, keep_nodes=has_rule(request.groups, nodes))
    if (start.replicas_LRK != EMPTY).any():
        raise PlanError("policy 'deepseek' moves homes alone, and replicas stand: choose incremental")
    planned = deal(request.forecast, ranks)
    near = resolve(request, planned, Placement(start.homes_LRH.reshape(planned.shape), request.num_experts, ranks))
    return align(start, near.rank_of(near.logical_to_physical[:, :, 0]), start.replicas_LRK)


def balance(
    load: ArrayLike, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> tuple[Array, Array, Array]:
    """Plan every layer as DeepSeek's EPLB does.

    Groups are packed onto nodes, the hottest experts of a node get its spare slots, and the copies are packed onto the
    node's ranks; each step is greedy. If ``num_nodes`` does not divide ``num_groups`` the group rule is dropped and
    all ranks are one node.

    Args:
        load: ``[L, E]``, tokens of each logical expert; taken in float32, each layer's in a power of two of tokens.
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
    tokens_LE = np.asarray(load, dtype=np.float64)
    if tokens_LE.ndim != 2:
        raise PlanError(f"load has shape {tokens_LE.shape}; it must be [layers, experts]")
    weight_LE = np.ldexp(tokens_LE, -np.frexp(tokens_LE.max(axis=1, keepdims=True))[1]).astype(np.float32)
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    layers, experts = weight_LE.shape
    for whole, whole_name, part, part_name in (
        (experts, "experts", num_groups, "groups"),
        (num_ranks, "ranks", num_nodes, "nodes"),
        (num_slots, "slots", num_ranks, "ranks"),
    ):
        if part < 1 or whole % part:
            raise PlanError(f"{whole} {whole_name} cannot be divided evenly over {part} {part_name}")
    if num_slots < experts:
        raise PlanError(f"{num_slots} slots cannot hold {experts} experts: give each expert at least one slot")

    group_LG = deal(weight_LE.reshape(layers, num_groups, -1).sum(axis=2), num_nodes)
    of_group_GE = np.arange(experts).reshape(num_groups, -1)
    expert_NE = of_group_GE[group_LG].reshape(layers * num_nodes, -1)  # N: each node of each layer
    weight_NE = np.take_along_axis(weight_LE, expert_NE.reshape(layers, experts), axis=1).reshape(expert_NE.shape)
    which_NP, copy_NP, count_NE = _replicate(weight_NE, num_slots // num_nodes)
    each_NE = np.asarray(np.divide(weight_NE, count_NE, dtype=np.float32))
    slot_NP = deal(np.take_along_axis(each_NE, which_NP, axis=1), num_ranks // num_nodes)
    which_NP, copy_NP = np.take_along_axis(which_NP, slot_NP, axis=1), np.take_along_axis(copy_NP, slot_NP, axis=1)
    physical_to_logical = np.take_along_axis(expert_NE, which_NP, axis=1).astype(np.int32).reshape(layers, num_slots)
    copy_count = np.empty((layers, experts), dtype=np.int32)
    np.put_along_axis(copy_count, expert_NE.reshape(layers, experts), count_NE.reshape(layers, experts), axis=1)
    logical_to_physical = np.full((layers, experts, int(copy_count.max())), EMPTY, dtype=np.int32)
    copy_LP = copy_NP.reshape(layers, num_slots)
    logical_to_physical[np.arange(layers)[:, None], physical_to_logical, copy_LP] = np.arange(num_slots)
    return physical_to_logical, logical_to_physical, copy_count


def _replicate(weight_NE: NDArray[np.float32], slots: int) -> tuple[Array, Array, Array]:
    """Give every expert a copy, then each spare slot to the expert with most tokens a copy.

    Returns:
        int32 ``[N, P]``, the expert of each slot and which of its copies that is; int32 ``[N, E]``, copies.
    """
    nodes, experts = weight_NE.shape
    which_NP = np.tile(np.arange(slots, dtype=np.int32), (nodes, 1))
    copy_NP, count_NE = np.zeros_like(which_NP), np.ones(weight_NE.shape, dtype=np.int32)
    each_NE, node_N = weight_NE.copy(), np.arange(nodes)
    for slot in range(experts, slots):
        expert_N = each_NE.argmax(axis=1)
        which_NP[:, slot], copy_NP[:, slot] = expert_N, count_NE[node_N, expert_N]
        count_NE[node_N, expert_N] += 1
        each_NE[node_N, expert_N] = weight_NE[node_N, expert_N] / count_NE[node_N, expert_N].astype(np.float32)
    return which_NP, copy_NP, count_NE
