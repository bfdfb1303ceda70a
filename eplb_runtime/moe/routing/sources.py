"""Who sends to which copy: quotas of copies shared out over the source ranks, near before far. Numba, on counts.

How much each copy gets is decided before (``water_filling``); here nothing about the balance changes, only the way the
tokens travel. Nothing of torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...utils.jit import jit
from .tables import SplitTables
from .water_filling import Mode, split_totals


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Rows that this rank sends to each slot, and that each rank sends to its slots; int64, on the host."""

    sent_P: NDArray[np.int64]
    received_RS: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SplitSettings:
    """How batches are split, equal on all ranks.

    Args:
        ranks_per_node: consecutive ranks that share a node.
        least_tokens: below so many (token, choice) pairs over all ranks everything stays at home.
        speed_R: float64 ``[R]``, how fast each rank is, the fastest 1; None: all alike.
    """

    ranks_per_node: int
    least_tokens: int = 0
    speed_R: NDArray[np.float64] | None = None


def split_for_rank(
    counts_RE: NDArray[np.integer],
    tables: SplitTables,
    layer: int,
    rank: int,
    settings: SplitSettings,
) -> tuple[NDArray[np.int64], RowCounts]:
    """Return int64 ``[E, C]``, tokens that ``rank`` sends to each copy of one layer's batch, and how many rows go
    where. A token is served on its own rank or node where the quotas allow."""
    counts: NDArray[np.int64] = np.ascontiguousarray(counts_RE, dtype=np.int64)
    here, totals_LE = slice(layer, layer + 1), counts.sum(axis=0)[None]
    mode: Mode = "home" if counts.sum() < settings.least_tokens else "water_filling"
    quota_LEC = split_totals(totals_LE, tables, mode=mode, layers=here, speed_R=settings.speed_R)
    sent_EC = np.zeros(quota_LEC.shape[1:], dtype=np.int64)
    sent_P = np.zeros(tables.num_ranks * tables.slots_per_rank, dtype=np.int64)
    received_RS = np.zeros((tables.num_ranks, tables.slots_per_rank), dtype=np.int64)
    _share_out(
        counts,
        tables.copy_slot_LEC[layer],
        quota_LEC[0],
        rank,
        settings.ranks_per_node,
        sent_EC,
        sent_P,
        received_RS,
    )
    return sent_EC, RowCounts(sent_P, received_RS)


@jit(error_model="numpy")
def _share_out(
    counts_RE: NDArray[np.int64],
    copy_slot_EC: NDArray[np.int32],
    quota_EC: NDArray[np.int64],
    me: int,
    ranks_per_node: int,
    sent_EC: NDArray[np.int64],
    sent_P: NDArray[np.int64],
    received_RS: NDArray[np.int64],
) -> None:
    """Own rank; then each node by itself, sources in order against copies in order; then everybody likewise."""
    num_ranks, slots_per_rank = received_RS.shape
    left_R, room_C = np.empty(num_ranks, dtype=np.int64), np.empty(quota_EC.shape[1], dtype=np.int64)
    sent_CR = np.empty((quota_EC.shape[1], num_ranks), dtype=np.int64)
    for expert in range(copy_slot_EC.shape[0]):
        copies = 1
        while copies < copy_slot_EC.shape[1] and copy_slot_EC[expert, copies] >= 0:
            copies += 1
        if copies > 1:
            for rank in range(num_ranks):
                left_R[rank] = counts_RE[rank, expert]
            for copy in range(copies):
                room_C[copy] = quota_EC[expert, copy]
                sent_CR[copy] = 0
            for reach in range(3):
                width = 1 if reach == 0 else ranks_per_node if reach == 1 else num_ranks
                for copy in range(copies):
                    first = copy_slot_EC[expert, copy] // slots_per_rank // width * width
                    for rank in range(first, first + width):
                        if room_C[copy] == 0:
                            break
                        tokens = min(left_R[rank], room_C[copy])
                        sent_CR[copy, rank] += tokens
                        left_R[rank] -= tokens
                        room_C[copy] -= tokens
        for copy in range(copies):
            slot = copy_slot_EC[expert, copy]
            here = slot // slots_per_rank == me
            if copies == 1:
                for rank in range(num_ranks) if here else range(me, me + 1):
                    sent_CR[0, rank] = counts_RE[rank, expert]
            sent_EC[expert, copy] = sent_P[slot] = sent_CR[copy, me]
            if here:
                for rank in range(num_ranks):
                    received_RS[rank, slot % slots_per_rank] = sent_CR[copy, rank]
