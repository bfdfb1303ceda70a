"""From logical expert ids to physical slots when every expert has one copy: a table lookup, changed in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..placement import Placement


class SlotTable:
    """int64 ``[L, E]`` on the device: the home slot of each logical expert, under the active placement."""

    def __init__(self, placement: Placement, device: torch.device) -> None:
        self._home_LE = torch.empty(placement.num_layers, placement.num_experts, dtype=torch.int64, device=device)
        self.update(placement)

    def update(self, placement: Placement) -> None:
        """Take over a committed placement; the table keeps its memory."""
        if placement.home is None:
            raise ValueError("a slot table needs a placement in the home layout")
        self._home_LE.copy_(torch.from_numpy(placement.home.astype("int64")))

    def slots(self, layer: int, topk_ids_TK: Tensor) -> Tensor:
        """Physical slot of each choice, int64 ``[T, K]``."""
        return self._home_LE[layer][topk_ids_TK]
