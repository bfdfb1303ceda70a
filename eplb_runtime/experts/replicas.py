"""Replica slots: weights-only copies of experts whose homes are on other ranks.

A bank is one layer's storage on one rank: home rows first, replica rows after them, in one piece, so that a grouped
GEMM reads all slots without a copy. The Parameter is the home rows; replica rows are no parameter of anything. Their
gradients gather here, in float32 at least, until `replica_sync.py` brings them to the homes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class ReplicaBank:
    """The slots of one layer on one rank.

    Args:
        homes: home rows ``[H, ...]`` per tensor. Without replica slots they are the bank's parameters; with them, new
            Parameters of the same values are, which share their memory with the replica rows.
        replica_slots: k, rows added behind the home rows (zeros until they are refreshed).
        gradients: whether copies collect gradients (training).
    """

    def __init__(self, homes: Sequence[nn.Parameter], replica_slots: int, gradients: bool) -> None:
        self.homes_per_rank = homes[0].shape[0]
        self.replica_slots = replica_slots
        self.parameters = list(homes)
        self._storages: list[Tensor] = [p.detach() for p in homes]
        if replica_slots:
            self._storages = [torch.cat([p.detach(), p.detach().new_zeros(replica_slots, *p.shape[1:])]) for p in homes]
            self.parameters = [
                nn.Parameter(storage[: self.homes_per_rank], requires_grad=p.requires_grad)
                for storage, p in zip(self._storages, homes, strict=True)
            ]
        self._gradients = [
            torch.zeros((replica_slots, *p.shape[1:]), dtype=accumulation_dtype(p), device=p.device)
            if gradients and p.requires_grad
            else None
            for p in homes
        ]

    def weights(self) -> list[Tensor]:
        """All slots ``[S, ...]`` per tensor, as the experts' compute reads them; gradients flow to homes and copies."""
        return [
            _AllSlots.apply(parameter, storage, gradient)
            for parameter, storage, gradient in zip(self.parameters, self._storages, self._gradients, strict=True)
        ]

    def replica_rows(self, replica: int) -> list[Tensor]:
        """The live rows of a replica slot, one per tensor."""
        return [storage[self.homes_per_rank + replica] for storage in self._storages]

    def gradient_rows(self, replica: int) -> list[Tensor]:
        """Gradients of a replica slot, in ``accumulation_dtype``, one per tensor that needs one."""
        return [gradient[replica] for gradient in self._gradients if gradient is not None]

    def trained(self) -> list[nn.Parameter]:
        """The parameters that have gradients, in the order of ``gradient_rows``."""
        return [p for p, gradient in zip(self.parameters, self._gradients, strict=True) if gradient is not None]

    def clear_gradients(self) -> None:
        for gradient in self._gradients:
            if gradient is not None:
                gradient.zero_()

    @property
    def replica_bytes(self) -> int:
        """Bytes that the replica slots of this layer take, with their gradients."""
        rows = [s[self.homes_per_rank :] for s in self._storages]
        return sum(t.nbytes for t in [*rows, *(g for g in self._gradients if g is not None)])


def accumulation_dtype(parameter: Tensor) -> torch.dtype:
    """What gradients of copies are summed in: float32, or the weights' own dtype where that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)


class _AllSlots(torch.autograd.Function):
    """Home parameter -> the storage that holds homes and copies. Backward parts the gradient again."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, storage: Tensor, gradient: Tensor | None) -> Tensor:
        ctx.parameter, ctx.gradient = parameter, gradient
        return storage.view_as(storage)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        homes = ctx.parameter.shape[0]
        if ctx.gradient is not None:
            # No gradient on the parameter yet: a new sum begins, and what a skipped step left here goes.
            if ctx.parameter.grad is None:
                ctx.gradient.copy_(grad[homes:])
            else:
                ctx.gradient.add_(grad[homes:])
        return grad[:homes], None, None
