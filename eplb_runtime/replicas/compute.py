"""A layer's experts on this rank with replicas: in memory of their own, or gathered where FSDP2 shards experts."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..distributed.consensus import all_gather_into, gather_rows
from ..moe.experts.compute import LocalExperts, SlotCounts, run_rows, with_divided_gradients
from ..utils.checksums import as_bytes
from ..utils.spans import phase
from .bank import ReplicaBank, accumulation_dtype
from .sync import ReplicaSync

Edges = Sequence[tuple[Any, int]]


class PersistentReplicas(LocalExperts):
    """A layer with replicas that lie behind their rank's homes; ``sync`` refreshes them after each step."""

    def __init__(self, *experts: Any, layer: int, bank: ReplicaBank, sync: ReplicaSync) -> None:
        super().__init__(*experts)
        self._layer, self._bank, self._sync = layer, bank, sync

    def __call__(self, rows_MD: Tensor, counts_S: SlotCounts, weights_M: Tensor | None) -> Tensor:
        self._sync.check_homes(self._layer)
        slots = _WithReplicas.apply(self, *self._bank.parameters)
        return run_rows(self._compute, rows_MD, counts_S, slots, weights_M)

    def slots(self, homes: Sequence[Tensor]) -> Sequence[Tensor]:
        """Wait for the replicas' weights; return each tensor's live rows of all slots, homes first, then replicas."""
        self._sync.wait(self._layer)
        return self._bank.slots

    def collect(self, gradients: Sequence[Tensor], edges: Edges) -> Sequence[Tensor | None]:
        """Return the gradients of home rows, over the divisor; pass those of replicas to `ReplicaSync.collect`."""
        homes = self._bank.homes_per_rank
        self._sync.collect(self._layer, [gradient[homes:] for gradient in gradients], edges)
        at_homes = [gradient[:homes] for gradient in gradients]
        return at_homes if self._divisor == 1 else [gradient / self._divisor for gradient in at_homes]


class ShardedReplicas(PersistentReplicas):
    """Replicas of experts that FSDP2 shards over the EDP ranks; each rank holds its shard of a replica, too.

    Whole replicas are gathered over EDP in a layer's forward and again in its backward, where the rows of replicas are
    recomputed (`torch.utils.checkpoint`, which brings back random numbers and autocast). FSDP gathers the homes into
    memory of its own, so replicas are computed by a second call. Their gradients are summed over EDP (``group``, then
    ``replica_group``); `ReplicaSync` returns each rank's shard of the sum.
    """

    def __init__(
        self, *experts: Any, group: dist.ProcessGroup | None, replica_group: dist.ProcessGroup | None, **of_layer: Any
    ) -> None:
        super().__init__(*experts, **of_layer)
        self._group, self._replica_group = group, replica_group
        self._ranks = 1 if group is None else group.size()

    def __call__(self, rows_MD: Tensor, counts_S: SlotCounts, weights_M: Tensor | None) -> Tensor:
        self._sync.check_homes(self._layer)
        homes, counts = self._bank.homes_per_rank, counts_S.known()
        at_homes, at_replicas = (SlotCounts.of(part, rows_MD.device) for part in (counts[:homes], counts[homes:]))
        home, copied = slice(sum(at_homes.known())), slice(sum(at_homes.known()), None)
        home_M, copied_M = (None if weights_M is None else weights_M[part] for part in (home, copied))
        parameters = self._parameters()
        divided = with_divided_gradients(parameters, self._divisor)
        out_MD = run_rows(self._compute, rows_MD[home], at_homes, divided, home_M)
        if self._sync.expects_gradients(self._layer):
            given = rows_MD[copied], at_replicas, copied_M, *parameters
            out_MD = torch.cat([out_MD, checkpoint(self._at_replicas, *given, use_reentrant=False)])
        return out_MD

    def _at_replicas(self, rows_MD: Tensor, counts_S: SlotCounts, weights_M: Tensor | None, *homes: Tensor) -> Tensor:
        return run_rows(self._compute, rows_MD, counts_S, _WithReplicas.apply(self, *homes), weights_M)

    def slots(self, homes: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the layer's whole replicas ``[k, N, ...]`` per tensor: waits for the slices, all-gathers over EDP."""
        self._sync.wait(self._layer)
        shards = [rows.to(home.dtype) for rows, home in zip(self._bank.replicas, homes, strict=True)]
        if self._group is None:
            return shards
        with phase("gather copies", "", self._layer):
            whole = [rows.new_empty((len(rows), rows.shape[1] * self._ranks, *rows.shape[2:])) for rows in shards]
            works = [
                all_gather_into(as_bytes(to), as_bytes(row), group=self._group, async_op=True)
                for into, rows in zip(whole, shards, strict=True)
                for to, row in zip(into, rows, strict=True)
            ]
            for work in works:
                work.wait()
        return whole

    def collect(self, gradients: Sequence[Tensor], edges: Edges) -> Sequence[Tensor | None]:
        """Return None for each home. Sums the replicas' gradients over EDP and gives this rank's slices of the sums to
        `ReplicaSync.collect`, if that `takes` them. Collective over EDP; a rank without tokens adds zeros."""
        homes = self._bank.parameters
        if self._sync.takes(self._layer, edges):
            shards = [
                self.slice_of_sum(gradient, accumulation_dtype(home)) if home.requires_grad else None
                for gradient, home in zip(gradients, homes, strict=True)
            ]
            self._sync.collect(self._layer, shards, edges)
        return [None] * len(homes)

    def slice_of_sum(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return this rank's slice ``[k, N/D, ...]`` of the sum of ``gradient`` ``[k, N, ...]`` over ranks, added in
        rank order in ``dtype``. Collective over EDP (``group``) and ``replica_group``."""
        summands = [gradient]
        if self._group is not None:
            leaving = torch.stack(gradient.chunk(self._ranks, dim=1))
            arriving = torch.empty_like(leaving)
            dist.all_to_all_single(as_bytes(arriving), as_bytes(leaving), group=self._group)
            summands = list(arriving)
        total = reduce(torch.add, [one.to(dtype) for one in summands])
        of_all = [total] if self._replica_group is None else [*gather_rows(total.contiguous(), self._replica_group)]
        return reduce(torch.add, of_all)


class _WithReplicas(torch.autograd.Function):
    """Home parameters -> rows with replicas, whose gradients go home by `ReplicaSync`."""

    @staticmethod
    def forward(ctx: Any, layer: PersistentReplicas, *homes: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.layer = layer
        slots = tuple(rows.view_as(rows) for rows in layer.slots(homes))
        ctx.mark_non_differentiable(*(rows for rows, home in zip(slots, homes, strict=True) if not home.requires_grad))
        return slots

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.layer.collect(gradients, ctx.next_functions)
