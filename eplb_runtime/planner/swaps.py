"""Best swaps of homes between the hottest rank and the others: the kernel under the ``incremental`` policy.

One layer at a time, numba, no Python objects.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(nogil=True, cache=True)
def swap_homes(
    load: NDArray[np.float64], home_rank: NDArray[np.int32], num_ranks: int, ranks_per_node: int, max_swaps: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Swap pairs of experts, each time the pair that lowers the hottest rank and its partner most.

    Stops when no swap with the hottest rank lowers the larger of the two. Ties: a partner in the same node, then the
    least expert ids.

    Args:
        load: float64 ``[E]``.
        home_rank: int32 ``[E]``; changed in place.
        max_swaps: at most so many.

    Returns:
        int32 ``[N, 2]``, the experts of each swap (the first left the hottest rank), and float64 ``[N + 1]``, the
        hottest rank's load before the first and after each swap.
    """
    experts = load.size
    rank_load = np.zeros(num_ranks)
    for expert in range(experts):
        rank_load[home_rank[expert]] += load[expert]
    swaps = np.empty((max_swaps, 2), dtype=np.int32)
    peak = np.empty(max_swaps + 1)
    peak[0] = rank_load.max()
    done = 0
    while done < max_swaps:
        hottest = int(np.argmax(rank_load))
        best, best_here, best_there, best_near = rank_load[hottest], -1, -1, False
        for here in range(experts):
            if home_rank[here] != hottest:
                continue
            for there in range(experts):
                rank = home_rank[there]
                shift = load[here] - load[there]
                if rank == hottest or shift <= 0.0:
                    continue
                reached = max(rank_load[hottest] - shift, rank_load[rank] + shift)
                near = rank // ranks_per_node == hottest // ranks_per_node
                if reached < best or (reached == best and best_here >= 0 and near and not best_near):
                    best, best_here, best_there, best_near = reached, here, there, near
        if best_here < 0:
            break
        shift = load[best_here] - load[best_there]
        partner = home_rank[best_there]
        home_rank[best_here], home_rank[best_there] = partner, hottest
        rank_load[hottest] -= shift
        rank_load[partner] += shift
        swaps[done, 0], swaps[done, 1] = best_here, best_there
        done += 1
        peak[done] = rank_load.max()
    return swaps[:done], peak[: done + 1]
