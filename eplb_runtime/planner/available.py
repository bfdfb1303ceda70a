"""Planning around ranks that are gone: every expert gets a place on a rank that is there, by the fewest moves.

In the free layout slots of ranks that are gone keep what stands in them; nobody reads them. Experts that are lost with
such ranks get slots elsewhere in place of spare copies, one move each; where none is lost, or nothing stands yet, the
ranks that are there are planned for as if they were all.

In the home layout every rank has equally many homes, and what a rank owned is gone with its optimizer state: the job
goes on from a checkpoint on the ranks that are left, numbered anew. The placement is for them: homes that are left
stay, the others are shared out, one move each, which comes from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..placement import EMPTY, Placement
from ..topology import Topology
from .evaluate import moves_between
from .types import PlanError, PlanRequest


def without_gone_ranks(request: PlanRequest, policy: Callable[[PlanRequest], Placement]) -> Placement:
    """The placement of ``policy`` where ranks have speed 0.

    Raises:
        PlanError: the ranks that are there have fewer slots than there are experts.
    """
    assert request.speed_R is not None
    there_R, slots, experts = request.speed_R > 0, request.slots_per_rank, request.num_experts
    ranks, left = len(there_R), int(there_R.sum())
    if left * slots < experts:
        raise PlanError(
            f"{left} available ranks x {slots} slots hold {left * slots} of {experts} experts: give at least "
            f"{-(-experts // left)} slots per rank, or bring ranks back"
        )
    there_P = np.repeat(there_R, slots)
    current = request.current
    if current is None:
        map_LP = np.tile(np.arange(ranks * slots, dtype=np.int32) % experts, (request.num_layers, 1))
    else:
        map_LP = current.physical_to_logical.copy()
    lost = current is not None and _lost(map_LP[:, there_P], experts).any()
    if lost:
        map_LP[:, there_P] = _with_lost(map_LP[:, there_P], request.forecast, left)
    else:
        part = None if current is None else Placement(map_LP[:, there_P], experts, left)
        smaller = replace(request, topology=Topology(left), current=part, speed_R=None)
        map_LP[:, there_P] = policy(smaller).physical_to_logical
    return Placement(map_LP, experts, ranks, epoch=0 if current is None else current.epoch)


def on_the_ranks_left(
    request: PlanRequest, policy: Callable[[PlanRequest], Placement]
) -> tuple[PlanRequest, Placement, NDArray[np.int32]]:
    """In the home layout: the question for the ranks that are there, numbered anew in their order, with as many replica
    slots a rank; the placement; and the moves to it, whose source is -1: homes come from a checkpoint.

    Raises:
        PlanError: the experts cannot be shared out evenly over these ranks.
    """
    assert request.speed_R is not None
    there = np.flatnonzero(request.speed_R > 0)
    experts, left = request.num_experts, len(there)
    if experts % left:
        fewer = next(ranks for ranks in range(left, 0, -1) if experts % ranks == 0)
        raise PlanError(
            f"{experts} experts cannot be shared out evenly over {left} available ranks, as the home layout of a "
            f"training job needs: go on with {fewer} of them (leave {left - fewer} more out of available), or, for "
            "inference, plan the free layout with policy 'free'"
        )
    homes = experts // left
    slots = homes + request.slots_per_rank - experts // request.topology.num_ranks
    speed_R = request.speed_R[there] / request.speed_R[there].max()
    smaller = replace(
        request,
        topology=_topology_of(there, request.topology),
        slots_per_rank=slots,
        current=None,
        speed_R=None if (speed_R == 1.0).all() else speed_R,
        crossing_price=0.0,
        source_share_LNE=None,
    )
    if request.current is None:
        placement = policy(smaller)
        return smaller, placement, moves_between(None, placement, smaller.topology)
    placement, new_LRH = _homes_shared_out(request.current, there, request.forecast, slots)
    layer, rank, place = np.nonzero(new_LRH)
    slot = rank * slots + place
    ones = np.ones_like(layer)
    moves = np.stack([layer, placement.physical_to_logical[layer, slot], -ones, slot, ones], axis=1)
    return smaller, placement, moves.astype(np.int32)


def _topology_of(there: NDArray[np.int64], topology: Topology) -> Topology:
    """Of these ranks; where nodes have unequally many left, each rank is taken for a node of its own."""
    on_node = np.bincount(there // topology.ranks_per_node)
    on_node = on_node[on_node > 0]
    node = int(on_node[0]) if (on_node == on_node[0]).all() else 1
    return replace(topology, num_ranks=len(there), ranks_per_node=node)


def _homes_shared_out(
    current: Placement, there: NDArray[np.int64], load_LE: NDArray[np.float64], slots: int
) -> tuple[Placement, NDArray[np.bool_]]:
    """Who has a home that is left keeps it; of the others, those of which a copy is left go to it first; then the
    heaviest first, each to the lightest rank with room. Other copies stay.

    Returns:
        the placement of these ranks, and bool ``[L, R, H]``, the homes that are new.
    """
    layers, experts, left = current.num_layers, current.num_experts, len(there)
    homes, before = experts // left, current.homes_per_rank
    map_LRS = np.full((layers, left, slots), EMPTY, dtype=np.int32)
    map_LRS[:, :, :before] = current.slots_LRS[:, there, :before]
    map_LRS[:, :, homes:] = current.replicas_LRK[:, there]
    for map_RS, load_E in zip(map_LRS, load_LE, strict=True):
        filled_R = np.full(left, before)
        load_R = load_E[map_RS[:, :before]].sum(axis=1)
        lost = np.setdiff1d(np.arange(experts), map_RS[:, :before])
        copied = np.isin(lost, map_RS[:, homes:])
        for expert in lost[np.lexsort((-load_E[lost], ~copied))]:
            room_R = filled_R < homes
            holds_R = (map_RS[:, homes:] == expert).any(axis=1) & room_R
            rank = int(np.where(holds_R if holds_R.any() else room_R, load_R, np.inf).argmin())
            map_RS[rank, filled_R[rank]] = expert
            map_RS[rank, homes:][map_RS[rank, homes:] == expert] = EMPTY
            filled_R[rank] += 1
            load_R[rank] += load_E[expert]
    home_LE = np.empty((layers, experts), dtype=np.int32)
    slot_RH = np.arange(left)[:, None] * slots + np.arange(homes)
    owned_LN = map_LRS[:, :, :homes].reshape(layers, -1).astype(np.int64)
    np.put_along_axis(home_LE, owned_LN, slot_RH.reshape(1, -1).astype(np.int32), axis=1)
    new_LRH = np.zeros((layers, left, homes), dtype=bool)
    new_LRH[:, :, before:] = True
    placement = Placement(map_LRS.reshape(layers, -1), experts, left, home_LE, current.epoch)
    return placement, new_LRH


def lost_experts(placement: Placement, speed_R: NDArray[np.float64] | None) -> int:
    """Experts over all layers that stand on no rank with a speed above 0."""
    if speed_R is None or speed_R.all():
        return 0
    there_P = np.repeat(speed_R > 0, placement.slots_per_rank)
    return int(_lost(placement.physical_to_logical[:, there_P], placement.num_experts).sum())


def _lost(map_LP: NDArray[np.int32], experts: int) -> NDArray[np.bool_]:
    """bool ``[L, E]``: experts that stand in none of these slots."""
    return np.stack([np.bincount(row, minlength=experts) == 0 for row in map_LP])


def _with_lost(map_LP: NDArray[np.int32], load_LE: NDArray[np.float64], ranks: int) -> NDArray[np.int32]:
    """Each lost expert, the heaviest first, in the slot of a spare copy that leaves the heaviest rank lightest.

    Tokens are split evenly over copies. A rank never gets an expert twice.
    """
    result = map_LP.copy()
    rank_P = np.arange(result.shape[1]) // (result.shape[1] // ranks)
    for row_P, load_E in zip(result, load_LE, strict=True):
        count_E = np.bincount(row_P, minlength=len(load_E))
        lost = np.flatnonzero(count_E == 0)
        for expert in lost[np.argsort(-load_E[lost], kind="stable")]:
            unit_E = load_E / np.maximum(count_E, 1)
            load_R = np.bincount(rank_P, unit_E[row_P], minlength=ranks)
            peak, best = np.inf, -1
            for slot in np.flatnonzero(count_E[row_P] > 1):
                spare = row_P[slot]
                after_R = load_R.copy()
                # The spare copy's tokens go to the copies that stay.
                after_R[rank_P[slot]] += load_E[expert] - unit_E[spare]
                more = load_E[spare] / (count_E[spare] - 1) - unit_E[spare]
                others = np.flatnonzero(row_P == spare)
                np.add.at(after_R, rank_P[others[others != slot]], more)
                if after_R.max() < peak:
                    peak, best = after_R.max(), int(slot)
            count_E[row_P[best]] -= 1
            count_E[expert] = 1
            row_P[best] = expert
    return result
