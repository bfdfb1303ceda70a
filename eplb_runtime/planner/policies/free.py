"""The best static placement in the free layout: replicas anywhere, tokens split evenly over an expert's copies.

DeepSeek's rule begins. Of two slots a rank the heaviest copy goes with the lightest, and replicas go to other experts.
Then no rank holds an expert twice, and the busiest rank exchanges an expert, or two, with others while that lowers it.
``hierarchical`` keeps all experts of a group on one node, so that group-limited routing sends each token to few nodes:
exchanges stay within a node.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...placement import Placement
from ...utils.jit import jit
from ..types import PlanError, PlanRequest
from .align import has_rule, resolve
from .deepseek import balance as balance_deepseek

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]

MOST_SLOTS = 16
"""Slots of a rank up to which two experts are exchanged at once: there are many pairs of more, and little to gain."""
STRICTLY = 1.0 - 1e-9
"""An exchange must lower the busiest of two ranks by more than rounding could."""
ENOUGH = 1.0 + 2e-4
"""Tokens of the busiest rank, in mean loads, at which exchanges end."""


def free(request: PlanRequest) -> Placement:
    """Return the placement of policy ``free`` or ``hierarchical``: `balance` of the forecast (by groups in the latter),
    near the current placement and within the budget. `resolve` may write to ``request.held``."""
    groups = request.groups if request.policy == "hierarchical" else 1
    ranks, nodes = request.topology.num_ranks, request.topology.num_nodes
    planned = balance(request.forecast, ranks, request.slots_per_rank, groups, nodes)
    return resolve(request, planned, request.current, keep_nodes=has_rule(groups, nodes))


def balance(load: ArrayLike, num_ranks: int, slots_per_rank: int, groups: int = 1, num_nodes: int = 1) -> IntArray:
    """Return the best placement found for every layer on its own, without regard to any current placement.

    Args:
        load: ``[L, E]``, tokens of each expert, finite and not negative.
        num_ranks: R, R / num_nodes consecutive ones a node.
        slots_per_rank: S; R x S is at least E, and S at most the experts of a node.
        groups: expert groups, each of E / groups consecutive experts, kept on one node if ``num_nodes`` divides
            ``groups``.
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
    for planned_P, weight_E in zip(planned, weight, strict=True):
        for slot_RS in planned_P.reshape(num_nodes, -1, slots_per_rank):
            if slots_per_rank == 2:
                slot_P = _paired(weight_E, np.bincount(slot_RS.ravel(), minlength=weight_E.size))
                slot_RS[:] = np.stack([slot_P, slot_P[::-1]], axis=1)[: len(slot_RS)]
            held_RE = np.zeros((len(slot_RS), weight_E.size), dtype=np.int64)
            np.add.at(held_RE, (np.arange(len(slot_RS))[:, None], slot_RS), 1)
            _give_doubles_away(slot_RS, held_RE, weight_E)
            unit_E = weight_E / np.maximum(held_RE.sum(axis=0), 1)
            _exchange(slot_RS, held_RE, unit_E, unit_E[slot_RS].sum(axis=1))
    return planned


@jit
def _paired(weight_E: FloatArray, count_E: NDArray[np.int64]) -> IntArray:
    """int32 ``[P]``, copies from the lightest to the heaviest. With two slots a rank no placement of these is better
    than the first with the last, and so on. An expert of the busiest pair gets a copy of another's while that helps."""
    slot_P, load_P = np.empty(count_E.sum(), dtype=np.int32), np.empty(count_E.sum())
    least = _pair(weight_E, count_E, slot_P, load_P)
    while True:
        gets, loses = -1, -1
        busy = int(np.argmax(load_P))
        for one in (slot_P[busy], slot_P[slot_P.size - 1 - busy]):
            for other in np.flatnonzero(count_E > 1):
                count_E[one], count_E[other] = count_E[one] + 1, count_E[other] - 1
                peak = _pair(weight_E, count_E, slot_P, load_P) if other != one else np.inf
                if peak < STRICTLY * least:
                    least, gets, loses = peak, int(one), int(other)
                count_E[one], count_E[other] = count_E[one] - 1, count_E[other] + 1
        if gets >= 0:
            count_E[gets], count_E[loses] = count_E[gets] + 1, count_E[loses] - 1
        _pair(weight_E, count_E, slot_P, load_P)
        if gets < 0:
            return slot_P


