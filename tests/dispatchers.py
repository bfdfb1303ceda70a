"""Another dispatcher behind the same seam: a token goes once to each rank, results are reduced there.

Slow and simple - everything is on every rank - but it does what a kernel of that kind does: router weights travel with
the rows, nobody on the host knows how many rows a slot has, and sums depend on where experts stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from eplb_runtime.moe.dispatch.base import DispatchContext, Dispatcher, DispatchMetadata
from eplb_runtime.moe.experts.compute import SlotCounts
from eplb_runtime.moe.routing.splitter import RowCounts


@dataclass(frozen=True, eq=False)
class Places(DispatchMetadata):
    """For each row that is computed here its token and its choice among all ranks', and how long a rank's batch is."""

    token_M: Tensor
    choice_M: Tensor
    counts_S: SlotCounts
    tokens: int
    top_k: int
    most_tokens: int


class ByRank(Dispatcher):
    combine_order: ClassVar[Literal["logical", "by_rank"]] = "by_rank"

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self.group = context.group
        self.slots = context.slots_per_rank

    def plan(self, slots_TK: Tensor, counts: RowCounts | None = None) -> Places:
        tokens, top_k = slots_TK.shape
        longest = torch.tensor(tokens)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.group)
        slot_N = self.everywhere(slots_TK + 1, int(longest)).reshape(-1) - 1 - self.group.rank() * self.slots
        choice_M = torch.nonzero((slot_N >= 0) & (slot_N < self.slots)).squeeze(1)
        choice_M = choice_M[slot_N[choice_M].argsort(stable=True)]
        ends = slot_N[choice_M].bincount(minlength=self.slots).cumsum(0).int()
        return Places(choice_M // top_k, choice_M, SlotCounts(ends, None), tokens, top_k, int(longest))

    def dispatch_rows(
        self, hidden_TD: Tensor, weights_TK: Tensor | None, metadata: Places
    ) -> tuple[Tensor, Tensor | None, SlotCounts, Places]:
        assert weights_TK is not None
        rows_MD = self.everywhere(hidden_TD, metadata.most_tokens)[metadata.token_M]
        weights_M = self.everywhere(weights_TK, metadata.most_tokens).reshape(-1)[metadata.choice_M]
        return rows_MD, weights_M, metadata.counts_S, metadata

    def combine_rows(self, out_MD: Tensor, weights: Tensor, metadata: Places) -> Tensor:
        return self.summed((out_MD * weights.unsqueeze(1)).to(out_MD.dtype), metadata)

    def combine_gradients(
        self, grad_MD: Tensor, grad_M: Tensor | None, metadata: Places, hidden_needed: bool
    ) -> tuple[Tensor, Tensor | None]:
        hidden_TD = self.summed(grad_MD, metadata)
        if grad_M is None:
            return hidden_TD, None
        choices = grad_M.new_zeros(self.group.size() * metadata.most_tokens * metadata.top_k)
        choices.index_add_(0, metadata.choice_M, grad_M)
        return hidden_TD, self.reduced(choices.view(-1, metadata.top_k), metadata.tokens)

    def dispatch_gradients(self, grad_TD: Tensor, metadata: Places) -> Tensor:
        return self.everywhere(grad_TD.contiguous(), metadata.most_tokens)[metadata.token_M]

    def everywhere(self, mine: Tensor, most: int) -> Tensor:
        """``[R * most, ...]``: every rank's rows, each rank's filled up with zeros."""
        every = mine.new_zeros(self.group.size(), most, *mine.shape[1:])
        every[self.group.rank(), : mine.shape[0]] = mine
        dist.all_reduce(every, group=self.group)
        return every.flatten(0, 1)

    def summed(self, rows_MD: Tensor, metadata: Places) -> Tensor:
        """The sum of each of this rank's tokens over its rows on all ranks."""
        sums = rows_MD.new_zeros(self.group.size() * metadata.most_tokens, rows_MD.shape[1])
        return self.reduced(sums.index_add_(0, metadata.token_M, rows_MD), metadata.tokens)

    def reduced(self, sums: Tensor, tokens: int) -> Tensor:
        """This rank's rows of the sum over ranks of ``[R * most, ...]``."""
        dist.all_reduce(sums, group=self.group)
        return sums.view(self.group.size(), -1, *sums.shape[1:])[self.group.rank(), :tokens].clone()
