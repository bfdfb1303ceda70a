"""Where the rows of one batch have gone, as dispatchers over carriers keep it (`carried.py`). No communication here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..experts.compute import SlotCounts
from . import permute
from .carrier import Arrival


@dataclass(frozen=True, eq=False)
class Route:
    """Where the rows of one batch have gone; holds no value of it.

    Args:
        ticket: the carrier's.
        counts_S: rows by slot.
        from_M: int64, for each row by slot the one of those that arrived which it is.
        choice_M: int64, and which of its choices, counted over all that arrived.
        place_UK: int64, for each choice that arrived the place of its row by slot; -1 where it has none here.
        choices: K of this rank's tokens.
    """

    ticket: Any
    counts_S: SlotCounts
    from_M: Tensor
    choice_M: Tensor
    place_UK: Tensor
    choices: int

    @classmethod
    def of(cls, arrival: Arrival, choices: int, slots: int) -> Route:
        """Rows by slot, those of a slot as they have arrived: by source rank and position there.

        Where only the device knows how many they are, each choice that may have arrived has a row, and those that have
        not come last.

        Args:
            choices: K of this rank's tokens.
            slots: S.
        """
        slots_N = arrival.slots_UK.reshape(-1)
        here_N = slots_N >= 0
        order_N = torch.argsort(torch.where(here_N, slots_N, 1 << 30), stable=True)
        if arrival.counts is not None:
            choice_M, counts_S = order_N[: sum(arrival.counts)], SlotCounts.of(arrival.counts, slots_N.device)
        else:
            many_S = permute.count(torch.where(here_N, slots_N, slots), slots + 1)[:slots]
            choice_M, counts_S = order_N, SlotCounts(many_S.cumsum(0, dtype=torch.int32), None, spare=True)
        place_N = torch.where(here_N, permute.inverse(order_N), -1)
        return cls(
            arrival.ticket,
            counts_S,
            choice_M // arrival.slots_UK.shape[1],
            choice_M,
            place_N.view(arrival.slots_UK.shape),
            choices,
        )