@jit
def _pair(weight_E: FloatArray, count_E: NDArray[np.int64], slot_P: IntArray, load_P: FloatArray) -> float:
    """Fill in the copies, lightest first, and the load of each with the one as far from the other end; return the
    largest."""
    expert_P = np.repeat(np.arange(count_E.size), count_E)
    each_P = weight_E[expert_P] / count_E[expert_P]
    order = np.argsort(each_P, kind="mergesort")
    slot_P[:] = expert_P[order]
    load_P[:] = each_P[order] + each_P[order[::-1]]
    return float(load_P.max())


def _give_doubles_away(slot_RS: IntArray, held_RE: NDArray[np.int64], weight_E: FloatArray) -> None:
    """Exchange an expert that a rank has twice, so that the busier of both ranks is least loaded; where no other rank
    takes it, put the hottest expert there that the rank does not have."""
    for rank, slot in np.argwhere(np.take_along_axis(held_RE, slot_RS.astype(np.int64), axis=1) > 1).tolist():
        given = slot_RS[rank, slot]
        if held_RE[rank, given] == 1:
            continue
        unit_E = weight_E / np.maximum(held_RE.sum(axis=0), 1)
        fits_RS = (held_RE[rank] == 0)[slot_RS] & (held_RE[:, given] == 0)[:, None]
        taken = np.where((held_RE[rank] == 0) & held_RE.any(axis=0), unit_E, -1.0).argmax()
        if fits_RS.any():
            load_R1, less_RS = unit_E[slot_RS].sum(axis=1, keepdims=True), unit_E[given] - unit_E[slot_RS]
            busier_RS = np.where(fits_RS, np.maximum(load_R1[rank] - less_RS, load_R1 + less_RS), np.inf)
            partner, place = np.unravel_index(busier_RS.argmin(), busier_RS.shape)
            taken, slot_RS[partner, place] = slot_RS[partner, place], given
            held_RE[partner, [taken, given]] += [-1, 1]
        slot_RS[rank, slot] = taken
        held_RE[rank, [given, taken]] += [-1, 1]


@jit
def _exchange(slot_RS: IntArray, held_RE: NDArray[np.int64], unit_E: FloatArray, load_R: FloatArray) -> None:
    """Exchange one or two experts of the busiest rank with another rank, in place, until no exchange lowers it. The
    exchange that is taken leaves the busier of the two ranks least loaded.

    Args:
        held_RE: int64, copies of each expert on each rank.
        unit_E: tokens of a copy.
        load_R: tokens of each rank.
    """
    ranks, slots = slot_RS.shape
    while True:
        rank, partner, gives, takes = int(np.argmax(load_R)), -1, (-1, -1), (-1, -1)
        best = load_R[rank] * STRICTLY
        if load_R[rank] <= ENOUGH * load_R.mean():
            return
        for there in range(ranks):
            if there == rank or 0.5 * (load_R[rank] + load_R[there]) >= best:
                continue
            own_S, their_S = slot_RS[rank], slot_RS[there]
            for one in range(slots):
                if held_RE[there, own_S[one]]:
                    continue
                for two in range(-1, one if slots <= MOST_SLOTS else 0):  # -1: one alone
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
        if partner < 0:
            return
        for index in range(1 if gives[1] < 0 else 2):
            own, their = slot_RS[rank, gives[index]], slot_RS[partner, takes[index]]
            slot_RS[rank, gives[index]], slot_RS[partner, takes[index]] = their, own
            held_RE[rank, own], held_RE[partner, own] = 0, 1
            held_RE[rank, their], held_RE[partner, their] = 1, 0
            load_R[rank] += unit_E[their] - unit_E[own]
            load_R[partner] += unit_E[own] - unit_E[their]
