"""The fast clock: split one batch's tokens over the copies of their experts, the same way on every rank.

Pure arithmetic on the counts that all ranks gathered - a function of the placement and these counts alone, so that
every rank comes to the same split. Where the dispatcher needs sizes on the host, numba splits there, and the device
only deals its choices out by the result; where it does not, the device does all of it. No torch.distributed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...placement import Placement
from . import sources
from .lookup import record_use
from .tables import SplitTables
from .water_filling import Mode


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Rows that this rank sends to each slot, and that each rank sends to its slots; int64, on the host."""

    sent_P: NDArray[np.int64]
    received_RS: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Layer:
    """What stands where in one layer.

    Args:
        tables: of the layers that changed together; this one is number ``index`` there.
        copy_slot_EC: int64 ``[E, C]`` on the device: the slots of each expert's copies.
        slot_P: int64 ``[3, P]``: its expert, which copy of it stands there, whether it is listed (1 or 0).
        several: whether any expert has more than one copy.
    """

    tables: SplitTables
    index: int
    copy_slot_EC: Tensor
    slot_P: NDArray[np.int64]
    several: bool


@dataclass(frozen=True, eq=False)
class SplitSettings:
    """How batches are split, equal on all ranks.

    Args:
        ranks_per_node: consecutive ranks that share a node.
        mode: ``"water_filling"`` or ``"even"``.
        locality: serve a token on its own rank or node where the quotas allow.
        least_tokens: below so many (token, choice) pairs over all ranks everything stays at home.
        speed_R: float64 ``[R]``, how fast each rank is, the fastest 1; None: all alike.
    """

    ranks_per_node: int
    mode: Mode = "water_filling"
    locality: bool = True
    least_tokens: int = 0
    speed_R: NDArray[np.float64] | None = None


class BatchSplitter:
    """Splits batches under one placement; `follow` takes over the next one. ``count`` and ``deal`` are kernels with the
    results of `count_choices` and `deal_out`."""

    def __init__(
        self,
        placement: Placement,
        device: torch.device,
        ep_rank: int,
        settings: SplitSettings,
        *,
        count: Callable[[Tensor, int], Counted] | None = None,
        deal: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None,
    ) -> None:
        self._device = device
        self._count = count or count_choices
        self._deal = deal or deal_out
        self._ep_rank = ep_rank
        self._settings = settings
        self._num_experts = placement.num_experts
        self._layers: dict[int, _Layer] = {}
        self.follow(placement)

    def follow(self, placement: Placement) -> None:
        """Take over a placement."""
        self.prepare(placement, range(placement.num_layers))()

    def prepare(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Return what takes over a placement that differs in these layers and needs no more memory."""
        changed = list(layers)
        home = None if placement.home is None else placement.home[changed]
        part = Placement(placement.physical_to_logical[changed], placement.num_experts, placement.num_ranks, home)
        tables = SplitTables.of(part)
        slots_LEC = torch.from_numpy(tables.copy_slot_LEC.astype(np.int64)).to(self._device)
        new = {}
        for index, layer in enumerate(changed):
            several = bool(part.copy_count[index].max() > 1)
            slot_P = _copies_of_slots(part, tables, index)
            new[layer] = _Layer(tables, index, slots_LEC[index], slot_P, several)

        def take_over() -> None:
            record_use(slots_LEC)
            self._layers.update(new)

        return take_over

    def splits(self, layer: int) -> bool:
        """Whether any expert of the layer has copies; if not, every token goes home."""
        return self._layers[layer].several

    def counts(self, topk_ids_TK: Tensor) -> Counted:
        """This rank's choices of each expert, padding included: what will really travel."""
        return self._count(topk_ids_TK, self._num_experts)

    def route(
        self, layer: int, topk_ids_TK: Tensor, counts_RE: NDArray[np.int64], begins: Tensor | None = None
    ) -> tuple[Tensor, RowCounts]:
        """Return int64 ``[T, K]``, the slot of each choice of a batch, an expert's choices to its copies in the order
        of the tokens, and how many rows go where. ``counts_RE`` are of every rank, on the host. No host sync."""
        sent_EC, received_RS = self._split(layer, counts_RE)
        expert_P, copy_P, listed_P = self._layers[layer].slot_P
        sent = torch.from_numpy(sent_EC).to(topk_ids_TK.device, non_blocking=True)
        slots_TK = self._deal(topk_ids_TK, sent, self._layers[layer].copy_slot_EC, begins)
        return slots_TK, RowCounts(sent_EC[expert_P, copy_P] * listed_P, received_RS)

    def _split(self, layer: int, counts_RE: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """int64 ``[E, C]``, what this rank sends to each copy; ``[R, S]``, what each sends to this rank's slots."""
        here = self._layers[layer]
        if counts_RE.sum() < self._settings.least_tokens:
            return self._all_at_home(here, counts_RE)
        return sources.split_for_rank(
            counts_RE,
            here.tables,
            here.index,
            self._ep_rank,
            ranks_per_node=self._settings.ranks_per_node,
            mode=self._settings.mode,
            locality=self._settings.locality,
            speed_R=self._settings.speed_R,
        )

    def _all_at_home(self, here: _Layer, counts_RE: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        slots = here.tables.slots_per_rank
        expert_S, copy_S, listed_S = here.slot_P[:, self._ep_rank * slots : (self._ep_rank + 1) * slots]
        sent_EC = np.zeros(here.tables.copy_slot_LEC.shape[1:], dtype=np.int64)
        sent_EC[:, 0] = counts_RE[self._ep_rank]
        return sent_EC, counts_RE[:, expert_S] * (listed_S * (copy_S == 0))


Counted = tuple[Tensor, Tensor | None]
"""int64 ``[E]``, how often each expert is chosen; and what whoever deals out need not find out again."""


def count_choices(topk_ids_TK: Tensor, num_experts: int) -> Counted:
    """Count a batch's choices of each expert. No host sync."""
    ids_N = topk_ids_TK.reshape(-1)
    return ids_N.new_zeros(num_experts).scatter_add_(0, ids_N, torch.ones_like(ids_N)), None


def deal_out(topk_ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor, begins: Tensor | None = None) -> Tensor:
    """Return int64 ``[T, K]``, the slot of each choice: the first ``sent_EC[e, 0]`` choices of an expert, in order, go
    to its first copy, the next ``sent_EC[e, 1]`` to its second. ``begins`` is for kernels."""
    ids = topk_ids_TK.reshape(-1)
    by_expert = torch.repeat_interleave(copy_slot_EC.reshape(-1), sent_EC.reshape(-1), output_size=ids.shape[0])
    order = torch.argsort(ids, stable=True)
    return torch.empty_like(by_expert).index_copy_(0, order, by_expert).view(topk_ids_TK.shape)


def _copies_of_slots(placement: Placement, tables: SplitTables, layer: int) -> NDArray[np.int64]:
    """int64 ``[3, P]``, for each slot: its expert, which copy of it stands there, and whether it is listed (1 or 0)."""
    expert_P = placement.physical_to_logical[layer].astype(np.int64)
    copy_P, listed_P = np.zeros_like(expert_P), np.zeros_like(expert_P)
    slot_EC = tables.copy_slot_LEC[layer]
    experts, copies = np.nonzero(slot_EC >= 0)
    copy_P[slot_EC[experts, copies]] = copies
    listed_P[slot_EC[experts, copies]] = 1
    return np.stack([np.maximum(expert_P, 0), copy_P, listed_P])
