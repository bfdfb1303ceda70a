"""Dispatch over torch.distributed's all-to-all: uneven splits, empty ranks, exact.

Exactness (the order of every sum is independent of where experts stand): a slot's rows come ordered by (source rank,
position in the source's batch); the K results of a token are summed in the router's order, and so are the K gradients
of its hidden state.

Two ways carry everything. To the experts: choices by slot -> exchange -> rows by slot. To the tokens: the same
backwards. Dispatch goes the first, combine the second, and each one's gradient the other. Rows that stay on this rank
do not enter the exchange. (N = T * K choices; the suffixes of `base.py` besides.)
"""

from __future__ import annotations

from collections.abc import Callable
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
        place_TK: int64 ``[T, K]``, where each choice lies on the tokens' side.
        arrived_M: int64, for each row by slot: where it arrives.
        slot_place_M: int64, for each row as it arrives: its place by slot.
        own: rows that stay on this rank.
        sent, received: rows for and from each rank, without those.
        counts_S: rows by slot.
    """

    choice_N: Tensor
    token_N: Tensor
    place_TK: Tensor
    arrived_M: Tensor
    slot_place_M: Tensor
    own: int
    sent: list[int]
    received: list[int]
    counts_S: SlotCounts


@dataclass(frozen=True, eq=False)
class _Handle(Handle):
    """``weighed_by_experts``: gradients go back unweighted."""

    weighed_by_experts: bool


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
        slots_TK: Tensor | None,
        weights_TK: Tensor,
        *,
        counts: RowCounts | None = None,
        manifest: _Manifest | None = None,
    ) -> Dispatched:
        if manifest is None:
            assert slots_TK is not None
            manifest = self._manifest(slots_TK, counts)
        weights_M: Tensor | None = None
        if torch.is_grad_enabled() and weights_TK.requires_grad:
            rows_MD, weights_M = _Dispatch.apply(hidden_TD, weights_TK, manifest, self)
            weights_TK = weights_TK.detach()
        else:
            rows_MD, _ = _Dispatch.apply(hidden_TD, None, manifest, self)
        handle = _Handle(weights_TK, hidden_TD.dtype, manifest, weights_M is not None)
        return Dispatched(rows_MD, manifest.counts_S, weights_M, handle, None)

    def combine(self, out_MD: Tensor, handle: Handle) -> Tensor:
        combined_TD: Tensor = _Combine.apply(out_MD, handle, self)
        return combined_TD

    # -- the two ways --------------------------------------------------------------------------------------------

    def to_experts(self, rows: _Rows, manifest: _Manifest) -> Callable[[], Tensor]:
        """Send a row for each choice of this rank's tokens.

        Returns:
            A function that waits for them and gives ``[M, D]``, by slot.
        """
        own = manifest.own
        there_MD = self._memory.like(rows.source, own + sum(manifest.received), rows.dtype)
        sent = self._memory.like(rows.source, rows.index_N.shape[0] - own, rows.dtype)
        rows.fill(sent, slice(own, None), self._memory)
        work = self._exchange(there_MD[own:], sent, manifest.received, manifest.sent)
        rows.fill(there_MD[:own], slice(own), self._memory)

        def arrived() -> Tensor:
            _wait(work, sent)
            by_slot_MD = self._memory.like(there_MD, there_MD.shape[0])
            permute.gather(there_MD, manifest.arrived_M, by_slot_MD)
            return by_slot_MD

        return arrived

    def to_tokens(self, rows_MD: Tensor, manifest: _Manifest) -> Callable[[], Tensor]:
        """Send rows back to where their tokens are.

        Returns:
            A function that waits for them and gives ``[N, D]``; ``place_TK`` says which choice lies where.
        """
        rows_MD = rows_MD.contiguous()
        own, slot_place_M = manifest.own, manifest.slot_place_M
        back_ND = self._memory.like(rows_MD, own + sum(manifest.sent))
        sent = self._memory.like(rows_MD, rows_MD.shape[0] - own)
        permute.gather(rows_MD, slot_place_M[own:], sent)
        work = self._exchange(back_ND[own:], sent, manifest.sent, manifest.received)
        permute.gather(rows_MD, slot_place_M[:own], back_ND[:own])

        def arrived() -> Tensor:
            _wait(work, sent)
            return back_ND

        return arrived

    def sum_choices(self, rows_ND: Tensor, manifest: _Manifest, weights_TK: Tensor | None = None) -> Tensor:
        return permute.sum_choices(rows_ND, manifest.place_TK, self._memory, weights_TK)

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
            place_TK=permute.inverse(choice_N).view(slots_TK.shape),
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


@dataclass(frozen=True, eq=False)
class _Rows:
    """A row of ``source`` ``[*, D]`` for each choice, times its weight if there are any, in ``dtype``."""

    source: Tensor
    index_N: Tensor
    dtype: torch.dtype
    weights_N: Tensor | None = None

    def fill(self, out: Tensor, part: slice, memory: RowMemory) -> None:
        if self.weights_N is None:
            permute.gather(self.source, self.index_N[part], out)
        else:
            permute.gather_weighted(self.source, self.index_N[part], self.weights_N[part], out, memory)


def _wait(work: dist.Work | None, sent: Tensor) -> None:
    """``sent`` is named so that it stays while it is read."""
    if work is not None:
        work.wait()


class _Dispatch(torch.autograd.Function):
    """Hidden states, and router weights if they travel. Backward sums the gradients of a token's choices in the
    router's order."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weights_TK: Tensor | None, manifest: _Manifest, wire: AllToAll
    ) -> tuple[Tensor, Tensor | None]:
        ctx.manifest, ctx.wire = manifest, wire
        rows = wire.to_experts(_Rows(hidden_TD.contiguous(), manifest.token_N, hidden_TD.dtype), manifest)
        if weights_TK is None:
            return rows(), None
        weights = wire.to_experts(_Rows(weights_TK.reshape(-1, 1), manifest.choice_N, weights_TK.dtype), manifest)
        rows_MD, weights_M1 = rows(), weights()
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(rows_MD)
        return rows_MD, weights_M1.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor, grad_M: Tensor | None) -> tuple[Tensor | None, ...]:
        manifest, wire = ctx.manifest, ctx.wire
        hidden_need, weights_need, *_ = ctx.needs_input_grad
        rows = wire.to_tokens(grad_MD, manifest) if hidden_need else None
        weights = wire.to_tokens(grad_M.unsqueeze(1), manifest) if weights_need and grad_M is not None else None
        return (
            None if rows is None else wire.sum_choices(rows(), manifest),
            None if weights is None else weights().squeeze(1)[manifest.place_TK],
            None,
            None,
        )


class _Combine(torch.autograd.Function):
    """The weighted sum of a token's results, none of which is kept."""

    @staticmethod
    def forward(ctx: Any, out_MD: Tensor, handle: _Handle, wire: AllToAll) -> Tensor:
        ctx.handle, ctx.wire, ctx.dtype = handle, wire, out_MD.dtype
        out_ND = wire.to_tokens(out_MD, handle.manifest)()
        return wire.sum_choices(out_ND, handle.manifest, handle.weights).to(handle.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        handle = ctx.handle
        weights_N, dtype = None, ctx.dtype
        if not handle.weighed_by_experts:
            weights_N = handle.weights.reshape(-1).index_select(0, handle.manifest.choice_N)
            dtype = torch.promote_types(dtype, weights_N.dtype)
        rows = _Rows(grad_TD.to(dtype).contiguous(), handle.manifest.token_N, ctx.dtype, weights_N)
        return ctx.wire.to_experts(rows, handle.manifest)(), None, None
