"""Another dispatcher behind the same seam: a token goes once to each rank, results are reduced there.

Slow and simple - everything is on every rank - but it does what a kernel of that kind does: router weights travel with
the rows, nobody on the host knows how many rows a slot has, and sums depend on where experts stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from eplb_runtime.moe.dispatch.base import Dispatched, Dispatcher, Handle
from eplb_runtime.moe.experts.compute import SlotCounts
from eplb_runtime.moe.routing.splitter import RowCounts


@dataclass(frozen=True, eq=False)
class Places:
    """For each row that is computed here its token and its choice among all ranks', and how long a rank's batch is."""

    token_M: Tensor
    choice_M: Tensor
    counts_S: SlotCounts
    tokens: int
    most_tokens: int


class ByRank(Dispatcher):
    combine_order: ClassVar[Literal["logical", "by_rank"]] = "by_rank"

    def __init__(self, group: dist.ProcessGroup, slots_per_rank: int) -> None:
        self.group = group
        self.slots = slots_per_rank

    def dispatch(
        self,
        hidden_TD: Tensor,
        slots_TK: Tensor | None,
        weights_TK: Tensor,
        *,
        counts: RowCounts | None = None,
        manifest: Places | None = None,
    ) -> Dispatched:
        if manifest is None:
            assert slots_TK is not None
            manifest = self._places(slots_TK)
        rows_MD = _Pull.apply(hidden_TD, manifest.token_M, manifest.most_tokens, self)
        weights_M = _Pull.apply(
            weights_TK.reshape(-1, 1), manifest.choice_M, manifest.most_tokens * weights_TK.shape[1], self
        )
        weights_M = weights_M.squeeze(1)
        return Dispatched(rows_MD, manifest.counts_S, weights_M, Handle(weights_M.detach(), hidden_TD.dtype, manifest))

    def combine(self, out_MD: Tensor, handle: Handle) -> Tensor:
        return _Push.apply(out_MD, handle, self)

    def everywhere(self, mine: Tensor, most: int) -> Tensor:
        """``[R * most, ...]``: every rank's rows, each rank's filled up with zeros."""
        every = mine.new_zeros(self.group.size(), most, *mine.shape[1:])
        every[self.group.rank(), : mine.shape[0]] = mine
        dist.all_reduce(every, group=self.group)
        return every.flatten(0, 1)

    def summed(self, parts: Tensor, tokens: int) -> Tensor:
        """This rank's rows of the sum over ranks of ``[R * most, ...]``."""
        dist.all_reduce(parts, group=self.group)
        return parts.view(self.group.size(), -1, *parts.shape[1:])[self.group.rank(), :tokens].clone()

    def _places(self, slots_TK: Tensor) -> Places:
        tokens, top_k = slots_TK.shape
        longest = torch.tensor(tokens)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.group)
        slot_N = self.everywhere(slots_TK + 1, int(longest)).reshape(-1) - 1 - self.group.rank() * self.slots
        choice_M = torch.nonzero((slot_N >= 0) & (slot_N < self.slots)).squeeze(1)
        choice_M = choice_M[slot_N[choice_M].argsort(stable=True)]
        ends = slot_N[choice_M].bincount(minlength=self.slots).cumsum(0).int()
        return Places(choice_M // top_k, choice_M, SlotCounts(ends, None), tokens, int(longest))


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, index_M: Tensor, most: int, wire: ByRank) -> Tensor:
        ctx.index_M, ctx.most, ctx.wire, ctx.rows = index_M, most, wire, mine.shape[0]
        return wire.everywhere(mine, most)[index_M]

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        parts = grad_MD.new_zeros(ctx.wire.group.size() * ctx.most, grad_MD.shape[1])
        parts.index_add_(0, ctx.index_M, grad_MD)
        return ctx.wire.summed(parts, ctx.rows), None, None, None


class _Push(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_MD: Tensor, handle: Handle, wire: ByRank) -> Tensor:
        places: Places = handle.manifest
        ctx.places, ctx.wire, ctx.dtype = places, wire, out_MD.dtype
        parts = out_MD.new_zeros(wire.group.size() * places.most_tokens, out_MD.shape[1])
        parts.index_add_(0, places.token_M, (out_MD * handle.weights.unsqueeze(1)).to(out_MD.dtype))
        return wire.summed(parts, places.tokens).to(handle.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        every = ctx.wire.everywhere(grad_TD.contiguous(), ctx.places.most_tokens)
        return every[ctx.places.token_M].to(ctx.dtype), None, None
