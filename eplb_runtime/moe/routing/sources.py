"""Who sends to which copy: quotas of copies shared out over the source ranks, near before far. Numba, on counts.

How much each copy gets is decided before (``water_filling``); here nothing about the balance changes, only the way the
tokens travel.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...utils.jit import jit
from .speeds import split_by_speed
from .tables import SplitTables
from .water_filling import Mode


def split_for_rank(
    counts_RE: NDArray[np.integer],
    tables: SplitTables,
    layer: int,
    rank: int,
    *,
    ranks_per_node: int,
    mode: Mode = "water_filling",
    locality: bool = True,
    speed_R: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return int64 ``[E, C]``, tokens that ``rank`` sends to each copy of one layer's batch, and int64 ``[R, S]``,
    tokens that each rank sends to its slots. ``locality``: serve copies on the source's own rank first, then on its
    node."""
    counts: NDArray[np.int64] = np.ascontiguousarray(counts_RE, dtype=np.int64)
    totals_LE = counts.sum(axis=0)[None]
    quota_LEC = split_by_speed(totals_LE, tables, speed_R, mode=mode, layers=slice(layer, layer + 1))
    sent_EC = np.zeros(quota_LEC.shape[1:], dtype=np.int64)
    received_RS = np.zeros((tables.num_ranks, tables.slots_per_rank), dtype=np.int64)
    _share_out(
        counts,
        tables.copy_slot_LEC[layer],
        tables.order_LN[layer],
        tables.ranks_LNC[layer],
        tables.count_LN[layer],
        quota_LEC[0],
        rank,
        ranks_per_node,
        locality,
        sent_EC,
        received_RS,
    )
    return sent_EC, received_RS


@jit(error_model="numpy")
def _share_out(
    counts_RE: NDArray[np.int64],
    copy_slot_EC: NDArray[np.int32],
    order_N: NDArray[np.int32],
    ranks_NC: NDArray[np.int32],
    count_N: NDArray[np.int32],
    quota_EC: NDArray[np.int64],
    me: int,
    ranks_per_node: int,
    locality: bool,
    sent_EC: NDArray[np.int64],
    received_RS: NDArray[np.int64],
) -> None:
    """Own rank; then each node by itself, sources in order against copies in order; then everybody likewise."""
    num_ranks, first_slot = counts_RE.shape[0], me * received_RS.shape[1]
    for expert in range(copy_slot_EC.shape[0]):
        sent_EC[expert, 0] = counts_RE[me, expert]
        slot = copy_slot_EC[expert, 0] - first_slot
        if 0 <= slot < received_RS.shape[1]:
            for rank in range(num_ranks):
                received_RS[rank, slot] = counts_RE[rank, expert]
    left_R = np.empty(num_ranks, dtype=np.int64)
    room_C = np.empty(quota_EC.shape[1], dtype=np.int64)
    sent_CR = np.empty((quota_EC.shape[1], num_ranks), dtype=np.int64)
    for index in range(order_N.size):
        copies, expert = count_N[index], order_N[index]
        if copies < 2:
            continue
        for rank in range(num_ranks):
            left_R[rank] = counts_RE[rank, expert]
        for copy in range(copies):
            room_C[copy] = quota_EC[expert, copy]
            sent_CR[copy] = 0
        if locality:
            for copy in range(copies):
                rank = ranks_NC[index, copy]
                tokens = min(left_R[rank], room_C[copy])
                sent_CR[copy, rank] = tokens
                left_R[rank] -= tokens
                room_C[copy] -= tokens
            for copy in range(copies):
                node = ranks_NC[index, copy] // ranks_per_node
                for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node):
                    tokens = min(left_R[rank], room_C[copy])
                    sent_CR[copy, rank] += tokens
                    left_R[rank] -= tokens
                    room_C[copy] -= tokens
        copy = 0
        for rank in range(num_ranks):
            while left_R[rank] > 0:
                tokens = min(left_R[rank], room_C[copy])
                sent_CR[copy, rank] += tokens
                left_R[rank] -= tokens
                room_C[copy] -= tokens
                if room_C[copy] == 0:
                    copy += 1
        for copy in range(copies):
            sent_EC[expert, copy] = sent_CR[copy, me]
            slot = copy_slot_EC[expert, copy] - first_slot
            if 0 <= slot < received_RS.shape[1]:
                for rank in range(num_ranks):
                    received_RS[rank, slot] = sent_CR[copy, rank]
