"""From "which expert on which rank" to slots: the slots of a new placement, with as little motion as can be.

Experts that stay on a rank stay in their slot. Where homes change rank, the expert that comes takes a slot that another
leaves, chosen so that the slots' permutation falls into cycles that visit a rank at most once: then one staged expert
per rank is always enough to carry a cycle out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ..evaluate import predicted_imbalance
from ..types import PlanError, PlanRequest


def align(start: Placement, home_rank: NDArray[np.integer], replicas_LRK: NDArray[np.int32]) -> Placement:
    """Slots for a new choice of ranks.

    Args:
        start: the placement to stay close to; home layout.
        home_rank: int ``[L, E]``, the new home rank of each expert; each rank gets exactly E/R.
        replicas_LRK: int32, the experts of which each rank is to hold weights-only copies, in any order, -1 for none;
            none of its homes.

    Raises:
        PlanError: a rank gets another number of homes than E/R.
    """
    physical_to_logical = np.full_like(start.physical_to_logical, EMPTY)
    home = np.empty((start.num_layers, start.num_experts), dtype=np.int32)
    for layer in range(start.num_layers):
        home[layer] = _align_homes(start, layer, np.asarray(home_rank[layer]))
        physical_to_logical[layer, home[layer]] = np.arange(start.num_experts)
    slot_LRS = physical_to_logical.reshape(start.num_layers, start.num_ranks, start.slots_per_rank)
    slot_LRS[:, :, start.homes_per_rank :] = keep_slots(start.replicas_LRK, replicas_LRK)
    return Placement(physical_to_logical, start.num_experts, start.num_ranks, home, start.epoch)


def placed_anew(home_rank_LE: NDArray[np.int32], replicas_LRK: NDArray[np.int32]) -> Placement:
    """The placement of these homes, by expert on each rank, and replicas, where nothing stands yet."""
    layers, experts = home_rank_LE.shape
    ranks, slots = replicas_LRK.shape[1:]
    expert_LRH = np.argsort(home_rank_LE, axis=1, kind="stable").reshape(layers, ranks, -1)
    homes = expert_LRH.shape[2]
    slot_RH = np.arange(ranks)[:, None] * (homes + slots) + np.arange(homes)
    home_LE = np.empty_like(home_rank_LE)
    np.put_along_axis(home_LE, expert_LRH.reshape(layers, -1), slot_RH.reshape(1, -1).astype(np.int32), axis=1)
    return Placement(np.concatenate([expert_LRH, replicas_LRK], axis=2).reshape(layers, -1), experts, ranks, home_LE)


def _align_homes(start: Placement, layer: int, home_rank: NDArray[np.integer]) -> NDArray[np.int32]:
    if start.home is None:
        raise PlanError("the current placement is in the free layout: give one in the home layout")
    per_rank = np.bincount(home_rank, minlength=start.num_ranks)
    if (per_rank != start.homes_per_rank).any():
        rank = int(np.argmax(per_rank != start.homes_per_rank))
        raise PlanError(f"layer {layer}: rank {rank} gets {per_rank[rank]} homes instead of {start.homes_per_rank}")
    home: NDArray[np.int32] = start.home[layer].copy()
    for cycle in simple_cycles(start.home_rank[layer], home_rank):
        home[cycle] = start.home[layer, cycle[1:] + cycle[:1]]
    return home


def simple_cycles(before: NDArray[np.integer], after: NDArray[np.integer]) -> list[list[int]]:
    """Cut the moves of experts between ranks into cycles that visit a rank at most once.

    Each moved expert is an edge ``before[e] -> after[e]`` of a graph over ranks in which every rank has as many edges
    in as out. Walk along edges; whenever the walk comes back to a rank of its path, cut that cycle off. Swaps
    (cycles of two) are cut off first.

    Args:
        before, after: int ``[E]``, home ranks; each rank appears equally often in both.

    Returns:
        Cycles of expert ids: expert ``c[i]`` goes to the rank that ``c[i + 1]`` leaves.
    """
    leaving: dict[int, list[int]] = {}
    by_edge: dict[tuple[int, int], list[int]] = {}
    moved = np.flatnonzero(before != after)[::-1].tolist()  # the lowest is taken first, from the end
    edge_of = dict(zip(moved, zip(before[moved].tolist(), after[moved].tolist(), strict=True), strict=True))
    cycles: list[list[int]] = []
    for expert, edge in edge_of.items():
        by_edge.setdefault(edge, []).append(expert)
    for (source, destination), there in sorted(by_edge.items()):
        back = by_edge.get((destination, source), [])
        while source < destination and there and back:
            cycles.append([there.pop(), back.pop()])
    paired = {expert for cycle in cycles for expert in cycle}
    for expert, (source, _) in edge_of.items():
        if expert not in paired:
            leaving.setdefault(source, []).append(expert)
    for rank in sorted(leaving):
        while leaving[rank]:
            path: list[int] = []
            place_of = {rank: 0}  # of the ranks of the path
            at = rank
            while leaving[at]:  # else the walk is at its start, whose edges are all used up
                path.append(leaving[at].pop())
                at = edge_of[path[-1]][1]
                if at in place_of:
                    first = place_of[at]
                    cycles.append(path[first:])
                    for expert in path[first + 1 :]:
                        del place_of[edge_of[expert][0]]
                    del path[first:]
                else:
                    place_of[at] = len(path)
    return cycles


def keep_slots(current_LRK: NDArray[np.int32], wanted_LRK: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32 ``[L, R, K]``: who stays keeps the slot, the others fill up in ascending order."""
    same = (current_LRK[..., :, None] == wanted_LRK[..., None, :]) & (current_LRK != EMPTY)[..., :, None]
    kept_LRK = np.where(same.any(axis=-1), current_LRK, EMPTY)
    last = np.iinfo(np.int32).max
    coming_LRK = np.sort(np.where((wanted_LRK != EMPTY) & ~same.any(axis=-2), wanted_LRK, last), axis=-1)
    free_LRK = kept_LRK == EMPTY
    place_LRK = np.maximum(free_LRK.cumsum(axis=-1) - 1, 0)
    filled_LRK = np.take_along_axis(coming_LRK, place_LRK, axis=-1)
    return np.where(free_LRK, np.where(filled_LRK == last, EMPTY, filled_LRK), kept_LRK).astype(np.int32)


