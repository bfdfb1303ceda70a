"""Where copies get their weights from, so that those of an expert cross to a node once. No messages here."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..placement import EMPTY


def nearest_sources(home_RK: NDArray[np.int64], slots_per_rank: int, ranks_per_node: int) -> NDArray[np.int64]:
    """Which rank hands each copy its weights.

    Args:
        home_RK: int ``[R, k]``, the home slot of the expert that each replica slot holds, `EMPTY` where it holds none.
        slots_per_rank: S.
        ranks_per_node: consecutive ranks that share a node.

    Returns:
        int64 ``[R, k]``: the home's rank where it is on the copy's node, or where no lower rank of this node has a
        copy; else the lowest that has. `EMPTY` where there is no copy.
    """
    ranks, replicas = home_RK.shape
    home_N = home_RK.ravel().astype(np.int64)
    rank_N = np.repeat(np.arange(ranks), replicas)
    node_N, home_rank_N = rank_N // ranks_per_node, home_N // slots_per_rank
    of_node_N = node_N * (int(home_N.max(initial=0)) + 2) + home_N
    # The first of each is on the lowest rank.
    _, first_G, group_N = np.unique(of_node_N, return_index=True, return_inverse=True)
    lowest_N = rank_N[first_G[group_N]]
    from_home_N = (home_rank_N // ranks_per_node == node_N) | (lowest_N == rank_N)
    source_N = np.where(from_home_N, home_rank_N, lowest_N)
    return np.where(home_N == EMPTY, EMPTY, source_N).reshape(home_RK.shape)
