"""Replicas of experts that FSDP2 shards over the EDP ranks; each rank holds its shard of a replica, too.

Whole replicas are gathered over EDP before a layer's forward and again before its backward, into rows that all layers
share. FSDP gathers the homes into memory of its own, so replicas are computed by a second call, as pooled ones are.
Their gradients are summed over EDP, each rank takes its shard of the sum, and `ReplicaSync` returns it to the home's.
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
from .pooled import PooledReplicas
from .sync import ReplicaSync


class ReplicaGather:
    """Gathers the replicas of one layer at a time from their shards, into memory that all layers share.

    Args:
        group: the EDP ranks, in the order of their shards; None: this rank holds whole replicas.
        replica_group: EDP ranks with the same shards as this one; None: there are no others.
    """

    def __init__(self, group: dist.ProcessGroup | None, replica_group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._replica_group = replica_group
        self._ranks = 1 if group is None else group.size()
        self._rows: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self._in_flight: tuple[int, list[Tensor], list[tuple[Tensor, dist.Work]]] | None = None

    def fetch(self, layer: int, slices: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        """Start to gather a layer's replicas. Collective over the group.

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
        self._in_flight = layer, whole, messages

    def is_in_flight(self, layer: int) -> bool:
        """Return whether this layer's replicas were fetched last and not taken yet."""
        return self._in_flight is not None and self._in_flight[0] == layer

    def take(self) -> list[Tensor]:
        """Return ``[k, N, ...]`` per tensor, as fetched last; valid until the next ``fetch``."""
        return self._arrived()

    def free(self) -> int:
        """Free the memory of whole replicas; it is taken anew by the next ``fetch``. Returns its bytes."""
        self._arrived()
        nbytes = sum(rows.nbytes for rows in self._rows.values())
        self._rows.clear()
        return nbytes

    def _arrived(self) -> list[Tensor]:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return []
        layer, whole, messages = in_flight
        with phase("wait for whole copies", "", layer):
            for _, work in messages:
                work.wait()
        return whole

    def _rows_for(self, position: int, rows: Tensor) -> Tensor:
        """Return memory ``[k, N, ...]`` for rows that join the ranks' slices."""
        shape = torch.Size((rows.shape[0], rows.shape[1] * self._ranks, *rows.shape[2:]))
        key = (position, shape, rows.dtype)
        if key not in self._rows:
            with torch.inference_mode(False):  # kept: made inside it, nobody outside could write to it
                self._rows[key] = rows.new_empty(shape)
        return self._rows[key]

    def slice_of_sum(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum ``[k, N, ...]`` over the ranks, in their order and this dtype: this rank's slice ``[k, N/D, ...]``.
        Collective over both groups."""
        total = self._slice_of_sum(gradient, dtype)
        if self._replica_group is None:
            return total
        total, *others = gather_rows(total.contiguous(), self._replica_group)
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


class ShardedReplicas(PooledReplicas):
    """A layer whose homes and replicas are sharded over EDP.

    Args:
        compute, layer, bank, sync: as of `PooledReplicas`.
        homes: returns the whole homes that FSDP puts into the module while it computes.
        divisor: of the homes' gradients, before FSDP's average.
        whole: gathers replicas.
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
        whole: ReplicaGather,
    ) -> None:
        super().__init__(compute, layer, bank, sync, divisor)
        self._parameters = homes
        self._gather_all = whole
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
        if not self._gather_all.is_in_flight(self._layer):
            self.fetch()
        if self._sync.shared:
            self._gather()
        return self._gather_all.take()

    def collect(self, gradients: Sequence[Tensor | None], edges: Sequence[tuple[Any, int]]) -> None:
        if self._sync.takes(self._layer, edges):
            self._sync.collect(self._layer, self._slices_of(gradients), edges)

    def _gather(self) -> None:
        self._sync.wait(self._layer)
        self._gather_all.fetch(self._layer, self._bank.replicas, self._dtypes)

    def _slices_of(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return shards of the sums over EDP; None for frozen tensors. A rank without tokens adds zeros."""
        slices: list[Tensor | None] = []
        for gradient, rows, home in zip(gradients, self._bank.replicas, self._bank.parameters, strict=True):
            if not home.requires_grad:
                slices.append(None)
                continue
            if gradient is None:
                shape = (rows.shape[0], *home.shape[1:])
                gradient = rows.new_zeros(shape, dtype=self._dtypes[len(slices)])
            slices.append(self._gather_all.slice_of_sum(gradient, accumulation_dtype(home)))
        return slices
