"""Rows of Megatron's all-to-all dispatcher: in logical order where a token's results are added up, in the order of
slots where they travel.

Megatron permutes, and later adds, in the order of the columns that it is given. So it gets them by logical expert, with
``moe_permute_fusion`` or without, and whole chunks, one for each expert, change places between that and its all-to-all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...moe.layer import HostDispatchedLayer


class RowsInLogicalOrder:
    """One layer's rows: its dispatcher takes columns by logical expert, and rows travel in the order of slots."""

    def __init__(self, dispatcher: Any, columns: HostDispatchedLayer) -> None:
        self._columns = columns
        self._counts_E: Tensor | None = None
        self._places: tuple[Tensor, Tensor] | None = None
        own_preprocess = dispatcher.preprocess

        def preprocess(logical_TE: Tensor) -> Any:
            """How many rows go where; padded already, if they are padded."""
            self._counts_E = logical_TE.sum(dim=0)
            return own_preprocess(logical_TE.index_select(1, columns.logical_of_slots))

        dispatcher.preprocess = preprocess

    def to_slots(self, rows_ND: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return what travels of what Megatron has permuted by logical expert."""
        assert self._counts_E is not None
        there_N, back_N = _places(self._counts_E, self._columns.logical_of_slots, len(rows_ND))
        self._counts_E, self._places = None, (there_N, back_N)
        return _Moved.apply(rows_ND, there_N, back_N), _Moved.apply(weights_N, there_N, back_N)

    def from_slots(self, rows_ND: Tensor) -> Tensor:
        """Return what Megatron adds up by logical expert of what has come back."""
        assert self._places is not None
        there_N, back_N = self._places
        self._places = None
        moved: Tensor = _Moved.apply(rows_ND, back_N, there_N)
        return moved


def _places(counts_E: Tensor, logical_of_slots: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return where each row in the order of slots is in logical order, and the other way round; no host sync."""
    counts_P = counts_E.index_select(0, logical_of_slots)
    first_E, first_P = counts_E.cumsum(0) - counts_E, counts_P.cumsum(0) - counts_P
    shift_P = first_E.index_select(0, logical_of_slots) - first_P
    numbers_N = torch.arange(rows, device=counts_E.device)
    there_N = numbers_N + shift_P.repeat_interleave(counts_P, output_size=rows)
    return there_N, torch.empty_like(there_N).scatter_(0, there_N, numbers_N)


class _Moved(torch.autograd.Function):
    """Rows in another order. Each is read once, so their gradients are moved back, and none is added to another."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there_N: Tensor, back_N: Tensor) -> Tensor:
        ctx.save_for_backward(back_N)
        return rows.index_select(0, there_N)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (back_N,) = ctx.saved_tensors
        return gradient.index_select(0, back_N), None, None
