"""Who sends to which copy: quotas of copies shared out over the source ranks, near before far. Numba, on counts.

How much each copy gets is decided before (``water_filling``); here nothing about the balance changes, only the way the
tokens travel.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .tables import SplitTables
from .water_filling import SWEEPS, Mode, split_totals


def split_counts(
    counts_RE: NDArray[np.integer],
    tables: SplitTables,
    layer: int,
    *,
    ranks_per_node: int,
    mode: Mode = "water_filling",
    sweeps: int = SWEEPS,
    warm_EC: NDArray[np.int64] | None = None,
    locality: bool = True,
) -> NDArray[np.int64]:
    """Tokens that each source rank sends to each copy of each expert, for one layer and batch.

    Args:
        counts_RE: integer ``[R, E]``, tokens of each source rank for each expert.
        ranks_per_node: consecutive ranks that share a node.
        mode, sweeps: as ``split_totals``; ``warm_EC`` an earlier ``[E, C]`` result of it.
        locality: serve copies on the source's own rank first, then on its node; otherwise in order of ranks alone.

    Returns:
        int64 ``[R, E, C]``; sums over C are ``counts_RE`` exactly, sums over R are the copies' quotas.
    """
    counts: NDArray[np.int64] = np.ascontiguousarray(counts_RE, dtype=np.int64)
    warm_LEC = None if warm_EC is None else warm_EC[None]
    quota_LEC = split_totals(
        counts.sum(axis=0)[None],
        tables,
        mode=mode,
        sweeps=sweeps,
        warm_LEC=warm_LEC,
        layers=slice(layer, layer + 1),
    )
    sent_REC = np.zeros((tables.num_ranks, *quota_LEC.shape[1:]), dtype=np.int64)
    sent_REC[:, :, 0] = counts
    _share_out(
        counts,
        tables.order_LN[layer],
        tables.ranks_LNC[layer],
        tables.count_LN[layer],
        quota_LEC[0],
        ranks_per_node,
        locality,
        sent_REC,
    )
    return sent_REC


@njit(nogil=True, cache=True, error_model="numpy")
def _share_out(
    counts_RE: NDArray[np.int64],
    order_N: NDArray[np.int32],
    ranks_NC: NDArray[np.int32],
    count_N: NDArray[np.int32],
    quota_EC: NDArray[np.int64],
    ranks_per_node: int,
    locality: bool,
    sent_REC: NDArray[np.int64],
) -> None:
    """Own rank; then each node by itself, sources in order against copies in order; then everybody likewise."""
    num_ranks = counts_RE.shape[0]
    left_R = np.empty(num_ranks, dtype=np.int64)
    room_C = np.empty(quota_EC.shape[1], dtype=np.int64)
    for index in range(order_N.size):
        copies, expert = count_N[index], order_N[index]
        if copies < 2:
            continue
        for rank in range(num_ranks):
            left_R[rank] = counts_RE[rank, expert]
            sent_REC[rank, expert, 0] = 0
        for copy in range(copies):
            room_C[copy] = quota_EC[expert, copy]
        if locality:
            for copy in range(copies):
                rank = ranks_NC[index, copy]
                tokens = min(left_R[rank], room_C[copy])
                sent_REC[rank, expert, copy] += tokens
                left_R[rank] -= tokens
                room_C[copy] -= tokens
            for copy in range(copies):
                node = ranks_NC[index, copy] // ranks_per_node
                for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node):
                    tokens = min(left_R[rank], room_C[copy])
                    sent_REC[rank, expert, copy] += tokens
                    left_R[rank] -= tokens
                    room_C[copy] -= tokens
        copy = 0
        for rank in range(num_ranks):
            while left_R[rank] > 0:
                tokens = min(left_R[rank], room_C[copy])
                sent_REC[rank, expert, copy] += tokens
                left_R[rank] -= tokens
                room_C[copy] -= tokens
                if room_C[copy] == 0:
                    copy += 1
