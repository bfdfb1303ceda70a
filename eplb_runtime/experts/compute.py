"""The experts of one layer that a rank computes, without copies: what dispatch calls with the rows that arrived.

With replica slots, `replicas/kept.py` and `replicas/shared.py` (one buffer for all layers) stand in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Compute = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]
"""(rows ``[M, D]`` ordered by local slot, local slot of each row int64 ``[M]``, weights of all slots) -> ``[M, D]``."""


class LocalExperts:
    """The slots of one layer on this rank.

    Args:
        compute: runs rows through slots with the host's own code.
        parameters: the weights that stand in the module now, ``[E/R, ...]`` each, asked for once a forward.
    """

    def __init__(self, compute: Compute, parameters: Callable[[], Sequence[Tensor]]) -> None:
        self._compute = compute
        self._parameters = parameters

    def ahead_of_forward(self) -> None:
        """Rows are about to travel: what the compute will wait for can be sent for. On every rank."""

    def ahead_of_backward(self, combined_TD: Tensor) -> Tensor:
        """The layer's output as it is; in the backward pass, gradients are about to travel. On every rank."""
        return combined_TD

    def __call__(self, rows_MD: Tensor, slot_M: Tensor, rows_S: Sequence[int]) -> Tensor:
        """Run the rows that arrived here, on every rank, also with none.

        Args:
            rows_MD: ``[M, D]``, ordered by local slot.
            slot_M: int64 ``[M]``, the local slot of each row.
            rows_S: how many rows each local slot has, on the host.

        Returns:
            ``[M, D]``.
        """
        return run_rows(self._compute, rows_MD, slot_M, self._parameters())


def run_rows(compute: Compute, rows_MD: Tensor, slot_M: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``compute``, or without rows a stand-in that keeps the graph whole."""
    return compute(rows_MD, slot_M, weights) if rows_MD.shape[0] else _Idle.apply(rows_MD, *weights)


class _Idle(torch.autograd.Function):
    """Stands in for the experts on a rank that no token reached: keeps the graph whole, so that this rank enters the
    collectives of the backward pass, and gives its parameters zero gradients, as a batch without their tokens would."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        zeros = (torch.zeros_like(p) if need else None for p, need in zip(ctx.saved_tensors, needed, strict=True))
        return grad, *zeros
