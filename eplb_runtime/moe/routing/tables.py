"""What a splitter must know of a placement, laid out once per placement so that each batch only does arithmetic.

Shape suffixes of this room: T tokens, K top-k, L layers, E logical experts, C copies of an expert (padded), R ranks,
N replicated experts (padded).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...placement import Placement
from ...utils.jit import jit


@dataclass(frozen=True, eq=False)
class SplitTables:
    """Copies of every expert by rank, and the order in which a sweep visits the replicated ones.

    Args:
        copy_slot_LEC: int32, the slot of each copy, home first, then ascending; padded with -1.
        first_rank_LE: int32, the rank of each expert's first copy.
        order_LN: int32, the experts with more than one copy, in the order of a sweep; padded with -1.
        ranks_LNC: int32, ``ranks_LNC[l, n]``: the ranks of the copies of expert ``order_LN[l, n]``; padded with -1.
        count_LN: int32, how many they are.
        num_ranks: R.
        slots_per_rank: S.
    """

    copy_slot_LEC: NDArray[np.int32]
    first_rank_LE: NDArray[np.int32]
    order_LN: NDArray[np.int32]
    ranks_LNC: NDArray[np.int32]
    count_LN: NDArray[np.int32]
    num_ranks: int
    slots_per_rank: int

    def of_layer(self, layer: int) -> SplitTables:
        """Return the tables of one layer, which share memory with these."""
        arrays = (name for name, value in vars(self).items() if isinstance(value, np.ndarray))
        return replace(self, **{name: getattr(self, name)[layer : layer + 1] for name in arrays})

    @cached_property
    def has_replicas(self) -> bool:
        """Return whether any expert has more than one copy."""
        return bool(self.count_LN.any())

    def sum_by_rank(self, quota_LEC: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 ``[L, R]``: tokens of each rank, of those of each copy."""
        rank_load_LR = np.zeros((len(quota_LEC), self.num_ranks), dtype=np.int64)
        _sum_by_rank(quota_LEC, self.copy_slot_LEC, self.slots_per_rank, rank_load_LR)
        return rank_load_LR

    @classmethod
    def of(cls, placement: Placement) -> SplitTables:
        """Lay out a placement with homes."""
        slot = np.asarray(placement.logical_to_physical)
        rank = placement.rank_of(slot).astype(np.int32)
        count = (slot >= 0).sum(axis=2).astype(np.int32)
        orders = [sweep_order(rank[layer], count[layer]) for layer in range(placement.num_layers)]
        width = max(1, max(map(len, orders)))
        order_LN = np.full((placement.num_layers, width), -1, dtype=np.int32)
        for layer, order in enumerate(orders):
            order_LN[layer, : len(order)] = order
        expert = np.maximum(order_LN, 0)
        layers = np.arange(placement.num_layers)[:, None]
        ranks_LNC = np.where(order_LN[:, :, None] < 0, -1, rank[layers, expert]).astype(np.int32)
        count_LN = np.where(order_LN < 0, 0, count[layers, expert]).astype(np.int32)
        first = np.ascontiguousarray(rank[:, :, 0])
        return cls(slot, first, order_LN, ranks_LNC, count_LN, placement.num_ranks, placement.slots_per_rank)


@jit
def _sum_by_rank(
    quota_LEC: NDArray[np.int64], slot_LEC: NDArray[np.int32], slots_per_rank: int, rank_load_LR: NDArray[np.int64]
) -> None:
    layers, experts, copies = slot_LEC.shape
    for layer in range(layers):
        for expert in range(experts):
            for copy in range(copies):
                slot = slot_LEC[layer, expert, copy]
                if slot < 0:
                    break
                rank_load_LR[layer, slot // slots_per_rank] += quota_LEC[layer, expert, copy]


def sweep_order(rank_EC: NDArray[np.int32], count_E: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the replicated experts by greedy coloring, where those of one color share no rank: each gets the least
    color that none of its ranks has."""
    several = np.flatnonzero(count_E > 1)
    replicated: NDArray[np.int32] = several[np.lexsort((several, -count_E[several]))].astype(np.int32)
    color_N, colors_R = [], [0] * (int(rank_EC.max(initial=0)) + 1)  # colors: a bit for each
    for ranks, count in zip(rank_EC[replicated].tolist(), count_E[replicated].tolist(), strict=True):
        taken = 0
        for rank in ranks[:count]:
            taken |= colors_R[rank]
        color = ~taken & (taken + 1)
        for rank in ranks[:count]:
            colors_R[rank] |= color
        color_N.append(color.bit_length())
    return replicated[np.argsort(np.array(color_N, dtype=np.int64), kind="stable")]
