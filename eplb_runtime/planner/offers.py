"""What parts of a plan would bring: from no move to all of them, the layers with most to gain for their bytes first.

A plan need not be taken whole. Layers gain by themselves, so their gains add up; the busiest rank is that of all of
them together, so what they cost does not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .cost import HYSTERESIS, CostModel
from .types import MOVE_DESTINATION_SLOT, MOVE_LAYER, MOVE_SOURCE_RANK, Offer, PlanRequest

MOST_OFFERS = 12


class LayerPrefixes:
    """The first layers of a plan, for every number of them.

    Attributes:
        layers: int64 ``[M]``, those that move, most to gain for their bytes first.
        slots: int64 ``[M + 1]``, moved slots of the first 0, 1, ... M of them.
        saved, spent: float64 ``[M + 1]``, seconds; nan where unknown.
    """

    def __init__(
        self,
        request: PlanRequest,
        moves: NDArray[np.int32],
        gain_L: NDArray[np.float64],
        cost: CostModel | None,
    ) -> None:
        """Put the layers that move in order.

        Args:
            moves: as in ``Plan.moves``.
            gain_L: float64 ``[L]``, by how much each layer's imbalance falls, with what crossing nodes is worth.
        """
        layers = request.num_layers
        self.layers = np.unique(moves[:, MOVE_LAYER]).astype(np.int64)
        travels = moves[:, MOVE_SOURCE_RANK] != moves[:, MOVE_DESTINATION_SLOT] // request.slots_per_rank
        slots_L = np.bincount(moves[travels, MOVE_LAYER], minlength=layers)
        price_L, links_LN = slots_L.astype(np.float64), np.zeros((layers, 2 * request.topology.num_ranks))
        if cost is not None and (cost.home_bytes or cost.replica_bytes):
            links_LN = cost.seconds_by_layer(moves, layers, request.topology, request.slots_per_rank)
            price_L = links_LN.max(axis=1)
        gains, prices = gain_L[self.layers], price_L[self.layers]
        # What is free comes first, by gain; what loses comes last.
        worth = np.divide(gains, prices, out=np.where(gains > 0, np.inf, -np.inf), where=prices > 0)
        self.layers = self.layers[np.lexsort((-gains, -worth))]
        self.slots = np.concatenate([[0], slots_L[self.layers].cumsum()])
        self.saved = np.full(len(self.slots), np.nan)
        self.spent = self.saved.copy()
        if cost is not None and cost.step_seconds > 0:
            gain = np.concatenate([[0.0], gain_L[self.layers].cumsum()])
            self.saved = gain * cost.seconds_per_imbalance(layers, request.trust)
            busiest = links_LN[self.layers].cumsum(axis=0).max(axis=1, initial=0.0)
            self.spent = np.concatenate([[0.0], busiest + cost.stall_seconds])

    @property
    def best(self) -> int:
        """The number of layers with which most seconds are left, each that is spent counted `HYSTERESIS` times."""
        return int((self.saved - HYSTERESIS * self.spent).argmax())

    def offers(self, before_L: NDArray[np.float64], after_L: NDArray[np.float64], taken: int) -> tuple[Offer, ...]:
        """At most `MOST_OFFERS`, at even distances, and what is taken; the first is to stay, the last the whole plan.

        Args:
            before_L, after_L: float64 ``[L]``, imbalance of the current placement and of the plan's.
            taken: number of layers.
        """
        falls = np.concatenate([[0.0], (before_L - after_L)[self.layers].cumsum()]) / len(before_L)
        ends = {*np.linspace(0, len(self.layers), MOST_OFFERS - 1).round().astype(int).tolist(), taken}
        return tuple(
            Offer(
                layers=tuple(sorted(self.layers[:end].tolist())),
                moved_slots=int(self.slots[end]),
                imbalance=float(before_L.mean() - falls[end]),
                seconds_saved=float(self.saved[end]),
                seconds_spent=float(self.spent[end]),
            )
            for end in sorted(ends)
        )
