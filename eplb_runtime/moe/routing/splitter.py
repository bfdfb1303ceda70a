"""The fast clock: split one batch's tokens over the copies of their experts, the same way on every rank.

Pure arithmetic on the counts that all ranks gathered - a function of the placement and these counts alone, so that
every rank comes to the same split. Numba splits on the host (`sources`), and the device only deals its choices out by
the result. No torch.distributed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...placement import Placement
from .lookup import record_use
from .sources import RowCounts, SplitSettings, split_for_rank
from .tables import SplitTables


@dataclass(frozen=True, eq=False)
class _Layer:
    """Which expert is in which slot of one layer.

    Args:
        tables: of the layers that changed together; this one is number ``index`` there.
        copy_slot_EC: int64 ``[E, C]`` on the device: the slots of each expert's copies.
        several: whether any expert has more than one copy.
    """

    tables: SplitTables
    index: int
    copy_slot_EC: Tensor
    several: bool


class BatchSplitter:
    """Splits batches under one placement; `prepare` takes over the next one. ``count`` and ``deal`` are kernels with
    the results of `count_choices` and `deal_out`."""

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
            new[layer] = _Layer(tables, index, slots_LEC[index], bool(part.copy_count[index].max() > 1))

        def take_over() -> None:
            record_use(slots_LEC)
            self._layers.update(new)

        return take_over

    def splits(self, layer: int) -> bool:
        """Return whether any expert of the layer has copies; if not, every token goes home."""
        return self._layers[layer].several

    def counts(self, topk_ids_TK: Tensor) -> Counted:
        """This rank's choices of each expert, padding included: what will really travel."""
        return self._count(topk_ids_TK, self._num_experts)

    def route(
        self, layer: int, topk_ids_TK: Tensor, counts_RE: NDArray[np.int64], begins: Tensor | None = None
    ) -> tuple[Tensor, RowCounts]:
        """Return int64 ``[T, K]``, the slot of each choice of a batch, an expert's choices to its copies in the order
        of the tokens, and how many rows go where. ``counts_RE`` are of every rank, on the host. No host sync."""
        here = self._layers[layer]
        sent_EC, counts = split_for_rank(counts_RE, here.tables, here.index, self._ep_rank, self._settings)
        sent = torch.from_numpy(sent_EC).to(topk_ids_TK.device, non_blocking=True)
        return self._deal(topk_ids_TK, sent, here.copy_slot_EC, begins), counts


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
