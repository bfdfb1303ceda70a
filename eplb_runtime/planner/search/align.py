"""From "which expert on which rank" to slots: the slots of a new placement, with as little motion as can be.

Experts that stay on a rank stay in their slot. Where homes change rank, the expert that comes takes a slot that another
leaves, chosen so that the slots' permutation falls into cycles that visit a rank at most once: then one staged expert
per rank is always enough to carry a cycle out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ..types import PlanError


def align(
    start: Placement, home_rank: NDArray[np.integer], replicas_LRK: NDArray[np.int32], *, epoch: int | None = None
) -> Placement:
    """Slots for a new choice of ranks.

    Args:
        start: the placement to stay close to; home layout.
        home_rank: int ``[L, E]``, the new home rank of each expert; each rank gets exactly E/R.
        replicas_LRK: int32, the experts of which each rank is to hold weights-only copies, in any order, -1 for none;
            none of its homes.
        epoch: of the result; default: that of ``start``.

    Raises:
        PlanError: a rank gets another number of homes than E/R.
    """
    physical_to_logical = np.full_like(start.physical_to_logical, EMPTY)
    home = np.empty((start.num_layers, start.num_experts), dtype=np.int32)
    for layer in range(start.num_layers):
        home[layer] = _align_homes(start, layer, np.asarray(home_rank[layer]))
        physical_to_logical[layer, home[layer]] = np.arange(start.num_experts)
        _align_replicas(start, layer, replicas_LRK[layer], physical_to_logical[layer])
    return Placement(
        physical_to_logical, start.num_experts, start.num_ranks, home, start.epoch if epoch is None else epoch
    )


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
    before = start.home_rank[layer]
    for cycle in simple_cycles(before, home_rank):
        vacated = [int(start.home[layer, expert]) for expert in cycle]
        for expert, slot in zip(cycle, vacated[1:] + vacated[:1], strict=True):
            home[expert] = slot
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
    moved = np.flatnonzero(before != after).tolist()
    cycles: list[list[int]] = []
    for expert in moved:
        by_edge.setdefault((int(before[expert]), int(after[expert])), []).append(expert)
    for (source, destination), there in sorted(by_edge.items()):
        back = by_edge.get((destination, source), [])
        while source < destination and there and back:
            cycles.append([there.pop(0), back.pop(0)])
    paired = {expert for cycle in cycles for expert in cycle}
    for expert in moved:
        if expert not in paired:
            leaving.setdefault(int(before[expert]), []).append(expert)
    for rank in sorted(leaving):
        while leaving[rank]:
            path_ranks, path = [rank], []
            while path_ranks:
                edges = leaving[path_ranks[-1]]
                if not edges:  # only possible at the walk's start: its edges are all used up
                    break
                expert = edges.pop(0)
                path.append(expert)
                reached = int(after[expert])
                if reached in path_ranks:
                    first = path_ranks.index(reached)
                    cycles.append(path[first:])
                    del path[first:], path_ranks[first + 1 :]
                else:
                    path_ranks.append(reached)
    return cycles


def _align_replicas(start: Placement, layer: int, replica_RK: NDArray[np.int32], row: NDArray[np.int32]) -> None:
    """Fill the replica slots of ``row`` in place: who stays keeps the slot, the others fill up in ascending order."""
    standing_RK = start.replicas_LRK[layer]
    slot_RS = row.reshape(start.num_ranks, start.slots_per_rank)
    slot_RS[:, start.homes_per_rank :] = standing_RK
    different = np.flatnonzero((np.sort(standing_RK, axis=1) != np.sort(replica_RK, axis=1)).any(axis=1))
    for rank in different.tolist():
        old, wanted = standing_RK[rank].tolist(), replica_RK[rank].tolist()
        kept = [expert if expert in wanted else EMPTY for expert in old]
        coming = iter(sorted(expert for expert in wanted if expert != EMPTY and expert not in old))
        kept = [next(coming, EMPTY) if expert == EMPTY else expert for expert in kept]
        slot_RS[rank, start.homes_per_rank :] = kept
