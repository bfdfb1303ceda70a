"""Where a layer's search may begin besides where it stands: homes packed anew, copies of the hottest, chords.

A split can only move tokens between ranks that share an expert. Copies of the hottest experts carry a lasting skew;
chords, copies of each rank's experts on ranks at fixed distances, connect all ranks, so that whatever a batch heaps on
a few of them flows off. Which of the two a layer needs, or how many of each, the loads that a search is given decide.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...load.least_loaded import least_loaded, set_value, tournament
from ...placement import EMPTY
from ...utils.jit import jit


def strides(ranks: int, slots: int) -> NDArray[np.int64]:
    """How many ranks before its own a rank takes an expert from, for each of its replica slots.

    1, then about a quarter of the ring, 5 and 7: any two ranks are few chords apart. Where the ring is too small for
    these the next free distance is taken, and all distances come again when there are more slots than those.
    """
    wanted = [1, ranks // 4 + 1, 5, 7, *range(2, ranks)]
    different = list(dict.fromkeys(stride % ranks for stride in wanted if stride % ranks)) or [0]
    return np.array([different[slot % len(different)] for slot in range(slots)], dtype=np.int64)


@jit
def pack(
    load_E: NDArray[np.float64],
    ballast_R: NDArray[np.float64],
    hot: int,
    home_E: NDArray[np.int32],
    replica_RK: NDArray[np.int32],
    keep_homes: bool,
) -> None:
    """Copies of the hottest experts into the first ``hot`` replica slots of each rank, and homes, heaviest first.

    The copies go to whichever expert has most tokens a copy; then homes and copies are placed together, the heaviest
    first, each on the lightest rank with a slot of its kind that does not hold the expert yet.

    Args:
        ballast_R: what each rank counts beside its experts.
        home_E: in (with ``keep_homes``) and out.
        replica_RK: out, the slots from ``hot`` on are left empty.
    """
    ranks, experts = len(replica_RK), load_E.size
    copies_E = hottest_first(load_E, ranks * hot, ranks)
    unit_E = load_E / copies_E
    load_R = ballast_R.copy()
    homes_R, filled_R = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    replica_RK[:] = EMPTY
    if keep_homes:
        for expert in range(experts):
            load_R[home_E[expert]] += unit_E[expert]
    for_homes, for_copies = tournament(load_R), tournament(load_R)
    for expert in np.argsort(-unit_E, kind="mergesort"):
        if not keep_homes:
            rank = least_loaded(for_homes)
            home_E[expert] = rank
            homes_R[rank] += 1
            load_R[rank] += unit_E[expert]
            set_value(for_homes, rank, load_R[rank] if homes_R[rank] < experts // ranks else np.inf)
        if hot == 0:
            continue
        # Ranks that hold the expert take no part until all its copies stand.
        taken, holders_C = 1, np.empty(copies_E[expert], dtype=np.int64)
        holders_C[0] = home_E[expert]
        set_value(for_copies, holders_C[0], np.inf)
        for _ in range(copies_E[expert] - 1):
            rank = least_loaded(for_copies)
            if rank < 0:
                break
            replica_RK[rank, filled_R[rank]] = expert
            filled_R[rank] += 1
            load_R[rank] += unit_E[expert]
            set_value(for_copies, rank, np.inf)
            if not keep_homes and homes_R[rank] < experts // ranks:
                set_value(for_homes, rank, load_R[rank])
            holders_C[taken] = rank
            taken += 1
        for rank in holders_C[:taken]:
            set_value(for_copies, rank, load_R[rank] if filled_R[rank] < hot else np.inf)


@jit
def pack_near(
    load_E: NDArray[np.float64], source_EN: NDArray[np.float64], ranks_per_node: int, home_E: NDArray[np.int32]
) -> None:
    """Homes on the nodes that most of their tokens come from, those first that lose most elsewhere; in a node, heaviest
    first, each on the lightest rank.

    Args:
        source_EN: the share of each expert's tokens that comes from each node.
        home_E: out.
    """
    experts, nodes = source_EN.shape
    homes = experts // (nodes * ranks_per_node)
    room_N = np.full(nodes, homes * ranks_per_node, dtype=np.int64)
    node_E = np.empty(experts, dtype=np.int64)
    stake_E = np.empty(experts)
    for expert in range(experts):
        stake_E[expert] = load_E[expert] * (source_EN[expert].max() - source_EN[expert].mean())
    for expert in np.argsort(-stake_E, kind="mergesort"):
        best = -1
        for node in range(nodes):
            if room_N[node] > 0 and (best < 0 or source_EN[expert, node] > source_EN[expert, best]):
                best = node
        node_E[expert] = best
        room_N[best] -= 1
    load_R = np.zeros(nodes * ranks_per_node)
    filled_R = np.zeros(nodes * ranks_per_node, dtype=np.int64)
    for expert in np.argsort(-load_E, kind="mergesort"):
        first = node_E[expert] * ranks_per_node
        node_load_R, node_filled_R = load_R[first : first + ranks_per_node], filled_R[first : first + ranks_per_node]
        rank = _least_loaded(node_load_R, node_filled_R, homes)
        home_E[expert] = first + rank
        node_load_R[rank] += load_E[expert]
        node_filled_R[rank] += 1


@jit
def _least_loaded(load_R: NDArray[np.float64], filled_R: NDArray[np.int64], room: int) -> int:
    best = -1
    for rank in range(load_R.size):
        if filled_R[rank] < room and (best < 0 or load_R[rank] < load_R[best]):
            best = rank
    return best


@jit
def hottest_first(load_E: NDArray[np.float64], spare: int, most: int) -> NDArray[np.int64]:
    """int64 ``[E]``: copies of each expert, home included, when each spare one goes to who has most tokens a copy."""
    copies_E = np.ones(load_E.size, dtype=np.int64)
    heaviest = tournament(-load_E)
    for _ in range(spare):
        if heaviest[1] >= 0.0:
            break
        expert = least_loaded(heaviest)
        copies_E[expert] += 1
        set_value(heaviest, expert, -load_E[expert] / copies_E[expert] if copies_E[expert] < most else 0.0)
    return copies_E


@jit
def add_chords(
    load_E: NDArray[np.float64],
    stride_K: NDArray[np.int64],
    home_E: NDArray[np.int32],
    replica_RK: NDArray[np.int32],
) -> None:
    """Give each empty replica slot the heaviest home, by copy, of the rank its stride before; in place."""
    ranks, slots = replica_RK.shape
    experts = load_E.size
    homes_RH = np.empty((ranks, experts // ranks), dtype=np.int32)
    filled_R = np.zeros(ranks, dtype=np.int64)
    copies_E = np.ones(experts, dtype=np.int64)
    for expert in range(experts):
        rank = home_E[expert]
        homes_RH[rank, filled_R[rank]] = expert
        filled_R[rank] += 1
    for rank in range(ranks):
        for slot in range(slots):
            if replica_RK[rank, slot] != EMPTY:
                copies_E[replica_RK[rank, slot]] += 1
    for slot in range(slots):
        for rank in range(ranks):
            source = (rank - stride_K[slot]) % ranks
            if replica_RK[rank, slot] != EMPTY or source == rank:
                continue
            best = EMPTY
            for expert in homes_RH[source]:
                heavier = best == EMPTY or load_E[expert] * copies_E[best] > load_E[best] * copies_E[expert]
                if heavier and load_E[expert] > 0:
                    stands = False
                    for other in range(slots):
                        stands = stands or replica_RK[rank, other] == expert
                    if not stands:
                        best = expert
            replica_RK[rank, slot] = best
            if best != EMPTY:
                copies_E[best] += 1
