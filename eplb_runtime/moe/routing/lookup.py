"""From logical expert ids to physical slots when every expert has one copy: a table lookup, changed in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...placement import Placement


def record_use(*tensors: Tensor) -> None:
    """Keep memory that another thread's stream has made until this thread's stream has read it."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class SlotTable:
    """int64 ``[L, E]`` on the device: the home slot of each logical expert, under the active placement.

    Attributes:
        epoch: of that placement.
        changes_L: int64, on the host: how often each layer's has changed.
    """

    def __init__(self, placement: Placement, device: torch.device) -> None:
        layers, experts = placement.num_layers, placement.num_experts
        # Both maps in one piece: a commit copies both to the device at once.
        self._both_L2E = torch.empty(layers, 2 * experts, dtype=torch.int64, device=device)
        self.epoch = placement.epoch
        self.changes_L = np.zeros(layers, dtype=np.int64)
        self._home_LE = self._both_L2E[:, :experts]
        self._logical_LRH = self._both_L2E[:, experts:].unflatten(1, (placement.num_ranks, placement.homes_per_rank))
        self.prepare(placement, range(placement.num_layers))()

    def prepare(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Return what takes over a placement that differs in these layers, in place, and needs no more memory."""
        rows = np.asarray(layers, dtype=np.int64)
        homes = placement.homes_LRH[rows].reshape(len(rows), -1)
        new = torch.from_numpy(np.concatenate([placement.require_homes()[rows], homes], axis=1, dtype=np.int64))
        device = self._both_L2E.device
        new, index = new.to(device), torch.from_numpy(rows).to(device)

        def take_over() -> None:
            record_use(new, index)
            self._both_L2E.index_copy_(0, index, new)
            self.epoch = placement.epoch
            self.changes_L[rows] += 1

        return take_over

    def slots(self, layer: int, topk_ids_TK: Tensor) -> Tensor:
        """Physical slot of each choice, int64 ``[T, K]``."""
        # Plain indexing would take -1 for the last expert without a word.
        return self.home_of_experts(layer).index_select(0, topk_ids_TK.reshape(-1)).view(topk_ids_TK.shape)

    def home_of_experts(self, layer: int) -> Tensor:
        """int64 ``[E]``: the slot of each expert's home; the memory stays."""
        return self._home_LE[layer]

    def require_known(self, layer: int, topk_ids_TK: Tensor) -> None:
        """Refuse ids of no expert where a look at them costs no wait. (A device ends the job by its own assertion.)"""
        if topk_ids_TK.device.type != "cpu" or not topk_ids_TK.numel():
            return
        ids_TK = topk_ids_TK.detach().numpy()
        lowest, highest = ids_TK.min(), ids_TK.max()
        experts = self._home_LE.shape[1]
        if lowest < 0 or highest >= experts:
            raise ValueError(
                f"MoE layer {layer} was given expert ids from {lowest} to {highest}, and its experts are 0 to "
                f"{experts - 1}: a choice that is none (-1 for padding) takes any expert and a router weight of 0"
            )

    def logical_of_slots(self, layer: int) -> Tensor:
        """int64 ``[E]``: the logical expert in each slot, in the order of the slots; the memory stays."""
        return self._logical_LRH[layer].flatten()

    def logical_of_rows(self, rank: int) -> Tensor:
        """int64 ``[L, E/R]``: the logical expert in each home slot of an EP rank."""
        return self._logical_LRH[:, rank]
