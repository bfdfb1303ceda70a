"""Pooled replicas: one set of rows that all layers share.

A layer's replicas are fetched from their homes before its forward and again before its backward. Their gradients leave
before the next layer needs the rows. Home and replica rows are not contiguous, so replicas are computed by a second
call, and recomputed in the backward pass once their weights have been fetched again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..moe.experts.compute import Compute, LocalExperts, SlotCounts, run_rows, with_spare, without_spare
from ..moe.experts.slices import with_divided_gradients
from .bank import ReplicaBank
from .sync import ReplicaSync


class PooledReplicas(LocalExperts):
    """A layer with pooled replicas.

    Args:
        compute: runs rows through slots with the host's own code.
        layer: index of the layer.
        bank: its slots, replica rows from a pool.
        sync: fetches replicas and returns their gradients.
        divisor: of the homes' gradients.
    """

    def __init__(self, compute: Compute, layer: int, bank: ReplicaBank, sync: ReplicaSync, divisor: float) -> None:
        super().__init__(compute, lambda: bank.parameters, divisor)
        self._layer = layer
        self._bank = bank
        self._sync = sync

    def at_homes(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the weights for rows at home, made from the homes' parameters."""
        return with_divided_gradients(parameters, self._divisor)

    def ahead_of_forward(self) -> None:
        self.fetch()

    def ahead_of_backward(self, combined_TD: Tensor) -> Tensor:
        ahead: Tensor = _FetchAhead.apply(combined_TD, self)
        return ahead

    def __call__(self, rows_MD: Tensor, counts_S: SlotCounts, weights_M: Tensor | None) -> Tensor:
        self._sync.check_homes(self._layer)
        rows = rows_MD.shape[0]
        rows_MD, counts_S, weights_M = without_spare(rows_MD, counts_S, weights_M)
        homes, counts = self._bank.homes_per_rank, counts_S.known()
        at_homes, at_copies = (SlotCounts.of(part, rows_MD.device) for part in (counts[:homes], counts[homes:]))
        home_rows = sum(counts[:homes])
        here, copied = slice(home_rows), slice(home_rows, None)
        home_weights, copied_weights = (None if weights_M is None else weights_M[part] for part in (here, copied))
        grad_inputs = self._parameters()
        if not self._sync.has_copies(self._layer):
            out_MD = run_rows(self._compute, rows_MD[here], at_homes, self.at_homes(grad_inputs), home_weights)
            return with_spare(out_MD, rows)
        parameters = _Together.apply(*grad_inputs)
        at_home = run_rows(self._compute, rows_MD[here], at_homes, self.at_homes(parameters), home_weights)
        at_copy = _OnReplicaRows.apply(rows_MD[copied], copied_weights, at_copies, self, *parameters)
        return with_spare(torch.cat([at_home, at_copy]), rows)

    def compute_copies(
        self, rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor], weights_M: Tensor | None
    ) -> Tensor:
        """Run rows through the fetched replicas; slots count from the first replica slot."""
        return run_rows(self._compute, rows_MD, counts_S, parameters, weights_M)

    def fetched(self) -> list[Tensor]:
        """Return this layer's replicas ``[k, ...]`` once they have arrived."""
        self.fetch()
        self._sync.wait(self._layer)
        return self._bank.replicas

    def fetch(self) -> None:
        self._sync.fetch(self._layer)

    def collect(self, gradients: Sequence[Tensor | None], edges: Sequence[tuple[Any, int]]) -> None:
        """Hand over the gradients of the replicas, ``[k, ...]`` per tensor."""
        self._sync.collect(self._layer, gradients, edges)


class _Together(torch.autograd.Function):
    """The identity on a layer's parameters, as one node: a backward pass needs the gradients of all or of none."""

    @staticmethod
    def forward(ctx: Any, *parameters: nn.Parameter) -> tuple[Tensor, ...]:
        views = tuple(parameter.view_as(parameter) for parameter in parameters)
        ctx.mark_non_differentiable(*(view for view, p in zip(views, parameters, strict=True) if not p.requires_grad))
        return views

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class _OnReplicaRows(torch.autograd.Function):
    """Computes replicas. The homes' parameters are inputs so that a frozen hidden state does not cut the graph. Their
    gradients from here travel to the homes; the inputs' half of a split backward needs none."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_MD: Tensor,
        weights_M: Tensor | None,
        counts_S: SlotCounts,
        layer: PooledReplicas,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.layer, ctx.counts_S = layer, counts_S
        ctx.save_for_backward(rows_MD, weights_M)
        device = rows_MD.device.type
        ctx.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        return layer.compute_copies(rows_MD, counts_S, layer.fetched(), None)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, weights_M = ctx.saved_tensors
        rows_need, weights_need, _, _, *trained = ctx.needs_input_grad
        together = next((node for node, _ in ctx.next_functions[-len(trained) :] if node is not None), None)
        if together is None or not torch._C._will_engine_execute_node(together):  # type: ignore[attr-defined]
            together, trained = None, [False] * len(trained)
        rows_MD = rows_MD.detach().requires_grad_(rows_need)
        if weights_M is not None:
            weights_M = weights_M.detach().requires_grad_(weights_need)
        copies = [rows.detach().requires_grad_(need) for rows, need in zip(ctx.layer.fetched(), trained, strict=True)]
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            out_MD = ctx.layer.compute_copies(rows_MD, ctx.counts_S, copies, weights_M)
        inputs = [rows_MD, weights_M, *copies]
        wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        found = iter(torch.autograd.grad(out_MD, wanted, grad_MD, allow_unused=True))
        gradients = [next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs]
        if together is not None:
            ctx.layer.collect(gradients[2:], together.next_functions)
        return gradients[0], gradients[1], None, None, *(None for _ in trained)


class _FetchAhead(torch.autograd.Function):
    """The identity; its backward fetches the layer's replicas while gradients travel to the experts."""

    @staticmethod
    def forward(ctx: Any, combined_TD: Tensor, layer: PooledReplicas) -> Tensor:
        ctx.layer = layer
        ctx.mark_dirty(combined_TD)  # itself and no view of it, as in `moe.dispatch.recompute`
        return combined_TD

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        ctx.layer.fetch()
        return grad_TD, None
