"""Placements of one layer from which a search begins, with the current one: homes dealt again, replicas of the
hottest experts, and replicas in rings that connect all ranks."""

from collections.abc import Iterator

import numpy as np

from ...placement import EMPTY
from ...utils.jit import jit
from ..parameters import PARAMETERS
from .align import names_of
from .layer import FloatArray, IntArray, Layer


def starts(layer: Layer, load_E: FloatArray) -> Iterator[IntArray]:
    """Yield placements to search from, int64 ``[P]``. ``load_E`` is the scenarios' mean, the even rank load being 1."""
    now_P, homes, per_rank, ranks = layer.now_P, layer.homes, layer.per_rank, layer.virtual_R.size
    replicas = per_rank - homes
    distance_K = ring_distances(ranks, replicas)
    nowhere_EN, rank_N = np.zeros_like(layer.source_EN), np.arange(layer.home_E.size) // homes
    dealt = [(0, False, slack, nowhere_EN) for slack in PARAMETERS.home_slacks]
    if replicas:
        hottest_N = sorted({0, ranks * replicas // 2, ranks * replicas})
        dealt = [(hottest, keep, -1.0, nowhere_EN) for hottest in hottest_N for keep in (True, False)]
    if layer.crossing_price > 0.0:
        near_EN = ranks * layer.crossing_price * (1.0 - layer.source_EN)
        dealt += [(hottest, False, 0.0, near_EN) for hottest in sorted({0, ranks * replicas})]
    for hottest, keep, slack, far_EN in dealt:
        slots_P = deal(layer, load_E, hottest, keep, slack, far_EN)
        add_rings(load_E, homes, per_rank, distance_K, slots_P)
        if slack < 0.0 and not keep:  # ranks are alike: named so that many homes stay
            slot_RS = slots_P.reshape(ranks, per_rank)
            name_R = names_of(rank_N, layer.home_E[slot_RS[:, :homes].ravel()], ranks)
            slots_P = slot_RS[name_R.argsort()].ravel()
        yield slots_P
    if replicas and (now_P.reshape(ranks, per_rank)[:, homes:] == EMPTY).any():
        slots_P = now_P.copy()
        add_rings(load_E, homes, per_rank, distance_K, slots_P)
        yield slots_P


def ring_distances(ranks: int, replicas: int) -> IntArray:
    """Return int64 ``[K]``: replica slot k of rank r takes an expert of rank r - distance[k], modulo ranks. As in
    LPLB's graphs, few hops connect all ranks."""
    distances = list(dict.fromkeys(one % ranks for one in (1, ranks // 4 + 1, 5, 7, *range(2, ranks)) if one % ranks))
    return np.resize(np.array(distances or [0], dtype=np.int64), replicas)


@jit
def deal(layer: Layer, load_E: FloatArray, hottest: int, keep: bool, slack: float, far_EN: FloatArray) -> IntArray:
    """Return slots int64 ``[P]``. Homes and replicas are dealt out heaviest first, each to the rank with least load.

    Args:
        hottest: how many replica slots the hottest experts get; the others stay empty.
        keep: homes stay where they are.
        slack: an expert keeps its home rank while that is heavier than the lightest by no more; below 0: none does.
        far_EN: what a rank of a node counts as heavier for an expert, per token: it is far from the expert's sources.
    """
    now_P, homes, per_rank = layer.now_P, layer.homes, layer.per_rank
    experts, ranks = load_E.size, now_P.size // per_rank
    nodes, per_node = far_EN.shape[1], ranks // far_EN.shape[1]
    slot_P = np.full(now_P.size, EMPTY, dtype=np.int64)
    home_E, count_E, each_E = layer.home_E.copy(), np.ones(experts, dtype=np.int64), load_E.copy()
    for _ in range(hottest):  # the hottest share gets one replica more
        expert = int(np.argmax(each_E))
        count_E[expert] += 1
        each_E[expert] = load_E[expert] / count_E[expert] if count_E[expert] < ranks else 0.0
    for expert in range(experts):
        each_E[expert] = load_E[expert] / count_E[expert]
    load_R = np.zeros(ranks)
    homes_R, replicas_R = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    if keep:
        for slot in range(now_P.size):
            slot_P[slot] = now_P[slot] if slot % per_rank < homes else EMPTY
        for expert in range(experts):
            load_R[home_E[expert]] += each_E[expert]
    home_N, replica_N = np.zeros(nodes), np.zeros(nodes)  # of each node's ranks with room none is lighter
    for expert in np.argsort(-each_E, kind="mergesort"):
        if not keep:
            best, least = -1, np.inf
            for node in range(nodes):
                far = each_E[expert] * far_EN[expert, node]
                if home_N[node] + far >= least:
                    continue
                home_N[node] = np.inf
                for rank in range(node * per_node, (node + 1) * per_node):
                    if homes_R[rank] < homes:
                        home_N[node] = min(home_N[node], load_R[rank])
                        if load_R[rank] + far < least:
                            best, least = rank, load_R[rank] + far
            now = home_E[expert]
            far = each_E[expert] * far_EN[expert, now // per_node]
            if homes_R[now] < homes and load_R[now] + far <= least + slack:
                best = now
            slot_P[best * per_rank + homes_R[best]] = expert
            home_E[expert] = best
            homes_R[best] += 1
            load_R[best] += each_E[expert]
        for _ in range(count_E[expert] - 1):
            best, least = -1, np.inf
            for node in range(nodes):
                if replica_N[node] >= least:
                    continue
                replica_N[node] = np.inf
                for rank in range(node * per_node, (node + 1) * per_node):
                    if replicas_R[rank] == per_rank - homes:
                        continue
                    replica_N[node] = min(replica_N[node], load_R[rank])
                    if load_R[rank] < least and expert not in slot_P[rank * per_rank : (rank + 1) * per_rank]:
                        best, least = rank, load_R[rank]
            if best < 0:
                break
            slot_P[best * per_rank + homes + replicas_R[best]] = expert
            replicas_R[best] += 1
            load_R[best] += each_E[expert]
    return slot_P


@jit
def add_rings(load_E: FloatArray, homes: int, per_rank: int, distance_K: IntArray, slot_P: IntArray) -> None:
    """Fill empty replica slots of ``slot_P`` in place. Each gets, of the homes on the rank at the slot's distance, the
    one with most load a replica that its rank does not have; it stays empty if there is none."""
    ranks, count_E = slot_P.size // per_rank, np.ones(load_E.size)
    for slot in range(slot_P.size):
        if slot % per_rank >= homes and slot_P[slot] != EMPTY:
            count_E[slot_P[slot]] += 1.0
    for number in range(distance_K.size):
        for rank in range(ranks):
            slot, source = rank * per_rank + homes + number, (rank - distance_K[number]) % ranks
            if slot_P[slot] != EMPTY or source == rank:
                continue
            first, best, most = rank * per_rank, -1, 0.0
            for expert in slot_P[source * per_rank : source * per_rank + homes]:
                each = load_E[expert] / count_E[expert]
                if each > most and expert not in slot_P[first : first + per_rank]:
                    best, most = expert, each
            if best >= 0:
                slot_P[slot] = best
                count_E[best] += 1.0
