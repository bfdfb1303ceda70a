"""TransformerEngine's fused permutations of rows, in torch, as its source has them: rows by expert and then by
token, sums in float32 from the last expert to the first, whole chunks in another order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _rows_of(chosen_TE: Tensor) -> Tensor:
    """int64 ``[T, E]``: where a token's row of an expert is; -1: it has none."""
    chosen_ET = chosen_TE.bool().T.contiguous()
    position_ET = chosen_ET.flatten().cumsum(0).sub_(1).view_as(chosen_ET)
    return position_ET.where(chosen_ET, -1).T.contiguous()


def _spread(tokens_TD: Tensor, rows_TE: Tensor, count: int) -> Tensor:
    spread = tokens_TD.new_empty(count, *tokens_TD.shape[1:])
    token, expert = (rows_TE >= 0).nonzero(as_tuple=True)
    spread[rows_TE[token, expert]] = tokens_TD[token]
    return spread


def _added(rows_ND: Tensor, rows_TE: Tensor) -> Tensor:
    total = torch.zeros(len(rows_TE), rows_ND.shape[-1])
    for expert in reversed(range(rows_TE.shape[1])):
        mine = rows_TE[:, expert] >= 0
        total[mine] += rows_ND[rows_TE[mine, expert]].float()
    return total.to(rows_ND.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        rows_TE = _rows_of(chosen)
        ctx.save_for_backward(rows_TE)
        ctx.mark_non_differentiable(rows_TE)
        token, expert = (rows_TE >= 0).nonzero(as_tuple=True)
        weights = probs.new_empty(count)
        weights[rows_TE[token, expert]] = probs[token, expert]
        return _spread(tokens, rows_TE, count), weights, rows_TE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        (rows_TE,) = ctx.saved_tensors
        of_probs = torch.where(rows_TE >= 0, gradients[1][rows_TE.clamp(min=0)], 0)
        return _added(gradients[0], rows_TE), of_probs, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, rows_TE: Tensor) -> Tensor:
        ctx.save_for_backward(rows_TE)
        ctx.count = len(rows_ND)
        return _added(rows_ND, rows_TE)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _spread(gradient, *ctx.saved_tensors, ctx.count), None


def moe_permute(tokens: Tensor, chosen: Tensor, num_out_tokens: int = -1) -> tuple[Tensor, Tensor]:
    moved, _, places = moe_permute_with_probs(tokens, torch.ones(chosen.shape), chosen, num_out_tokens)
    return moved, places


def moe_permute_with_probs(
    tokens: Tensor, probs: Tensor, chosen: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    moved: tuple[Tensor, Tensor, Tensor] = _Permute.apply(tokens, probs, chosen, int(num_out_tokens))
    return moved


def moe_unpermute(
    rows: Tensor, places: Tensor, merging_probs: Tensor | None = None, restore_shape: Any = None
) -> Tensor:
    assert merging_probs is None
    total: Tensor = _Unpermute.apply(rows, places)
    return total.view(restore_shape)


def moe_sort_chunks_by_index(rows: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    chunks = rows.split(sizes.tolist())
    return torch.cat([chunks[number] for number in order.tolist()])


def moe_sort_chunks_by_index_with_probs(
    rows: Tensor, probs: Tensor, sizes: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    return moe_sort_chunks_by_index(rows, sizes, order), moe_sort_chunks_by_index(probs, sizes, order)


def use() -> None:
    """Let Megatron find these in the place of TransformerEngine's."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    moe_utils.HAVE_TE = True
    moe_utils.fused_permute = moe_permute
    moe_utils.fused_permute_with_probs = moe_permute_with_probs
    moe_utils.fused_unpermute = moe_unpermute
    moe_utils.fused_sort_chunks_by_index = moe_sort_chunks_by_index
    moe_utils.fused_sort_chunks_by_index_with_probs = moe_sort_chunks_by_index_with_probs
