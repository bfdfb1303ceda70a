"""Token dispatch over torch.distributed's all-to-all, with gradients, uneven splits and empty ranks.

Shape suffixes: T tokens of this rank, K top-k, N = T * K choices, M rows that arrive here, D model width, R ranks,
S slots a rank, P = R * S slots.

Exactness (the order of every sum is independent of where experts stand): a slot's rows come ordered by (source rank,
position in the source's batch); the K results of a token are summed in the router's order, and so are the K gradients
of its hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LocalCompute = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""(rows ``[M, D]`` ordered by local slot, local slot of each row int64 ``[M]``, rows of each slot) -> ``[M, D]``."""


class AllToAllDispatcher:
    """Dispatch and combine for one EP group.

    Args:
        group: the EP group, on the tokens' device; the dispatcher is its only user.
        slots_per_rank: S.
    """

    def __init__(self, group: dist.ProcessGroup, slots_per_rank: int) -> None:
        self._group = group
        self._num_ranks = group.size()
        self._slots_per_rank = slots_per_rank

    def __call__(
        self,
        hidden_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        compute: LocalCompute,
        row_counts: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run every (token, choice) through its slot's expert and sum each token's choices.

        Args:
            hidden_TD: ``[T, D]``; T may differ between ranks and may be 0.
            slots_TK: int64 ``[T, K]``, physical slots.
            weights_TK: ``[T, K]``, router weights.
            compute: the experts of this rank; called on every rank, also when no row arrives.
            row_counts: int64 ``[P]`` rows sent to each slot, and int64 ``[R * S]`` rows that each rank sends here, when
                they are known already; None: they are exchanged.

        Returns:
            ``[T, D]`` in ``hidden_TD``'s dtype.
        """
        tokens, top_k = slots_TK.shape
        slots_N = slots_TK.reshape(-1)
        order_N = torch.argsort(slots_N, stable=True)
        sent_P, received_P = row_counts if row_counts is not None else self._exchange_counts(slots_N)
        sent, received, rows_S, slot_M = self._split_sizes(sent_P, received_P)

        rows_ND = _Spread.apply(hidden_TD, order_N, top_k)
        rows_MD = _AllToAll.apply(rows_ND, sent, received, self._group)
        by_slot_M = torch.argsort(slot_M, stable=True)
        rows_MD = _Permute.apply(rows_MD, by_slot_M)
        out_MD = compute(rows_MD, slot_M[by_slot_M], rows_S)
        out_MD = _Permute.apply(out_MD, _inverse(by_slot_M))
        out_ND = _AllToAll.apply(out_MD, received, sent, self._group)
        out_TKD = _Permute.apply(out_ND, _inverse(order_N)).view(tokens, top_k, hidden_TD.shape[1])
        return (out_TKD * weights_TK.unsqueeze(-1)).sum(dim=1).to(hidden_TD.dtype)

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        """Every rank's ``[E]``, int64 ``[R, E]``."""
        counts_RE = counts_E.new_empty(self._num_ranks, counts_E.shape[0])
        dist.all_gather(list(counts_RE), counts_E, group=self._group)
        return counts_RE

    def _exchange_counts(self, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        """Rows sent to each slot, and rows that each rank sends to this rank's slots, int64 ``[P]`` both."""
        sent_P = slots_N.new_zeros(self._num_ranks * self._slots_per_rank)
        sent_P.scatter_add_(0, slots_N, torch.ones_like(slots_N))
        received_P = torch.empty_like(sent_P)
        dist.all_to_all_single(received_P, sent_P, group=self._group)
        return sent_P, received_P

    def _split_sizes(self, sent_P: Tensor, received_P: Tensor) -> tuple[list[int], list[int], list[int], Tensor]:
        """Rows sent to and received from each rank, rows of each local slot, and the local slot of each arriving row.

        The one host sync of a dispatch: torch.distributed takes split sizes as host integers.
        """
        ranks, slots = self._num_ranks, self._slots_per_rank
        received_RS = received_P.view(ranks, slots)
        by_rank = (sent_P.view(ranks, slots).sum(dim=1), received_RS.sum(dim=1))
        sizes: list[int] = torch.cat((*by_rank, received_RS.sum(dim=0))).tolist()
        sent, received, rows_S = sizes[:ranks], sizes[ranks : 2 * ranks], sizes[2 * ranks :]
        local_slot_P = torch.arange(slots, device=sent_P.device).repeat(ranks)
        return sent, received, rows_S, local_slot_P.repeat_interleave(received_P, output_size=sum(received))


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.shape[0], device=permutation.device)
    return inverse


class _AllToAll(torch.autograd.Function):
    """Rows grouped by destination rank -> rows grouped by source rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _Spread(torch.autograd.Function):
    """Each token's hidden state once per choice, in ``order``. Backward sums a token's choices in the router's order,
    which index_select's own backward would do in the order of the slots."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, order_N: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.top_k = top_k
        return hidden_TD.index_select(0, order_N // top_k)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (order_N,) = ctx.saved_tensors
        grad_TKD = torch.empty_like(grad_ND).index_copy_(0, order_N, grad_ND)
        return grad_TKD.view(grad_ND.shape[0] // ctx.top_k, ctx.top_k, grad_ND.shape[1]).sum(dim=1), None, None


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient goes back by a copy, since no row appears twice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Tensor) -> Tensor:
        ctx.save_for_backward(permutation)
        return rows.index_select(0, permutation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (permutation,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, permutation, grad), None
