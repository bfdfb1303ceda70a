"""From logical expert ids to physical slots when every expert has one copy: a table lookup, changed in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..placement import Placement


class SlotTable:
    """int64 ``[L, E]`` on the device: the home slot of each logical expert, under the active placement."""

    def __init__(self, placement: Placement, device: torch.device) -> None:
        self._home_LE = torch.empty(placement.num_layers, placement.num_experts, dtype=torch.int64, device=device)
        self._logical_LRH = torch.empty(
            placement.num_layers, placement.num_ranks, placement.homes_per_rank, dtype=torch.int64, device=device
        )
        self.update(placement)

    def update(self, placement: Placement) -> None:
        """Take over a committed placement; the table keeps its memory."""
        self._home_LE.copy_(torch.from_numpy(placement.require_homes().astype("int64")))
        self._logical_LRH.copy_(torch.from_numpy(placement.homes_LRH.astype("int64")))

    def slots(self, layer: int, topk_ids_TK: Tensor) -> Tensor:
        """Physical slot of each choice, int64 ``[T, K]``."""
        return self._home_LE[layer][topk_ids_TK]

    def logical_of_rows(self, rank: int) -> Tensor:
        """int64 ``[L, E/R]``: the logical expert in each home slot of an EP rank."""
        return self._logical_LRH[:, rank]
