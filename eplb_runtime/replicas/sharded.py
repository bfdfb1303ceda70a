"""Replicas of experts that FSDP2 shards over the EDP ranks; each rank holds its shard of a replica, too.

Whole replicas are gathered over EDP in a layer's forward and again in its backward, where the rows of replicas are
recomputed (`torch.utils.checkpoint`, which brings back random numbers and autocast). FSDP gathers the homes into memory
of its own, so replicas are computed by a second call. Their gradients are summed over EDP, each rank takes its shard of
the sum, and `ReplicaSync` returns it to the home's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..distributed.consensus import all_gather_into, gather_rows
from ..moe.experts.compute import Compute, LocalExperts, SlotCounts, run_rows
from ..moe.experts.slices import with_divided_gradients
from ..utils.checksums import as_bytes
from ..utils.spans import phase
from .bank import ReplicaBank, accumulation_dtype
from .sync import ReplicaSync


class ReplicaGather:
    """Gathers replicas from their shards over the EDP ranks, and sums gradients of whole ones to shards."""

    def __init__(self, group: dist.ProcessGroup | None, replica_group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._replica_group = replica_group
        self._ranks = 1 if group is None else group.size()

    def whole(self, slices: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Return ``[k, N, ...]`` per tensor from this rank's slices, in these dtypes. Collective over the group."""
        shards = [rows.to(dtype) for rows, dtype in zip(slices, dtypes, strict=True)]
        if self._group is None:
            return shards
        whole = [rows.new_empty((len(rows), rows.shape[1] * self._ranks, *rows.shape[2:])) for rows in shards]
        works = [
            all_gather_into(as_bytes(to), as_bytes(row), group=self._group, async_op=True)
            for into, rows in zip(whole, shards, strict=True)
            for to, row in zip(into, rows, strict=True)
        ]
        for work in works:
            work.wait()
        return whole

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


class ShardedReplicas(LocalExperts):
    """A layer whose homes and replicas are sharded over EDP; ``homes`` returns those that FSDP puts into the module."""

    def __init__(
        self,
        compute: Compute,
        layer: int,
        bank: ReplicaBank,
        sync: ReplicaSync,
        *,
        homes: Callable[[], Sequence[Tensor]],
        divisor: float,
        gather: ReplicaGather,
    ) -> None:
        super().__init__(compute, homes, divisor)
        self._layer = layer
        self._bank = bank
        self._sync = sync
        self._gather = gather

    def __call__(self, rows_MD: Tensor, counts_S: SlotCounts, weights_M: Tensor | None) -> Tensor:
        self._sync.check_homes(self._layer)
        homes, counts = self._bank.homes_per_rank, counts_S.known()
        at_homes, at_copies = (SlotCounts.of(part, rows_MD.device) for part in (counts[:homes], counts[homes:]))
        home, copied = slice(sum(at_homes.known())), slice(sum(at_homes.known()), None)
        home_M, copied_M = (None if weights_M is None else weights_M[part] for part in (home, copied))
        parameters = self._parameters()
        divided = with_divided_gradients(parameters, self._divisor)
        out_MD = run_rows(self._compute, rows_MD[home], at_homes, divided, home_M)
        if self._sync.has_copies(self._layer):
            given = rows_MD[copied], at_copies, copied_M, *parameters
            out_MD = torch.cat([out_MD, checkpoint(self._at_copies, *given, use_reentrant=False)])
        return out_MD

    def _at_copies(self, rows_MD: Tensor, counts_S: SlotCounts, weights_M: Tensor | None, *homes: Tensor) -> Tensor:
        return run_rows(self._compute, rows_MD, counts_S, _WholeReplicas.apply(self, *homes), weights_M)

    def whole(self, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Return this layer's replicas ``[k, N, ...]`` per tensor. Collective over EDP."""
        self._sync.wait(self._layer)
        with phase("gather copies", "", self._layer):
            return self._gather.whole(self._bank.replicas, dtypes)

    def collect(self, gradients: Sequence[Tensor | None], edges: Sequence[tuple[Any, int]]) -> None:
        """Hand over the gradients of whole replicas, ``[k, N, ...]`` per tensor. Collective over EDP."""
        if self._sync.takes(self._layer, edges):
            self._sync.collect(self._layer, self._slices_of(gradients), edges)

    def _slices_of(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return shards of the sums over EDP; None for frozen tensors. A rank without tokens adds zeros."""
        slices: list[Tensor | None] = []
        for gradient, rows, home in zip(gradients, self._bank.replicas, self._bank.parameters, strict=True):
            if not home.requires_grad:
                slices.append(None)
                continue
            if gradient is None:
                shape = (rows.shape[0], *home.shape[1:])
                gradient = rows.new_zeros(shape, dtype=home.dtype)
            slices.append(self._gather.slice_of_sum(gradient, accumulation_dtype(home)))
        return slices


class _WholeReplicas(torch.autograd.Function):
    """Home parameters -> whole replicas, whose gradients go to the homes by `ReplicaSync`."""

    @staticmethod
    def forward(ctx: Any, layer: ShardedReplicas, *homes: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        whole = tuple(rows.view_as(rows) for rows in layer.whole([home.dtype for home in homes]))
        ctx.mark_non_differentiable(*(rows for rows, home in zip(whole, homes, strict=True) if not home.requires_grad))
        return whole

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.layer.collect(gradients, ctx.next_functions)
        return None, *(None for _ in gradients)
