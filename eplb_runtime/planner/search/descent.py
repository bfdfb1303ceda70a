"""The search under the ``incremental`` policy: best swaps of homes, best changes of replica slots, layer by layer.

The goal is the sum of squared rank loads under water-filling, taken after every step with the real splitter's sweeps: a
split that minimises it also minimises the busiest rank. Loads are integers, so that every machine takes the same steps.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ...placement import EMPTY
from ...routing.water_filling import sweep_once, sweep_until_optimal

GOOD_ENOUGH_BITS = 10
"""The search stops when the busiest rank is within 2 ** -10 of the mean."""
FIRST_SWEEPS, SETTLING_SWEEPS = 100, 3
"""Sweeps for the split of the start (until optimal), and after each step (from a split that was good before it)."""
NEAR_BONUS = 1.02
"""A candidate inside the node is preferred while its gain is at most 2 % less."""
STUCK_RANKS = 6
"""So many of the busiest ranks are tried before the search gives up."""


@njit(nogil=True, cache=True, error_model="numpy")
def descend(
    load_E: NDArray[np.int64],
    home_rank_E: NDArray[np.int32],
    replica_RK: NDArray[np.int32],
    start_home_E: NDArray[np.int32],
    start_replica_RK: NDArray[np.int32],
    ranks_per_node: int,
    max_copies: int,
    max_steps: int,
    home_seconds: tuple[float, float],
    replica_seconds: tuple[float, float],
    peak_S: NDArray[np.int64],
    moved_S: NDArray[np.int32],
    seconds_S: NDArray[np.float64],
) -> int:
    """Take improving steps from where experts stand; changes ``home_rank_E`` and ``replica_RK`` in place.

    A step relieves the busiest rank: it swaps one of its homes with another rank's, or gives one of its experts a
    replica elsewhere (in place of another replica). Candidates are compared by the fall of the goal with the split
    held still, per expert moved; the best is kept if the goal falls after the split has settled.

    Args:
        load_E: int64 ``[E]``; sums below 2 ** 56.
        home_rank_E: int32 ``[E]``.
        replica_RK: int32 ``[R, k]``, experts in the replica slots, -1 for none.
        start_home_E, start_replica_RK: where experts stand now, for the price of what has been reached.
        max_copies: of one expert, home included.
        max_steps: at most so many.
        peak_S: int64 ``[max_steps + 1]``, filled with the busiest rank's load before the first and after each step.
        home_seconds, replica_seconds: of carrying one expert inside a node and between nodes.
        moved_S: int32 ``[max_steps + 1, 2]``, filled with the homes and the replicas that have moved by then.
        seconds_S: float64 ``[max_steps + 1]``, filled with the busiest link's time to carry these.

    Returns:
        steps taken.
    """
    experts, (ranks, slots) = load_E.size, replica_RK.shape
    homes_RH = np.empty((ranks, experts // ranks), dtype=np.int32)
    filled_R = np.zeros(ranks, dtype=np.int32)
    ranks_EC = np.full((experts, max_copies), -1, dtype=np.int32)
    share_EC = np.zeros((experts, max_copies), dtype=np.int64)
    count_E = np.ones(experts, dtype=np.int32)
    load_R = np.zeros(ranks, dtype=np.int64)
    for expert in range(experts):
        rank = home_rank_E[expert]
        ranks_EC[expert, 0], share_EC[expert, 0] = rank, load_E[expert]
        load_R[rank] += load_E[expert]
        homes_RH[rank, filled_R[rank]] = expert
        filled_R[rank] += 1
    for rank in range(ranks):
        for slot in range(slots):
            expert = replica_RK[rank, slot]
            if expert != EMPTY and count_E[expert] == max_copies:
                replica_RK[rank, slot] = EMPTY
            elif expert != EMPTY:
                ranks_EC[expert, count_E[expert]] = rank
                count_E[expert] += 1
    sweep_until_optimal(ranks_EC, count_E, share_EC, load_R, FIRST_SWEEPS)
    goal = _goal(load_R)
    peak_S[0] = load_R.max()
    seconds_S[0] = _price(
        start_home_E,
        start_replica_RK,
        ranks_EC,
        replica_RK,
        ranks_per_node,
        home_seconds,
        replica_seconds,
        moved_S[0],
    )
    enough = load_R.sum() // ranks
    enough += enough >> GOOD_ENOUGH_BITS
    stuck_R = np.zeros(ranks, dtype=np.bool_)
    stuck, step = 0, 0
    while step < max_steps and stuck < STUCK_RANKS:
        busiest = -1
        for rank in range(ranks):
            if not stuck_R[rank] and (busiest < 0 or load_R[rank] > load_R[busiest]):
                busiest = rank
        if busiest < 0 or load_R[busiest] <= enough:
            break
        swap_gain, here, there = _best_swap(busiest, homes_RH, ranks_EC, count_E, share_EC, load_R, ranks_per_node)
        copy_gain, expert, rank, slot = _best_replica(
            busiest, homes_RH, replica_RK, ranks_EC, count_E, share_EC, load_R, ranks_per_node
        )
        if swap_gain <= 0.0 and copy_gain <= 0.0:
            stuck_R[busiest] = True
            stuck += 1
            continue
        old_homes, old_replica = homes_RH.copy(), replica_RK.copy()
        old_ranks, old_share, old_count, old_load = ranks_EC.copy(), share_EC.copy(), count_E.copy(), load_R.copy()
        if swap_gain / 2 > copy_gain:
            _swap_homes(here, there, homes_RH, ranks_EC, share_EC, load_R)
        else:
            _set_replica(expert, rank, slot, replica_RK, ranks_EC, count_E, share_EC, load_R)
        for _ in range(SETTLING_SWEEPS):
            sweep_once(ranks_EC, count_E, share_EC, load_R)
        reached = _goal(load_R)
        if reached >= goal:
            homes_RH[:], replica_RK[:] = old_homes, old_replica
            ranks_EC[:], share_EC[:], count_E[:], load_R[:] = old_ranks, old_share, old_count, old_load
            stuck_R[busiest] = True
            stuck += 1
            continue
        goal = reached
        stuck_R[:] = False
        stuck = 0
        step += 1
        peak_S[step] = load_R.max()
        seconds_S[step] = _price(
            start_home_E,
            start_replica_RK,
            ranks_EC,
            replica_RK,
            ranks_per_node,
            home_seconds,
            replica_seconds,
            moved_S[step],
        )
    home_rank_E[:] = ranks_EC[:, 0]
    return step


@njit(nogil=True, cache=True, error_model="numpy")
def _goal(load_R: NDArray[np.int64]) -> float:
    total = 0.0
    for rank in range(load_R.size):
        total += float(load_R[rank]) * float(load_R[rank])
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _stands_on(expert: int, rank: int, ranks_EC: NDArray[np.int32], count_E: NDArray[np.int32]) -> bool:
    found = False
    for copy in range(count_E[expert]):
        found = found or ranks_EC[expert, copy] == rank
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def _best_swap(
    busiest: int,
    homes_RH: NDArray[np.int32],
    ranks_EC: NDArray[np.int32],
    count_E: NDArray[np.int32],
    share_EC: NDArray[np.int64],
    load_R: NDArray[np.int64],
    ranks_per_node: int,
) -> tuple[float, int, int]:
    """The fall of the goal and the two experts; ties go to the lower rank and slot."""
    best, best_here, best_there = 0.0, -1, -1
    ranks, homes = homes_RH.shape
    for mine in range(homes):
        here = homes_RH[busiest, mine]
        for rank in range(ranks):
            gap = load_R[busiest] - load_R[rank]
            if rank == busiest or gap <= 0:
                continue
            bonus = NEAR_BONUS if rank // ranks_per_node == busiest // ranks_per_node else 1.0
            for theirs in range(homes):
                there = homes_RH[rank, theirs]
                shift = share_EC[here, 0] - share_EC[there, 0]
                if shift <= 0 or shift >= gap:
                    continue
                gain = 2.0 * float(shift) * float(gap - shift) * bonus
                if gain > best:
                    if count_E[here] > 1 and _stands_on(here, rank, ranks_EC, count_E):
                        continue
                    if count_E[there] > 1 and _stands_on(there, busiest, ranks_EC, count_E):
                        continue
                    best, best_here, best_there = gain, here, there
    return best, best_here, best_there


@njit(nogil=True, cache=True, error_model="numpy")
def _best_replica(
    busiest: int,
    homes_RH: NDArray[np.int32],
    replica_RK: NDArray[np.int32],
    ranks_EC: NDArray[np.int32],
    count_E: NDArray[np.int32],
    share_EC: NDArray[np.int64],
    load_R: NDArray[np.int64],
    ranks_per_node: int,
) -> tuple[float, int, int, int]:
    """The fall of the goal, the expert, and the rank and replica slot for it; ties as in ``_best_swap``."""
    best, best_expert, best_rank, best_slot = 0.0, -1, -1, -1
    ranks, slots = replica_RK.shape
    homes = homes_RH.shape[1]
    for rank in range(ranks):
        if rank == busiest:
            continue
        bonus = NEAR_BONUS if rank // ranks_per_node == busiest // ranks_per_node else 1.0
        for slot in range(slots):
            old = replica_RK[rank, slot]
            freed, other, loss = 0, -1, 0.0
            if old != EMPTY:
                for copy in range(count_E[old]):
                    at = ranks_EC[old, copy]
                    if at == rank:
                        freed = share_EC[old, copy]
                    elif other < 0 or load_R[at] < load_R[other]:
                        other = at
                loss = float(freed) * (2.0 * float(load_R[other] - load_R[rank]) + 2.0 * float(freed))
                if other == busiest and freed > 0:
                    continue
            gap = load_R[busiest] - load_R[rank] + freed
            if gap <= 0:
                continue
            for index in range(homes + slots):
                expert = homes_RH[busiest, index] if index < homes else replica_RK[busiest, index - homes]
                if expert == EMPTY or count_E[expert] >= ranks_EC.shape[1]:
                    continue
                mine = 0
                for copy in range(count_E[expert]):
                    if ranks_EC[expert, copy] == busiest:
                        mine = share_EC[expert, copy]
                shift = float(min(mine, gap // 2))
                gain = (2.0 * shift * (float(gap) - shift) - loss) * bonus
                if gain > best and not _stands_on(expert, rank, ranks_EC, count_E):
                    best, best_expert, best_rank, best_slot = gain, expert, rank, slot
    return best, best_expert, best_rank, best_slot


@njit(nogil=True, cache=True, error_model="numpy")
def _swap_homes(
    here: int,
    there: int,
    homes_RH: NDArray[np.int32],
    ranks_EC: NDArray[np.int32],
    share_EC: NDArray[np.int64],
    load_R: NDArray[np.int64],
) -> None:
    a, b = ranks_EC[here, 0], ranks_EC[there, 0]
    for index in range(homes_RH.shape[1]):
        if homes_RH[a, index] == here:
            homes_RH[a, index] = there
        if homes_RH[b, index] == there:
            homes_RH[b, index] = here
    ranks_EC[here, 0], ranks_EC[there, 0] = b, a
    shift = share_EC[here, 0] - share_EC[there, 0]
    load_R[a] -= shift
    load_R[b] += shift


@njit(nogil=True, cache=True, error_model="numpy")
def _set_replica(
    expert: int,
    rank: int,
    slot: int,
    replica_RK: NDArray[np.int32],
    ranks_EC: NDArray[np.int32],
    count_E: NDArray[np.int32],
    share_EC: NDArray[np.int64],
    load_R: NDArray[np.int64],
) -> None:
    """Put ``expert`` into a replica slot; what the slot's old expert computed there goes to its home."""
    old = replica_RK[rank, slot]
    if old != EMPTY:
        last = count_E[old] - 1
        for copy in range(1, last + 1):
            if ranks_EC[old, copy] == rank:
                freed = share_EC[old, copy]
                load_R[rank] -= freed
                share_EC[old, 0] += freed
                load_R[ranks_EC[old, 0]] += freed
                ranks_EC[old, copy], share_EC[old, copy] = ranks_EC[old, last], share_EC[old, last]
                break
        ranks_EC[old, last], share_EC[old, last] = -1, 0
        count_E[old] = last
    replica_RK[rank, slot] = expert
    ranks_EC[expert, count_E[expert]], share_EC[expert, count_E[expert]] = rank, 0
    count_E[expert] += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _price(
    start_home_E: NDArray[np.int32],
    start_replica_RK: NDArray[np.int32],
    ranks_EC: NDArray[np.int32],
    replica_RK: NDArray[np.int32],
    ranks_per_node: int,
    home_seconds: tuple[float, float],
    replica_seconds: tuple[float, float],
    moved: NDArray[np.int32],
) -> float:
    """Count homes on another rank than now, and replicas on a rank that does not hold the expert now.

    Returns:
        seconds that the busiest rank sends or receives, as ``CostModel.transfer_seconds``.
    """
    sent_R, received_R = np.zeros(replica_RK.shape[0]), np.zeros(replica_RK.shape[0])
    moved[:] = 0
    for expert in range(start_home_E.size):
        source, rank = start_home_E[expert], ranks_EC[expert, 0]
        if source != rank:
            far = 1 if source // ranks_per_node != rank // ranks_per_node else 0
            sent_R[source] += home_seconds[far]
            received_R[rank] += home_seconds[far]
            moved[0] += 1
    for rank in range(replica_RK.shape[0]):
        for slot in range(replica_RK.shape[1]):
            expert = replica_RK[rank, slot]
            if expert == EMPTY or start_home_E[expert] == rank:
                continue
            new = True
            for other in range(replica_RK.shape[1]):
                new = new and start_replica_RK[rank, other] != expert
            if new:
                source = start_home_E[expert]
                far = 1 if source // ranks_per_node != rank // ranks_per_node else 0
                sent_R[source] += replica_seconds[far]
                received_R[rank] += replica_seconds[far]
                moved[1] += 1
    return float(max(sent_R.max(), received_R.max()))
