"""Dispatch over torch.distributed's all-to-all: uneven splits, empty ranks, exact.

Exactness (the order of every sum is independent of where experts stand): a slot's rows come ordered by (source rank,
position in the source's batch); the K results of a token are summed in the router's order, and so are the K gradients
of its hidden state.

Two ways carry everything. To the experts: choices by slot -> exchange -> rows by slot. To the tokens: the same
backwards. Dispatch goes the first, combine the second, and each one's gradient the other. Rows that stay on this rank
do not enter the exchange. (N = T * K choices; the suffixes of `base.py` besides.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..experts.compute import SlotCounts
from ..routing.splitter import RowCounts
from . import permute
from .base import Dispatched, Dispatcher, Handle
from .memory import RowMemory


@dataclass(frozen=True, eq=False)
class _Manifest:
    """Which row goes where.

    On the tokens' side rows lie as they are sent: those for this rank first, then by rank; on the way they lie at the
    experts' side as they arrive: those of this rank first, then by rank.

    Args:
        choice_N: int64, the choice of each row on the tokens' side.
        token_N: int64, its token.
        place_KT: int64 ``[K, T]``, where each choice lies on the tokens' side.
        arrived_M: int64, for each row by slot: where it arrives.
        slot_place_M: int64, for each row as it arrives: its place by slot.
        own: rows that stay on this rank.
        sent, received: rows for and from each rank, without those.
        counts_S: rows by slot.
    """

    choice_N: Tensor
    token_N: Tensor
    place_KT: Tensor
    arrived_M: Tensor
    slot_place_M: Tensor
    own: int
    sent: list[int]
    received: list[int]
    counts_S: SlotCounts


class AllToAll(Dispatcher):
    """Dispatch and combine for one EP group.

    Args:
        group: the EP group, on the tokens' device; nobody else has tensors on their way there meanwhile.
        slots_per_rank: S.
    """

    combine_order: ClassVar[Literal["logical", "by_rank"]] = "logical"

    def __init__(self, group: dist.ProcessGroup, slots_per_rank: int) -> None:
        self._group = group
        self._rank = group.rank()
        self._num_ranks = group.size()
        self._slots_per_rank = slots_per_rank
        self._memory = RowMemory()

    def dispatch(
        self,
        hidden_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        *,
        counts: RowCounts | None = None,
        manifest: _Manifest | None = None,
    ) -> Dispatched:
        if manifest is None:
            manifest = self._manifest(slots_TK, counts)
        rows_MD = _Dispatch.apply(hidden_TD, manifest, self)
        return Dispatched(rows_MD, manifest.counts_S, None, Handle(weights_TK, hidden_TD.dtype, manifest), None)

    def combine(self, out_MD: Tensor, handle: Handle) -> Tensor:
        combined_TD: Tensor = _Combine.apply(out_MD, handle.weights_TK, handle.manifest, handle.dtype, self)
        return combined_TD

    # -- the two ways --------------------------------------------------------------------------------------------

    def to_experts(
        self, source_TD: Tensor, manifest: _Manifest, dtype: torch.dtype, weights_TK: Tensor | None = None
    ) -> Tensor:
        """A row for each choice of each rank's tokens, times its weight, ``[M, D]`` in ``dtype``, by slot."""
        source_TD = source_TD.contiguous()
        weights_N = None if weights_TK is None else weights_TK.reshape(-1).index_select(0, manifest.choice_N)
        own, token_N = manifest.own, manifest.token_N
        there_MD = self._memory.like(source_TD, own + sum(manifest.received), dtype)
        sent = self._memory.like(source_TD, token_N.shape[0] - own, dtype)

        def fill(out: Tensor, part: slice) -> None:
            if weights_N is None:
                permute.gather(source_TD, token_N[part], out)
            else:
                permute.gather_weighted(source_TD, token_N[part], weights_N[part], out, self._memory)

        fill(sent, slice(own, None))
        work = self._exchange(there_MD[own:], sent, manifest.received, manifest.sent)
        fill(there_MD[:own], slice(own))
        if work is not None:
            work.wait()
        rows_MD = self._memory.like(there_MD, there_MD.shape[0])
        permute.gather(there_MD, manifest.arrived_M, rows_MD)
        return rows_MD

    def to_tokens(self, rows_MD: Tensor, manifest: _Manifest) -> Tensor:
        """The row of each choice of this rank's tokens, ``[N, D]``; ``place_KT`` says which lies where."""
        rows_MD = rows_MD.contiguous()
        own, slot_place_M = manifest.own, manifest.slot_place_M
        back_ND = self._memory.like(rows_MD, own + sum(manifest.sent))
        sent = self._memory.like(rows_MD, rows_MD.shape[0] - own)
        permute.gather(rows_MD, slot_place_M[own:], sent)
        work = self._exchange(back_ND[own:], sent, manifest.sent, manifest.received)
        permute.gather(rows_MD, slot_place_M[:own], back_ND[:own])
        if work is not None:
            work.wait()
        return back_ND

    def sum_choices(self, rows_ND: Tensor, manifest: _Manifest, weights_TK: Tensor | None = None) -> Tensor:
        return permute.sum_choices(rows_ND, manifest.place_KT, self._memory, weights_TK)

    def dot_choices(self, rows_ND: Tensor, manifest: _Manifest, other_TD: Tensor) -> Tensor:
        return permute.dot_choices(rows_ND, manifest.place_KT, other_TD, self._memory)

    def _exchange(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> dist.Work | None:
        if self._num_ranks == 1:
            return None
        return dist.all_to_all_single(out, rows, received, sent, group=self._group, async_op=True)

    # -- what goes where -----------------------------------------------------------------------------------------

    def _manifest(self, slots_TK: Tensor, counts: RowCounts | None) -> _Manifest:
        ranks, slots, me = self._num_ranks, self._slots_per_rank, self._rank
        slots_N = slots_TK.reshape(-1)
        if counts is None:
            counts = self._exchange_counts(slots_N)
        choice_N = permute.order_by_slot(slots_N, me * slots, slots, ranks * slots)
        sent_R = counts.sent_P.reshape(ranks, slots).sum(axis=1)
        received_R = counts.received_RS.sum(axis=1)
        own = int(sent_R[me])
        sent_R[me] = received_R[me] = 0
        arrived_M, slot_place_M = permute.regroup(counts.received_RS, me, slots_TK.device)
        return _Manifest(
            choice_N=choice_N,
            token_N=choice_N // slots_TK.shape[1],
            place_KT=permute.inverse(choice_N).view(slots_TK.shape).t().contiguous(),
            arrived_M=arrived_M,
            slot_place_M=slot_place_M,
            own=own,
            sent=sent_R.tolist(),
            received=received_R.tolist(),
            counts_S=SlotCounts.of(counts.received_RS.sum(axis=0).tolist(), slots_TK.device),
        )

    def _exchange_counts(self, slots_N: Tensor) -> RowCounts:
        """The one host sync of a dispatch without known counts: torch.distributed takes sizes as host integers."""
        sent_P = permute.count(slots_N, self._num_ranks * self._slots_per_rank)
        received_P = torch.empty_like(sent_P)
        dist.all_to_all_single(received_P, sent_P, group=self._group)
        both: NDArray[np.int64] = torch.stack([sent_P, received_P]).cpu().numpy()
        return RowCounts(both[0], both[1].reshape(self._num_ranks, self._slots_per_rank))


class _Dispatch(torch.autograd.Function):
    """Backward sums the gradients of a token's choices in the router's order."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, manifest: _Manifest, wire: AllToAll) -> Tensor:
        ctx.manifest, ctx.wire, ctx.dtype = manifest, wire, hidden_TD.dtype
        return wire.to_experts(hidden_TD, manifest, hidden_TD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
        grad_ND = ctx.wire.to_tokens(grad_MD, ctx.manifest)
        return ctx.wire.sum_choices(grad_ND, ctx.manifest).to(ctx.dtype), None, None


class _Combine(torch.autograd.Function):
    """The weighted sum of a token's results. They are kept for the gradient of the weights, and only for it."""

    @staticmethod
    def forward(
        ctx: Any, out_MD: Tensor, weights_TK: Tensor, manifest: _Manifest, dtype: torch.dtype, wire: AllToAll
    ) -> Tensor:
        out_ND = wire.to_tokens(out_MD, manifest)
        ctx.manifest, ctx.wire = manifest, wire
        ctx.save_for_backward(weights_TK, out_ND if ctx.needs_input_grad[1] else None)
        ctx.out_dtype = out_MD.dtype
        return wire.sum_choices(out_ND, manifest, weights_TK).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        weights_TK, out_ND = ctx.saved_tensors
        grad_TD = grad_TD.to(torch.promote_types(ctx.out_dtype, weights_TK.dtype))
        grad_out_MD = grad_weights_TK = None
        if ctx.needs_input_grad[1]:
            grad_weights_TK = ctx.wire.dot_choices(out_ND, ctx.manifest, grad_TD).to(weights_TK.dtype)
        if ctx.needs_input_grad[0]:
            grad_out_MD = ctx.wire.to_experts(grad_TD, ctx.manifest, ctx.out_dtype, weights_TK)
        return grad_out_MD, grad_weights_TK, None, None, None
