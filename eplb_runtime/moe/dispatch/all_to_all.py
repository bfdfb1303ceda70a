"""Dispatch over torch.distributed's all-to-all: uneven splits, empty ranks, exact.

Exactness (the order of each sum is independent of the placement): a slot's rows come ordered by (source rank, position
in the source's batch); the K results of a token are summed in the router's order, and so are the K gradients of its
hidden state.

A row for each choice, or one for each rank that a token visits, goes to the experts; a result, or gradient, of each
choice comes back. Rows that stay on this rank skip the exchange: on either side they come first, the others by rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..experts.compute import SlotCounts
from ..routing.water_filling import RowCounts
from . import permute
from .base import DispatchContext, Dispatcher, DispatchMetadata


@dataclass(frozen=True, eq=False)
class AllToAllSplits:
    """One exchange of rows between ranks: U are sent, local rows first, then by rank.

    Args:
        index_U: int64, the source row of each; None: every row, in order.
        num_local_rows: rows that stay on this rank.
        sent, received: rows for and from each rank, without local ones.
    """

    index_U: Tensor | None
    num_local_rows: int
    sent: list[int]
    received: list[int]

    @property
    def num_received_rows(self) -> int:
        """Return how many rows this rank has after the exchange, those that stay on it included."""
        return self.num_local_rows + sum(self.received)

    @classmethod
    def of(cls, index_U: Tensor, sent_R: NDArray[np.int64], received_R: NDArray[np.int64], rank: int) -> Self:
        """Return the exchange of rows ``index_U``. ``sent_R``, ``received_R``: all rows; those at ``rank`` stay."""
        sent, received = sent_R.tolist(), received_R.tolist()
        num_local_rows = sent[rank]
        sent[rank] = received[rank] = 0
        return cls(index_U, num_local_rows, sent, received)

    def reversed(self, index_U: Tensor | None) -> "AllToAllSplits":
        """Return the exchange in the other direction. ``index_U``: source row of each; None: every row, in order."""
        return AllToAllSplits(index_U, self.num_local_rows, self.received, self.sent)


class RowRouting(NamedTuple):
    """The exchange of tokens or choices, and for each row by slot its place among those received."""

    splits: AllToAllSplits
    received_row_M: Tensor


@dataclass(frozen=True, eq=False)
class AllToAllMetadata(DispatchMetadata):
    """Which row goes where.

    Args:
        choices: routing of values that each choice has: its router weight, and its result on the way back.
        tokens: routing of values that each token has: its hidden state, the gradient of its output. Between nodes
            (``across``), from the rank that forwards the token.
        place_TK: int64 ``[T, K]``, the place of each choice among those sent.
        slot_place_M: int64, for each choice as it arrives its place by slot; None: they arrive so.
        counts_S: rows by slot.
        across: tokens of this rank, to the rank of its place on each node; None: no nodes.
        sums: where tokens are summed by rank: places of the rows by slot of each token that visited this rank, of those
            that come back of each that it forwarded, and of each of its own; -1: none. None: logical order.
    """

    choices: RowRouting
    tokens: RowRouting
    place_TK: Tensor
    slot_place_M: Tensor | None
    counts_S: SlotCounts
    across: AllToAllSplits | None = None
    sums: tuple[Tensor, Tensor, Tensor] | None = None


class AllToAll(Dispatcher):
    """Dispatch and combine for one EP group. Counts have a group of their own: there all messages have one size, so
    ranks that are not in the same forward or backward wait for each other. In a group of one rank rows are only
    permuted by slot, each choice is a row, and no size depends on a value: no host sync; CUDA graphs can capture it."""

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self._deduplicates: dict[dist.ProcessGroup, bool] = {}

    def plan(self, slots_TK: Tensor, counts: RowCounts | None = None) -> AllToAllMetadata:
        if self._num_ranks == 1:
            leaving, local = self._leaving(slots_TK), AllToAllSplits(None, slots_TK.numel(), [0], [0])
            routing = RowRouting(local, leaving.choice_N), RowRouting(local, leaving.token_N)
            ends_S = leaving.counts_2RW[0, 0].cumsum(0, dtype=torch.int32)
            counts_S = SlotCounts(ends_S, None if counts is None else counts.sent_P.tolist())
            return AllToAllMetadata(*routing, leaving.place_TK, None, counts_S)
        dedup = self._sends_tokens_once(slots_TK)
        if dedup or counts is None:  # known counts are of choices, and say nothing of tokens
            leaving = self._leaving(slots_TK, dedup, self.forward_tag.value)
            return self._metadata(leaving, *self._exchange_counts(leaving.counts_2RW))
        sent_RS = counts.sent_P.reshape(-1, self._slots_per_rank)
        return self._metadata(self._leaving(slots_TK), np.stack([sent_RS, counts.received_RS]), None)

    def _metadata(
        self, leaving: permute.Leaving, both_2RW: NDArray[np.int64], received_RW: Tensor | None
    ) -> AllToAllMetadata:
        """Return which row goes where, by what goes to each rank and comes from it (``received_RW``: on the device)."""
        slots, rank, choice_N = self._slots_per_rank, self._rank, leaving.choice_N
        sent_R, received_R = both_2RW[:, :, :slots].sum(axis=2)
        choices = AllToAllSplits.of(choice_N, sent_R, received_R, rank)
        tokens, source_row_M1 = replace(choices, index_U=leaving.token_N), None
        if leaving.source_row_N1 is not None:
            sent_R, received_R = both_2RW[:, :, slots]
            tokens = AllToAllSplits.of(leaving.token_N[: int(sent_R.sum())], sent_R, received_R, rank)
            source_row_M1 = self._to_ranks(leaving.source_row_N1, replace(choices, index_U=None))()
        arriving = self.kernels.arriving(both_2RW[1], rank, slots, choice_N.device, source_row_M1, received_RW)
        counts_S = SlotCounts(arriving.ends_S, both_2RW[1, :, :slots].sum(axis=0).tolist())
        routing = RowRouting(choices, arriving.arrived_M), RowRouting(tokens, arriving.row_M)
        return AllToAllMetadata(*routing, leaving.place_TK, arriving.slot_place_M, counts_S)

    def to_experts(
        self, source_TD: Tensor, weights_TK: Tensor | None, metadata: AllToAllMetadata, *, gradients: bool = False
    ) -> tuple[Tensor, Tensor | None, SlotCounts, DispatchMetadata]:
        tokens, choices, across = metadata.tokens, metadata.choices, metadata.across
        rows = self._to_ranks(source_TD.contiguous(), across or tokens.splits)
        weights = None if weights_TK is None else self._to_ranks(weights_TK.reshape(-1, 1), choices.splits)
        if across is not None:
            rows = self._to_ranks(rows(), tokens.splits)
        rows_MD = self._by_slot(rows(), tokens)
        weights_M = None if weights is None else self._by_slot(weights(), choices).squeeze(1)
        return rows_MD, weights_M, metadata.counts_S, metadata

    def to_tokens(
        self, rows_MD: Tensor, weights: Tensor | None, grad_M: Tensor | None, metadata: AllToAllMetadata
    ) -> tuple[Tensor, Tensor | None]:
        place_TK, sums, dtype = metadata.place_TK, metadata.sums, rows_MD.dtype
        back = metadata.choices.splits.reversed(metadata.slot_place_M)
        if sums is None:
            rows = self._to_ranks(rows_MD.contiguous(), back)
        else:
            of_tokens = self.kernels.sum_local_choices(rows_MD, sums[0], weights, dtype)
            rows = self._to_ranks(of_tokens, metadata.tokens.splits.reversed(None))
        grads = None if grad_M is None else self._to_ranks(grad_M.unsqueeze(1), back)
        if sums is None:
            sum_TD = self.kernels.sum_choices(rows(), place_TK, self._memory, weights)
        else:
            assert metadata.across is not None
            of_nodes = self.kernels.sum_local_choices(rows(), sums[1], None, dtype)
            rows = self._to_ranks(of_nodes, metadata.across.reversed(None))
            sum_TD = self.kernels.sum_local_choices(rows(), sums[2], None, dtype)
        return sum_TD, None if grads is None else grads().squeeze(1)[place_TK]

    def _leaving(self, slots_TK: Tensor, dedup: bool = False, tag: int | None = None) -> permute.Leaving:
        return self.kernels.leaving(slots_TK, self._rank, self._num_ranks, self._slots_per_rank, dedup=dedup, tag=tag)

    def _by_slot(self, received: Tensor, routing: RowRouting) -> Tensor:
        out = self._memory.like(received, routing.received_row_M.shape[0])
        return torch.index_select(received, 0, routing.received_row_M, out=out)

    def _to_ranks(self, source: Tensor, splits: AllToAllSplits) -> Callable[[], Tensor]:
        """Send rows of ``source`` ``[*, D]``; waiting returns those received: local ones first, then by rank."""
        local, index_U = splits.num_local_rows, splits.index_U
        if index_U is None and self._num_ranks == 1:
            return lambda: source
        received = self._memory.like(source, splits.num_received_rows)
        leaving = source[local:]
        if index_U is not None:
            leaving = self._memory.like(source, index_U.shape[0] - local)
            torch.index_select(source, 0, index_U[local:], out=leaving)
        group = self.channels.current().tokens
        with self.channels.launching():
            work = dist.all_to_all_single(
                received[local:], leaving, splits.received, splits.sent, group=group, async_op=True
            )
        if index_U is None:
            received[:local].copy_(source[:local])
        else:
            torch.index_select(source, 0, index_U[:local], out=received[:local])

        def wait(sent: Tensor = leaving) -> Tensor:  # which lives while it is read
            work.wait()
            return received

        return wait

    def _sends_tokens_once(self, slots_TK: Tensor) -> bool:
        """Return whether a token goes once to each rank where it has choices, not once for each choice, by the ranks
        that evenly spread choices would visit. A channel's first batch decides, before which tags are compared: counts
        have one size then, whatever top-k a later batch has. Channels differ in which batch is first."""
        group, ranks, top_k = self.channels.current().counts, self._num_ranks, slots_TK.shape[1]
        if group not in self._deduplicates:
            # Sending each token once to a rank costs a small exchange that names each choice's row.
            self._deduplicates[group] = top_k >= 1.2 * ranks * (1 - (1 - 1 / ranks) ** top_k)
            self.gather_counts(slots_TK.new_empty(0, dtype=torch.int64))
        return self._deduplicates[group]

    def _exchange_counts(self, counts_2RW: Tensor) -> tuple[NDArray[np.int64], Tensor]:
        """Return int64 ``[2, R, W]``, sent to each rank and received from it, and the latter on the device. One host
        sync: torch.distributed takes sizes as host integers."""
        with self.channels.launching():
            dist.all_to_all_single(counts_2RW[1], counts_2RW[0], group=self.channels.current().counts)
        both: NDArray[np.int64] = counts_2RW.cpu().numpy()
        self.forward_tag.check(both[1, :, -1])
        return both, counts_2RW[1]
