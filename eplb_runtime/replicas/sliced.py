"""Copies of experts that FSDP2 slices over the EDP ranks: of a copy, too, each rank keeps its slice.

Whole copies are gathered over EDP ahead of a layer's forward and again ahead of its backward, into rows that all layers
use in turn. FSDP does likewise with the homes, in memory of its own; so copies are computed by a second call, as shared
ones are. What gradients a pass gives them is summed over EDP, each rank takes the sum of its slice, and `ReplicaSync`
brings slices to slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.consensus import all_gather_into, gather_rows
from ..moe.experts.compute import Compute
from ..utils.checksums import as_bytes
from ..utils.spans import phase
from .bank import ReplicaBank, accumulation_dtype
from .shared import SharedReplicas
from .sync import ReplicaSync


class WholeCopies:
    """The copies of one layer at a time, whole: memory that all layers use in turn.

    Args:
        group: the EDP ranks, in the order of their slices; None: this rank alone, with whole slices.
        twins: EDP ranks that have the same slices as this one; None: there are no others.
    """

    def __init__(self, group: dist.ProcessGroup | None, twins: dist.ProcessGroup | None) -> None:
        self._group = group
        self._twins = twins
        self._ranks = 1 if group is None else group.size()
        self._rows: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self._on_the_way: tuple[int, list[Tensor], list[tuple[Tensor, dist.Work]]] | None = None

    def fetch(self, layer: int, slices: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        """Send for a layer's copies. Collective over the group.

        Args:
            slices: ``[k, N/D, ...]`` per tensor, this rank's.
            dtypes: what each is computed in.
        """
        self._arrived()
        whole, messages = [], []
        with phase("gather copies", "", layer):
            for position, (rows, dtype) in enumerate(zip(slices, dtypes, strict=True)):
                rows = rows.to(dtype)
                whole.append(rows if self._group is None else self._rows_for(position, rows))
                for to, row in zip(whole[-1], rows, strict=True) if self._group is not None else ():
                    work = all_gather_into(as_bytes(to), as_bytes(row), group=self._group, async_op=True)
                    messages.append((row, work))
        self._on_the_way = layer, whole, messages

    def is_fetching(self, layer: int) -> bool:
        """Whether these are the copies that were sent for last, and nobody has taken them."""
        return self._on_the_way is not None and self._on_the_way[0] == layer

    def take(self) -> list[Tensor]:
        """``[k, N, ...]`` per tensor, what was sent for last; it stands until the next ``fetch``."""
        return self._arrived()

    def _arrived(self) -> list[Tensor]:
        on_the_way, self._on_the_way = self._on_the_way, None
        if on_the_way is None:
            return []
        layer, whole, messages = on_the_way
        with phase("wait for whole copies", "", layer):
            for _, work in messages:
                work.wait()
        return whole

    def _rows_for(self, position: int, rows: Tensor) -> Tensor:
        """``[k, N, ...]``: each row is what the ranks' slices give, one behind the other."""
        shape = torch.Size((rows.shape[0], rows.shape[1] * self._ranks, *rows.shape[2:]))
        key = (position, shape, rows.dtype)
        if key not in self._rows:
            with torch.inference_mode(False):  # kept: made inside it, nobody outside could write to it
                self._rows[key] = rows.new_empty(shape)
        return self._rows[key]

    def slice_of_sum(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum ``[k, N, ...]`` over the ranks, in their order and this dtype: this rank's slice ``[k, N/D, ...]``.
        Collective over the group, and over the twins."""
        total = self._slice_of_sum(gradient, dtype)
        if self._twins is None:
            return total
        total, *others = gather_rows(total.contiguous(), self._twins)
        for other in others:
            total += other
        return total

    def _slice_of_sum(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        if self._group is None:
            return gradient.to(dtype)
        leaving = torch.stack(gradient.chunk(self._ranks, dim=1))
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(as_bytes(arriving), as_bytes(leaving), group=self._group)
        total = arriving[0].to(dtype)
        for other in arriving[1:]:
            total += other.to(dtype)
        return total


class SlicedReplicas(SharedReplicas):
    """A layer whose homes and copies are sliced over EDP.

    Args:
        compute, layer, bank, sync: as of `SharedReplicas`.
        homes: the whole homes, as FSDP lets them stand in the module while it computes.
        divisor: of the homes' gradients, ahead of FSDP's average.
        whole: where copies are put together.
    """

    def __init__(
        self,
        compute: Compute,
        layer: int,
        bank: ReplicaBank,
        sync: ReplicaSync,
        *,
        homes: Callable[[], Sequence[Tensor]],
        divisor: float,
        whole: WholeCopies,
    ) -> None:
        super().__init__(compute, layer, bank, sync, divisor)
        self._parameters = homes
        self._whole = whole
        self._dtypes: list[torch.dtype] = []

    def ahead_of_forward(self) -> None:
        self._dtypes = [parameter.dtype for parameter in self._parameters()]
        super().ahead_of_forward()

    def fetch(self) -> None:
        if not self._sync.has_copies(self._layer):
            return
        if self._sync.shared:
            self._sync.fetch(self._layer)
        else:
            self._gather()

    def fetched(self) -> list[Tensor]:
        if not self._whole.is_fetching(self._layer):
            self.fetch()
        if self._sync.shared:
            self._gather()
        return self._whole.take()

    def collect(self, gradients: Sequence[Tensor | None], edges: Sequence[tuple[Any, int]]) -> None:
        if self._sync.takes(self._layer, edges):
            self._sync.collect(self._layer, self._slices_of(gradients), edges)

    def _gather(self) -> None:
        self._sync.wait(self._layer)
        self._whole.fetch(self._layer, self._bank.replicas, self._dtypes)

    def _slices_of(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sums over EDP; of what no rank trains, None. A rank that no token reached brings zeros."""
        slices: list[Tensor | None] = []
        for gradient, rows, home in zip(gradients, self._bank.replicas, self._bank.parameters, strict=True):
            if not home.requires_grad:
                slices.append(None)
                continue
            if gradient is None:
                shape = (rows.shape[0], *home.shape[1:])
                gradient = rows.new_zeros(shape, dtype=self._dtypes[len(slices)])
            slices.append(self._whole.slice_of_sum(gradient, accumulation_dtype(home)))
        return slices
