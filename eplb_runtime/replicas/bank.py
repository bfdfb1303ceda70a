"""Replica slots: weights-only copies of experts whose homes are on other ranks, kept from step to step.

A bank is one layer's slots on one rank. The Parameter is the home rows; replica rows are no parameter of anything.
Their gradients gather here, in float32 at least, until `sync.py` brings them to the homes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ReplicaPool:
    """Replica rows, and their gradients, that layers of equal shapes use in turn."""

    def __init__(self, replica_slots: int) -> None:
        self._replica_slots = replica_slots
        self._made: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}

    def rows(self, position: int, home: Tensor, dtype: torch.dtype) -> Tensor:
        """``[k, ...]`` for a layer's tensor number ``position``; zeros at first."""
        key = (position, home.shape[1:], dtype)
        if key not in self._made:
            self._made[key] = home.detach().new_zeros((self._replica_slots, *home.shape[1:]), dtype=dtype)
        return self._made[key]


class ReplicaBank:
    """The slots of one layer on one rank.

    Args:
        homes: home rows ``[H, ...]`` per tensor.
        replica_slots: k, rows for copies (zeros until they are refreshed).
        gradients: whether copies collect gradients (training).
        pool: where replica rows are, shared with other layers. None: they lie behind the home rows in one piece, so
            that a grouped GEMM reads all slots without a copy; the homes' Parameters are new ones in that memory.
    """

    def __init__(
        self, homes: Sequence[nn.Parameter], replica_slots: int, gradients: bool, pool: ReplicaPool | None = None
    ) -> None:
        own = pool is None
        pool = pool or ReplicaPool(replica_slots)
        self.homes_per_rank = homes[0].shape[0]
        self.replica_slots = replica_slots
        self.parameters = list(homes)
        self.replicas = [pool.rows(position, p, p.dtype) for position, p in enumerate(homes)]
        if own:
            self.slots = [torch.cat([p.detach(), rows]) for p, rows in zip(homes, self.replicas, strict=True)]
            self.replicas = [slots[self.homes_per_rank :] for slots in self.slots]
            self.parameters = [
                nn.Parameter(slots[: self.homes_per_rank], requires_grad=p.requires_grad)
                for slots, p in zip(self.slots, homes, strict=True)
            ]
        self._gradients = [
            pool.rows(len(homes) + position, p, accumulation_dtype(p)) if gradients and p.requires_grad else None
            for position, p in enumerate(homes)
        ]
        self.unsent = False

    def replica_rows(self, replica: int) -> list[Tensor]:
        """The live rows of a replica slot, one per tensor."""
        return [rows[replica] for rows in self.replicas]

    def gradient_rows(self, replica: int) -> list[Tensor]:
        """Gradients of a replica slot, in ``accumulation_dtype``, one per tensor that needs one."""
        return [gradient[replica] for gradient in self._gradients if gradient is not None]

    def trained(self) -> list[nn.Parameter]:
        """The parameters that have gradients, in the order of ``gradient_rows``."""
        return [p for p, gradient in zip(self.parameters, self._gradients, strict=True) if gradient is not None]

    def collect(self, gradients: Sequence[Tensor | None]) -> None:
        """Add what a backward pass gave the copies, ``[k, ...]`` per tensor, to what has not been sent home yet."""
        for parameter, kept, new in zip(self.parameters, self._gradients, gradients, strict=True):
            if kept is None:
                continue
            # No gradient on the parameter: a new sum begins, and what a skipped step left here goes.
            if self.unsent and parameter.grad is not None and new is not None:
                kept.add_(new)
            elif new is not None:
                kept.copy_(new)
            else:
                kept.zero_()
        self.unsent = True


def accumulation_dtype(parameter: Tensor) -> torch.dtype:
    """What gradients of copies are summed in: float32, or the weights' own dtype where that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)


def replica_bytes(homes: Sequence[Tensor], replica_slots: int, gradients: bool) -> int:
    """Bytes of a layer's replica slots, with their gradients in training."""
    numbers = (
        p[0].numel() * (p.element_size() + (accumulation_dtype(p).itemsize if gradients and p.requires_grad else 0))
        for p in homes
    )
    return replica_slots * sum(numbers)
