"""Dispatch over DeepEP's kernels, which send rows from GPU to GPU without the host.

Two orders of a token's sum. `DeepEPDispatcher` is exact as `all_to_all` is: each choice is a row of its own with one
expert, so results come back one for each choice, and are weighted and summed here in the router's order. `DeepEPByRank`
is what such kernels are made for: a token goes to each rank once, results are weighted and summed there, and over ranks
on the way back: fewer bytes both ways, and sums that depend on the placement.

How the package wants to be called: `deepep_buffer.py`; what is in a row: `row_bytes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...config import ConfigError, DispatchConfig
from ...distributed.transports import deepep_package
from ..experts.compute import SlotCounts
from ..routing.splitter import RowCounts
from . import float8, permute, row_bytes
from .base import DispatchContext, Dispatched, Dispatcher
from .count_exchange import CountExchange
from .deepep_buffer import DeepEPBuffer, RecvCounts, RecvTokens, SendTokens
from .deepep_low_latency import LowLatency, LowLatencyLayout
from .metadata import DispatchMetadata


@dataclass(frozen=True, eq=False)
class SendLayout(DispatchMetadata):
    """A batch before its first dispatch: slots, where its rows go (None: low-latency kernels), and what arrives (None:
    DeepEP tells the host)."""

    slots_TK: Tensor
    sent: SendTokens | None
    counts: RecvCounts | None = None


@dataclass(frozen=True, eq=False)
class RecvLayout(DispatchMetadata):
    """Where the rows of one batch went.

    Args:
        handle: DeepEP's.
        counts_S: rows by slot.
        received_row_M: int64, for each row by slot the received row that it is.
        choice_M: int64, and which of the choices of all received rows.
        place_UK: int64, for each choice of a received row its place by slot; -1 where it has none here.
        top_k: K of this rank's tokens.
    """

    handle: Any
    counts_S: SlotCounts
    received_row_M: Tensor
    choice_M: Tensor
    place_UK: Tensor
    top_k: int

    @classmethod
    def of(cls, received: RecvTokens, top_k: int) -> RecvLayout:
        """Return rows by slot, those of a slot as they arrived: by source rank and position there."""
        slots_N = received.slots_UK.reshape(-1)
        here_N = slots_N >= 0
        order_N = torch.argsort(torch.where(here_N, slots_N, 1 << 30), stable=True)
        choice_M, counts_S = order_N[: sum(received.counts)], SlotCounts.of(received.counts, slots_N.device)
        place_N = torch.where(here_N, permute.inverse(order_N), -1)
        row_M, place_UK = choice_M // received.slots_UK.shape[1], place_N.view(received.slots_UK.shape)
        return cls(received.handle, counts_S, row_M, choice_M, place_UK, top_k)


class DeepEPDispatcher(Dispatcher):
    """Exact: the sum of a token's results does not depend on the placement. A process keeps DeepEP's buffers
    (`deepep_package.py`), so ``close`` frees nothing.

    Args:
        context: of an EP group on GPUs.
        config: ``sms``, ``dtype``, and ``low_latency_tokens`` are used here.

    Raises:
        ConfigError: the package is not there or cannot serve this group.
    """

    combine_order: ClassVar[Literal["logical", "by_rank"]] = "logical"

    def __init__(
        self,
        context: DispatchContext,
        config: DispatchConfig,
    ) -> None:
        super().__init__(context)
        group, slots_per_rank, channels = context.group, context.slots_per_rank, context.channels
        self._buffer = DeepEPBuffer(group, slots_per_rank, config.sms, channels)
        self._in_float8 = config.dtype == "float8"
        self._low_latency: LowLatency | None = None
        if config.low_latency_tokens:
            self._low_latency = LowLatency(group, slots_per_rank, config.low_latency_tokens, self._in_float8, channels)
        self._exchange_counts = CountExchange(channels, context.forward_tag)
        self._exchange_tokens = CountExchange(channels, context.forward_tag)

    def plan(self, slots_TK: Tensor, counts: RowCounts | None = None) -> SendLayout:
        if self._low_latency is not None and self._nothing_learns():
            # All ranks take the same kernels, also where only one has too many tokens for them.
            most = self._exchange_tokens(slots_TK.new_full((1,), slots_TK.shape[0])).max()
            if most <= self._low_latency.most_tokens:
                return SendLayout(slots_TK, None)
        with self._channels.launching():  # the first call makes the buffer with the other ranks
            sent = self._buffer.layout(self._slots_of_rows(slots_TK))
        return SendLayout(slots_TK, sent, self._recv_counts(sent, slots_TK.shape[1], counts))

    def dispatch(self, hidden_TD: Tensor, weights_TK: Tensor, metadata: DispatchMetadata) -> Dispatched:
        self.check(hidden_TD, weights_TK)
        if isinstance(metadata, SendLayout) and metadata.sent is None:
            assert self._low_latency is not None
            with self._channels.launching():
                return self._low_latency.dispatch(hidden_TD, weights_TK, metadata.slots_TK)
        return super().dispatch(hidden_TD, weights_TK, metadata)

    def combine(self, out_MD: Tensor, dispatched: Dispatched) -> Tensor:
        if isinstance(dispatched.metadata, LowLatencyLayout):
            assert self._low_latency is not None
            with self._channels.launching():
                return self._low_latency.combine(out_MD, dispatched)
        return super().combine(out_MD, dispatched)

    def dispatch_rows(
        self, hidden_TD: Tensor, weights_TK: Tensor | None, metadata: SendLayout | RecvLayout
    ) -> tuple[Tensor, Tensor | None, SlotCounts, DispatchMetadata]:
        pack = float8.pack if self._in_float8 else row_bytes.pack
        rows, layout = self._send(pack, hidden_TD, weights_TK, metadata)
        width, dtype, choices = hidden_TD.shape[1], hidden_TD.dtype, layout.place_UK.shape[1]
        if self._in_float8:
            rows_MD = float8.unpack(rows, layout.received_row_M)
        else:
            rows_MD = row_bytes.unpack(rows, layout.received_row_M, width, dtype)
        if weights_TK is None:
            return rows_MD, None, layout.counts_S, layout
        if self._in_float8:
            weights_UK = float8.unpack_weights(rows, choices, weights_TK.dtype)
        else:
            weights_UK = row_bytes.unpack_weights(rows, dtype, width, choices, weights_TK.dtype)
        return rows_MD, weights_UK.reshape(-1).index_select(0, layout.choice_M), layout.counts_S, layout

    def combine_rows(self, out_MD: Tensor, weights: Tensor, metadata: RecvLayout) -> Tensor:
        rows_ND, _ = self._choices_to_tokens(out_MD, None, metadata)
        return self._moves.sum_choices(rows_ND, _places(rows_ND, metadata), self._memory, weights)

    def combine_gradients(
        self, grad_MD: Tensor, grad_M: Tensor | None, metadata: RecvLayout, hidden_needed: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows_ND, grad_N = self._choices_to_tokens(grad_MD, grad_M, metadata)
        place_TK = _places(rows_ND, metadata)
        hidden_TD = self._moves.sum_choices(rows_ND, place_TK, self._memory)
        return hidden_TD, None if grad_N is None else grad_N.view(place_TK.shape)

    def dispatch_gradients(self, grad_TD: Tensor, metadata: RecvLayout) -> Tensor:
        rows, layout = self._send(row_bytes.pack, grad_TD, None, metadata)
        return row_bytes.unpack(rows, layout.received_row_M, grad_TD.shape[1], grad_TD.dtype)

    # -- what the two orders differ in ---------------------------------------------------------------------------------

    def check(self, hidden_TD: Tensor, weights_TK: Tensor) -> None:
        if self._low_latency is not None and self._nothing_learns():
            self._low_latency.check(hidden_TD, weights_TK.shape[1])
        if self._in_float8 and (refused := float8.refusal(hidden_TD, weights_TK)):
            raise ConfigError(refused)

    def _rows_per_token(self, top_k: int) -> int:
        """Rows that a token makes: one for each choice."""
        return top_k

    def _slots_of_rows(self, slots_TK: Tensor) -> Tensor:
        """int64, the slots of each row that is sent."""
        return slots_TK.reshape(-1, 1)

    def _choices_to_tokens(
        self, rows_MD: Tensor, exact_M: Tensor | None, layout: RecvLayout
    ) -> tuple[Tensor, Tensor | None]:
        """Rows by slot, and a value of each, back to where their choices were made: ``[N, D]`` and ``[N]``."""
        exact_M1 = None if exact_M is None else exact_M.unsqueeze(1)
        place_U = layout.place_UK.reshape(-1)  # what is -1 came from nowhere, and goes nowhere
        rows_MD = _taken_or_any(rows_MD, place_U)
        exact_M1 = None if exact_M1 is None else _taken_or_any(exact_M1, place_U)
        packed = row_bytes.pack_sums(rows_MD, exact_M1)
        with self._channels.launching():
            summed = self._buffer.combine(packed, layout.handle)
        exact_dtype = rows_MD.dtype if exact_M is None else exact_M.dtype
        rows_ND, exact_NW = row_bytes.unpack_sums(
            summed, rows_MD.shape[1], rows_MD.dtype, exact_M is not None, exact_dtype
        )
        return rows_ND, None if exact_M is None else exact_NW.squeeze(1)

    # -- for both ------------------------------------------------------------------------------------------------------

    def _recv_counts(self, sent: SendTokens, top_k: int, known: RowCounts | None) -> RecvCounts:
        """Return what arrives here; compares forwards."""
        slots = self._slots_per_rank
        if known is not None and sent.to_nodes is None and self._rows_per_token(top_k) == top_k:  # a row is a choice
            choices_S = known.received_RS.sum(axis=0).tolist()
            return RecvCounts(sum(choices_S), choices_S)
        to_nodes = sent.to_ranks[:0] if sent.to_nodes is None else sent.to_nodes
        counts_RW = self._exchange_counts(torch.cat([to_nodes, sent.to_ranks, sent.to_experts]).to(torch.int64))
        rows_RN, rows_W = counts_RW[:, : len(to_nodes)], counts_RW[:, len(to_nodes) :].sum(axis=0)
        first = counts_RW.shape[0] + self._rank * slots
        node, place = divmod(self._rank, deepep_package.RANKS_OF_A_NODE)  # rows cross between ranks of the same place
        passing = int(rows_RN[place :: deepep_package.RANKS_OF_A_NODE, node : node + 1].sum())
        return RecvCounts(int(rows_W[self._rank]), rows_W[first : first + slots].tolist(), passing)

    def _nothing_learns(self) -> bool:
        """And nothing will: activation checkpointing repeats forwards of training that had no gradients at first."""
        return not torch.is_grad_enabled() and (self._forward_tag is None or not self._forward_tag.training)

    def _send(
        self,
        pack: Callable[[Tensor, Tensor | None, int], Any],
        source_TD: Tensor,
        weights_TK: Tensor | None,
        metadata: SendLayout | RecvLayout,
    ) -> tuple[Any, RecvLayout]:
        """Rows that arrive, and their layout: a new one, or that of an earlier dispatch."""
        if isinstance(metadata, RecvLayout):
            rows_NC = pack(source_TD, weights_TK, self._rows_per_token(metadata.top_k))
            with self._channels.launching():
                return self._buffer.dispatch_cached(rows_NC, metadata.handle), metadata
        assert metadata.sent is not None and metadata.counts is not None
        top_k = metadata.slots_TK.shape[1]
        rows_NC = pack(source_TD, weights_TK, self._rows_per_token(top_k))
        with self._channels.launching():
            received = self._buffer.dispatch(rows_NC, metadata.sent, metadata.counts)
        return received.rows_UC, RecvLayout.of(received, top_k)


class DeepEPByRank(DeepEPDispatcher):
    """A token goes to each rank once; results are summed on each rank, then over ranks, in bfloat16.

    Args, Raises: as of `DeepEPDispatcher`; hidden states must be bfloat16.
    """

    combine_order: ClassVar[Literal["logical", "by_rank"]] = "by_rank"

    def combine_rows(self, out_MD: Tensor, weights: Tensor, metadata: RecvLayout) -> Tensor:
        sums_UD = self._moves.sum_here(out_MD, metadata.place_UK, weights, row_bytes.WIRE_DTYPE)
        with self._channels.launching():
            rows_TC = self._buffer.combine(row_bytes.pack_sums(sums_UD, None), metadata.handle)
        width = out_MD.shape[1]
        return rows_TC if rows_TC.shape[1] == width else rows_TC[:, :width].clone()  # no view: models write in place

    def combine_gradients(
        self, grad_MD: Tensor, grad_M: Tensor | None, metadata: RecvLayout, hidden_needed: bool
    ) -> tuple[Tensor, Tensor | None]:
        sums_UD = self._moves.sum_here(grad_MD, metadata.place_UK, None, row_bytes.WIRE_DTYPE)
        exact_UK = None
        if grad_M is not None:
            # Each choice is on one rank, and zero from all others.
            place_U = metadata.place_UK.reshape(-1)
            exact_UK = grad_M.new_zeros(metadata.place_UK.shape)
            if grad_M.shape[0]:
                exact_U = grad_M.index_select(0, place_U.clamp(min=0))
                exact_UK = torch.where(place_U >= 0, exact_U, 0).view(metadata.place_UK.shape)
        with self._channels.launching():
            summed = self._buffer.combine(row_bytes.pack_sums(sums_UD, exact_UK), metadata.handle)
        num_weights = 0 if exact_UK is None else metadata.top_k
        dtype = sums_UD.dtype if grad_M is None else grad_M.dtype
        grad_TD, grad_TK = row_bytes.unpack_sums(summed, grad_MD.shape[1], sums_UD.dtype, num_weights, dtype)
        return grad_TD, None if grad_M is None else grad_TK

    def check(self, hidden_TD: Tensor, weights_TK: Tensor) -> None:
        super().check(hidden_TD, weights_TK)
        if hidden_TD.dtype != row_bytes.WIRE_DTYPE:
            raise ConfigError(
                f"combine_order='by_rank' sums bfloat16 over ranks, and these hidden states are {hidden_TD.dtype}: "
                "train in bfloat16 (autocast) or take combine_order='logical'"
            )

    def _rows_per_token(self, top_k: int) -> int:
        return 1

    def _slots_of_rows(self, slots_TK: Tensor) -> Tensor:
        return slots_TK


def _taken_or_any(rows_MD: Tensor, place_U: Tensor) -> Tensor:
    """Rows by their places, any row where that is -1; zeros where there is none at all."""
    if not rows_MD.shape[0]:
        return rows_MD.new_zeros(place_U.shape[0], rows_MD.shape[1])
    return rows_MD.index_select(0, place_U.clamp(min=0))


def _places(rows_ND: Tensor, layout: RecvLayout) -> Tensor:
    """int64 ``[T, K]``: rows come back to where they were sent from."""
    return torch.arange(rows_ND.shape[0], device=rows_ND.device).view(-1, layout.top_k)
