"""From "which expert on which rank" to slots: the slots of a new placement, with as little motion as can be, and a
budget of moves shared out over layers."""

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ..evaluate import predicted_imbalance
from ..types import PlanRequest


def align(start: Placement, home_rank: NDArray[np.integer], replicas_LRK: NDArray[np.int32]) -> Placement:
    """Return the placement with these homes and replicas. An expert that stays on a rank stays in its slot.

    Args:
        start: the placement to stay close to; home layout.
        home_rank: int ``[L, E]``, the new home rank of each expert; each rank gets exactly E/R.
        replicas_LRK: int32, the experts of each rank's replicas, in any order; none of its homes. -1: an empty slot.
    """
    wanted_LRH = np.argsort(home_rank, axis=1, kind="stable").reshape(start.homes_LRH.shape).astype(np.int32)
    homes_LRH = keep_slots(start.homes_LRH, wanted_LRH)
    slot_LRS = np.concatenate([homes_LRH, keep_slots(start.replicas_LRK, replicas_LRK)], axis=2)
    slot_RH = np.arange(start.num_slots, dtype=np.int32).reshape(start.num_ranks, -1)[:, : start.homes_per_rank]
    home_LE = np.empty((start.num_layers, start.num_experts), dtype=np.int32)
    np.put_along_axis(home_LE, homes_LRH.reshape(start.num_layers, -1), slot_RH.reshape(1, -1), axis=1)
    return Placement(slot_LRS.reshape(start.num_layers, -1), start.num_experts, start.num_ranks, home_LE, start.epoch)