def settle(
    request: PlanRequest, planned: NDArray[np.int32], current: Placement | None, *, keep_nodes: bool = False
) -> Placement:
    """The placement to propose for a plan of the free layout, near the current one and within the budget of moves.

    Ranks are equal, so the plan's ranks are renamed to current ones that hold most of their experts. Layers that gain
    nothing stay; where the budget is short, the layers that gain most per moved slot go first.

    Args:
        planned: int32 ``[L, P]``, without empty slots.
        current: what stands, of the same slots and in the free layout; None: nothing does.
        keep_nodes: ranks that share a node in the plan must go on sharing one (the group rule).
    """
    experts, topology = request.num_experts, request.topology
    if current is None:
        return Placement(planned, experts, topology.num_ranks)
    shape = (len(planned), topology.num_ranks, -1)
    now_LRS, new_LRS = current.physical_to_logical.reshape(shape), planned.reshape(shape)
    node_ranks = topology.ranks_per_node if keep_nodes else topology.num_ranks
    named_LRS = np.stack([_named(*of_layer, node_ranks) for of_layer in zip(now_LRS, new_LRS, strict=True)])
    kept_LRS = keep_slots(_numbered(now_LRS), _numbered(named_LRS)) // current.slots_per_rank
    slots_LP = kept_LRS.reshape(planned.shape)
    moved_L = (named_LRS[..., :, None] != now_LRS[..., None, :]).all(axis=-1).sum(axis=(1, 2))
    gain_L = predicted_imbalance(request.forecast, current) - predicted_imbalance(
        request.forecast, Placement(slots_LP, experts, topology.num_ranks)
    )
    budget = np.inf if request.max_moves is None else request.max_moves
    if request.max_bytes is not None:
        budget = min(budget, request.max_bytes // request.slot_bytes[0 if request.layout == "home" else 1])
    for layer in np.argsort(-gain_L / np.maximum(moved_L, 1), kind="stable"):
        if gain_L[layer] <= 0 or moved_L[layer] > budget:
            slots_LP[layer] = current.physical_to_logical[layer]
        else:
            budget -= int(moved_L[layer])
    return Placement(slots_LP, experts, topology.num_ranks, epoch=current.epoch)


def _numbered(slot_LRS: NDArray[np.int32]) -> NDArray[np.int32]:
    """``slot_LRS`` times S, and for a copy on a rank that holds others how many come before it: no two are equal."""
    before = (slot_LRS[..., :, None] == slot_LRS[..., None, :]) & np.tri(slot_LRS.shape[-1], k=-1, dtype=bool)
    return np.asarray(slot_LRS * slot_LRS.shape[-1] + before.sum(axis=-1), dtype=np.int32)


def _named(now_RS: NDArray[np.int32], new_RS: NDArray[np.int32], node_ranks: int) -> NDArray[np.int32]:
    """``new_RS`` with its nodes, and within them its ranks, renamed to those that hold most of their experts now."""
    ranks, slots = now_RS.shape
    order = np.argsort(now_RS, axis=None, kind="stable")
    sorted_P = now_RS.ravel()[order]
    first_P, last_P = (np.searchsorted(sorted_P, new_RS.ravel(), side=side) for side in ("left", "right"))
    holders_P = last_P - first_P
    within_N = np.arange(holders_P.sum()) - np.repeat(holders_P.cumsum() - holders_P, holders_P)
    holder_N = order[np.repeat(first_P, holders_P) + within_N] // slots
    new_N = np.repeat(np.arange(new_RS.size) // slots, holders_P)
    nodes = ranks // node_ranks
    node_name = match(new_N // node_ranks, holder_N // node_ranks, nodes)
    name_R = np.empty(ranks, dtype=np.int64)
    for node, name in enumerate(node_name.tolist()):
        here_N = (new_N // node_ranks == node) & (holder_N // node_ranks == name)
        within_R = match(new_N[here_N] % node_ranks, holder_N[here_N] % node_ranks, node_ranks)
        name_R[node * node_ranks : (node + 1) * node_ranks] = name * node_ranks + within_R
    named_RS = np.empty_like(new_RS)
    named_RS[name_R] = new_RS
    return named_RS


def match(one_N: NDArray[np.integer], other_N: NDArray[np.integer], size: int) -> NDArray[np.int64]:
    """For each of ``size`` numbers another of its own: pairs ``(one, other)`` that are most frequent first."""
    pair, shared = np.unique(one_N.astype(np.int64) * size + other_N, return_counts=True)
    name, is_free = np.full(size, -1), np.ones(size, dtype=bool)
    for one, other in np.stack(np.divmod(pair[np.argsort(-shared, kind="stable")], size), axis=1).tolist():
        if name[one] < 0 and is_free[other]:
            name[one], is_free[other] = other, False
    name[name < 0] = np.flatnonzero(is_free)
    return name
