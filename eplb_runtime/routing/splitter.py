"""The fast clock: split one batch's tokens over the copies of their experts, the same way on every rank.

Pure arithmetic on the counts that all ranks gathered - a function of the placement and these counts alone, so that
activation recompute repeats it exactly. Numba where the counts are on the CPU, torch on the device else; both give the
same integers. No torch.distributed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..placement import Placement
from . import sources
from .tables import SplitTables
from .water_filling import Mode
from .water_filling_torch import DeviceTables, assign_slots, split_counts


@dataclass(frozen=True, eq=False)
class BatchRoute:
    """Where one batch goes.

    Args:
        slots_TK: int64, the physical slot of each choice.
        sent_P: int64 ``[P]``, rows that this rank sends to each slot.
        received_P: int64 ``[R * S]``, rows that each rank sends to this rank's slots.
    """

    slots_TK: Tensor
    sent_P: Tensor
    received_P: Tensor


class BatchSplitter:
    """Splits batches under one placement; `follow` takes over the next one.

    Args:
        ep_rank: this rank.
        ranks_per_node: consecutive ranks that share a node.
        mode: ``"water_filling"`` or ``"even"``.
        locality: serve a token on its own rank or node where the quotas allow.
        least_tokens: below so many (token, choice) pairs over all ranks everything stays at home.

    Attributes:
        at_home: while True, no batch is split.
    """

    def __init__(
        self,
        placement: Placement,
        device: torch.device,
        *,
        ep_rank: int,
        ranks_per_node: int,
        mode: Mode,
        locality: bool,
        least_tokens: int,
    ) -> None:
        self._device = device
        self._ep_rank = ep_rank
        self._ranks_per_node = ranks_per_node
        self._mode: Mode = mode
        self._locality = locality
        self._least_tokens = least_tokens
        self.at_home = False
        self.follow(placement)

    def follow(self, placement: Placement) -> None:
        """Take over a committed placement."""
        self._num_experts = placement.num_experts
        self._tables = SplitTables.of(placement)
        self._device_tables = DeviceTables.of(placement, self._device)
        self._split_layers = [int(most) > 1 for most in placement.copy_count.max(axis=1)]
        slots = placement.slots_per_rank
        mine = slice(self._ep_rank * slots, (self._ep_rank + 1) * slots)
        self._of_slot = [
            _copies_of_slots(placement, self._tables, layer).to(self._device) for layer in range(placement.num_layers)
        ]
        self._of_mine = [of_slot[:, mine] for of_slot in self._of_slot]

    def splits(self, layer: int) -> bool:
        """Whether any expert of the layer has copies; if not, every token goes home."""
        return self._split_layers[layer] and not self.at_home

    def warm_up(self) -> None:
        """Compile what a batch needs, so that none has to wait for it."""
        ranks = self._tables.num_ranks
        counts_RE = np.ones((ranks, self._num_experts), dtype=np.int64)
        sources.split_for_rank(counts_RE, self._tables, 0, self._ep_rank, ranks_per_node=self._ranks_per_node)

    def counts(self, topk_ids_TK: Tensor) -> Tensor:
        """int64 ``[E]``: this rank's choices of each expert, padding included: what will really travel."""
        ids = topk_ids_TK.reshape(-1)
        return torch.zeros(self._num_experts, dtype=torch.int64, device=ids.device).scatter_add_(
            0, ids, torch.ones_like(ids)
        )

    def route(self, layer: int, topk_ids_TK: Tensor, counts_RE: Tensor) -> BatchRoute:
        """Slots and row counts of a batch.

        Args:
            topk_ids_TK: int64 ``[T, K]``, this rank's choices.
            counts_RE: int64 ``[R, E]``, ``counts`` of every rank.
        """
        sent_EC, received_RS = self._split(layer, counts_RE)
        slots_TK = assign_slots(topk_ids_TK, sent_EC, self._device_tables[layer].copy_slot_EC)
        expert_P, copy_P, listed_P = self._of_slot[layer]
        return BatchRoute(slots_TK, sent_EC[expert_P, copy_P] * listed_P, received_RS.reshape(-1))

    def _split(self, layer: int, counts_RE: Tensor) -> tuple[Tensor, Tensor]:
        """int64 ``[E, C]``, what this rank sends to each copy; ``[R, S]``, what each sends to this rank's slots."""
        on_cpu = counts_RE.device.type == "cpu"
        if on_cpu and counts_RE.sum() >= self._least_tokens:
            sent_EC, received_RS = sources.split_for_rank(
                counts_RE.numpy(),
                self._tables,
                layer,
                self._ep_rank,
                ranks_per_node=self._ranks_per_node,
                mode=self._mode,
                locality=self._locality,
            )
            return torch.from_numpy(sent_EC), torch.from_numpy(received_RS)
        tables = self._device_tables[layer]
        sent_REC = torch.zeros((len(counts_RE), *tables.copy_slot_EC.shape), dtype=torch.int64, device=counts_RE.device)
        sent_REC[:, :, 0] = counts_RE
        if not on_cpu:
            split_REC = split_counts(
                counts_RE, tables, ranks_per_node=self._ranks_per_node, mode=self._mode, locality=self._locality
            )
            sent_REC = torch.where(counts_RE.sum() < self._least_tokens, sent_REC, split_REC)
        expert_S, copy_S, listed_S = self._of_mine[layer]
        return sent_REC[self._ep_rank], sent_REC[:, expert_S, copy_S] * listed_S


def _copies_of_slots(placement: Placement, tables: SplitTables, layer: int) -> Tensor:
    """int64 ``[3, P]``, for each slot: its expert, which copy of it stands there, and whether it is listed (1 or 0)."""
    expert_P = placement.physical_to_logical[layer].astype(np.int64)
    copy_P, listed_P = np.zeros_like(expert_P), np.zeros_like(expert_P)
    slot_EC = tables.copy_slot_LEC[layer]
    experts, copies = np.nonzero(slot_EC >= 0)
    copy_P[slot_EC[experts, copies]] = copies
    listed_P[slot_EC[experts, copies]] = 1
    return torch.from_numpy(np.stack([np.maximum(expert_P, 0), copy_P, listed_P]))