def keep_slots(current_LRK: NDArray[np.int32], wanted_LRK: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return int32 ``[L, R, K]``, the wanted experts of each rank in slots. Experts that are in ``current_LRK`` keep
    their slot, the others fill the free slots in ascending order; -1: empty."""
    same = (current_LRK[..., :, None] == wanted_LRK[..., None, :]) & (current_LRK != EMPTY)[..., :, None]
    kept_LRK = np.where(same.any(axis=-1), current_LRK, EMPTY)
    last = np.iinfo(np.int32).max
    coming_LRK = np.sort(np.where((wanted_LRK != EMPTY) & ~same.any(axis=-2), wanted_LRK, last), axis=-1)
    free_LRK = kept_LRK == EMPTY
    place_LRK = np.maximum(free_LRK.cumsum(axis=-1) - 1, 0)
    filled_LRK = np.take_along_axis(coming_LRK, place_LRK, axis=-1)
    return np.where(free_LRK, np.where(filled_LRK == last, EMPTY, filled_LRK), kept_LRK).astype(np.int32)


def resolve(
    request: PlanRequest, planned: NDArray[np.int32], current: Placement | None, *, keep_nodes: bool = False
) -> Placement:
    """Return the placement to propose for a plan of the free layout, near the current one and within the budget.

    Ranks are equal, so the plan's ranks are renamed to current ones that hold most of their experts. Layers that gain
    nothing stay; where the budget is short, the layers that gain most per moved slot go first. ``request.held`` gets
    ``"limits"`` for each layer that stays for want of budget.

    Args:
        planned: int32 ``[L, P]``, without empty slots.
        current: the current placement, of the same slots and in the free layout; None: the plan is taken as it is.
        keep_nodes: ranks that share a node in the plan must go on sharing one (the group rule).
    """
    experts, topology = request.num_experts, request.topology
    if current is None:
        return Placement(planned, experts, topology.num_ranks)
    shape = (len(planned), topology.num_ranks, -1)
    now_LRS, new_LRS = current.physical_to_logical.reshape(shape), planned.reshape(shape)
    node_ranks = topology.ranks_per_node if keep_nodes else topology.num_ranks
    named_LRS = np.empty_like(new_LRS)
    for now_RS, new_RS, named_RS in zip(now_LRS, new_LRS, named_LRS, strict=True):
        named_RS[names(now_RS, new_RS, node_ranks)] = new_RS
    slots_LP = (keep_slots(_numbered(now_LRS), _numbered(named_LRS)) // current.slots_per_rank).reshape(planned.shape)
    moved_L = (named_LRS[..., :, None] != now_LRS[..., None, :]).all(axis=-1).sum(axis=(1, 2))
    near = Placement(slots_LP, experts, topology.num_ranks)
    gain_L = predicted_imbalance(request.forecast, current) - predicted_imbalance(request.forecast, near)
    value = [np.array([0.0, -gain]) for gain in np.maximum(gain_L, 0.0)]
    slot_bytes = request.slot_bytes[0 if request.layout == "home" else 1]
    cost = [np.array([[0, 0], [moved, moved * slot_bytes]]) for moved in moved_L.tolist()]
    fits_L = share_out(value, cost, (request.max_moves, request.max_bytes)) > 0
    request.held.update(dict.fromkeys(np.flatnonzero((gain_L > 0) & ~fits_L).tolist(), "limits"))
    stays_L = (gain_L <= 0) | ~fits_L
    slots_LP[stays_L] = current.physical_to_logical[stays_L]
    return Placement(slots_LP, experts, topology.num_ranks, epoch=current.epoch)


def has_rule(groups: int, num_nodes: int) -> bool:
    """Return whether each group stays on one node: there are several groups, and as many on each of several nodes."""
    return groups > 1 and num_nodes > 1 and groups % num_nodes == 0


def _numbered(slot_LRS: NDArray[np.int32]) -> NDArray[np.int32]:
    """``slot_LRS`` times S, and for a copy on a rank that holds others how many come before it: no two are equal."""
    before = (slot_LRS[..., :, None] == slot_LRS[..., None, :]) & np.tri(slot_LRS.shape[-1], k=-1, dtype=bool)
    return np.asarray(slot_LRS * slot_LRS.shape[-1] + before.sum(axis=-1), dtype=np.int32)


def names(now_RS: NDArray[np.integer], new_RS: NDArray[np.integer], node_ranks: int | None = None) -> NDArray[np.int64]:
    """Return int64 ``[R]``: for each rank of ``new_RS`` a rank of ``now_RS``, each once, that holds many of its
    experts. Pairs that share most experts are matched first. Nodes of ``node_ranks`` ranks are matched as a whole;
    None: one node."""
    ranks, slots = now_RS.shape
    if node_ranks is not None and node_ranks < ranks:
        now_NRS, new_NRS = (one.reshape(-1, node_ranks, slots) for one in (now_RS, new_RS))
        name_N = names(now_NRS.reshape(len(now_NRS), -1), new_NRS.reshape(len(new_NRS), -1))
        within = [names(now_NRS[name], new_RS) for name, new_RS in zip(name_N, new_NRS, strict=True)]
        return np.concatenate([name * node_ranks + name_R for name, name_R in zip(name_N, within, strict=True)])
    order = np.argsort(now_RS, axis=None, kind="stable")
    first_P, last_P = (np.searchsorted(now_RS.ravel(), new_RS.ravel(), side, order) for side in ("left", "right"))
    holders_P = last_P - first_P
    within_N = np.arange(holders_P.sum()) - np.repeat(holders_P.cumsum() - holders_P, holders_P)
    holder_N = order[np.repeat(first_P, holders_P) + within_N] // slots
    return names_of(np.repeat(np.arange(new_RS.size) // slots, holders_P), holder_N, ranks)


def names_of(new_N: NDArray[np.int64], holder_N: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Return what `names` does, from pairs: the new rank of an expert (``new_N``), and a rank that holds it now."""
    pair, shared = np.unique(new_N * ranks + holder_N, return_counts=True)
    named, is_free = [-1] * ranks, [True] * ranks
    for new, holder in np.stack(np.divmod(pair[np.argsort(-shared, kind="stable")], ranks), axis=1).tolist():
        if named[new] < 0 and is_free[holder]:
            named[new], is_free[holder] = holder, False
    name_R = np.array(named)
    name_R[name_R < 0] = np.flatnonzero(is_free)
    return name_R


def share_out(
    value: list[NDArray[np.float64]], cost: list[NDArray[np.int64]], limits: tuple[int | None, ...]
) -> NDArray[np.int64]:
    """Share a budget of moves out over layers: the steps with most gain per cost are taken next, while they fit.

    Args:
        value: for each layer float64 ``[N + 1]``, what to lower, after 0, 1, ... N steps.
        cost: for each layer int64 ``[N + 1, B]``, what it has cost by then, in each of B currencies. Gain is measured
            per unit of the first.
        limits: for each currency, over all layers; None: no limit. Without any limit all steps are taken.

    Returns:
        int64 ``[L]``, steps to take in each layer; equal rates go to the lower layer.
    """
    if all(limit is None for limit in limits):
        return np.array([len(value_N) - 1 for value_N in value], dtype=np.int64)
    left_B = np.array([np.inf if limit is None else limit for limit in limits])
    taken_L = np.zeros(len(value), dtype=np.int64)
    offers = [_next_stretch(*one, 0, left_B) for one in zip(value, cost, strict=True)]
    while (best := max(offers, key=lambda offer: offer[0]))[0] > 0.0:
        layer = offers.index(best)
        price_B = cost[layer][best[1]] - cost[layer][taken_L[layer]]
        if (price_B <= left_B).all():
            left_B, taken_L[layer] = left_B - price_B, best[1]
        offers[layer] = _next_stretch(value[layer], cost[layer], int(taken_L[layer]), left_B)
    return taken_L


def _next_stretch(
    value_N: NDArray[np.float64], cost_NB: NDArray[np.int64], at: int, left_B: NDArray[np.float64]
) -> tuple[float, int]:
    """Return the largest gain per cost of a stretch from step ``at`` on that fits, and where it ends; 0: none gains."""
    price_NB = cost_NB[at + 1 :] - cost_NB[at]
    rate_N = (value_N[at] - value_N[at + 1 :]) / np.maximum(price_NB[:, 0], 1) * (price_NB <= left_B).all(axis=1)
    return (float(rate_N.max()), at + 1 + int(rate_N.argmax())) if rate_N.size else (0.0, at)
