"""Persistent replicas: slots with memory of their own, refreshed after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..moe.experts.compute import Compute, LocalExperts, SlotCounts, run_rows
from .bank import ReplicaBank
from .sync import ReplicaSync


class PersistentReplicas(LocalExperts):
    """A layer with persistent replicas, which ``sync`` keeps equal to their homes."""

    def __init__(self, compute: Compute, layer: int, bank: ReplicaBank, sync: ReplicaSync, divisor: float) -> None:
        super().__init__(compute, lambda: bank.parameters, divisor)
        self._layer = layer
        self._bank = bank
        self._sync = sync

    def __call__(self, rows_MD: Tensor, counts_S: SlotCounts, weights_M: Tensor | None) -> Tensor:
        self._sync.check_homes(self._layer)
        self._sync.wait(self._layer)
        slots = _AllSlots.apply(self, *self._bank.parameters)
        return run_rows(self._compute, rows_MD, counts_S, slots, weights_M)

    def all_slots(self) -> list[Tensor]:
        """Return home and replica rows ``[S, ...]`` per tensor."""
        return self._bank.slots

    def part(self, gradients: Sequence[Tensor], edges: Sequence[tuple[Any, int]]) -> list[Tensor]:
        """Hand over the replicas' rows of gradients ``[S, ...]``; returns the homes' rows, divided."""
        homes = self._bank.homes_per_rank
        self._sync.collect(self._layer, [gradient[homes:] for gradient in gradients], edges)
        at_homes = [gradient[:homes] for gradient in gradients]
        return at_homes if self._divisor == 1 else [gradient / self._divisor for gradient in at_homes]


class _AllSlots(torch.autograd.Function):
    """Home parameters -> storages with homes and replicas. The backward splits the gradients."""

    @staticmethod
    def forward(ctx: Any, layer: PersistentReplicas, *parameters: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.layer = layer
        return tuple(slots.view_as(slots) for slots in layer.all_slots())

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.layer.part(gradients, ctx.next_functions)
