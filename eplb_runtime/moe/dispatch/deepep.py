"""Dispatch over DeepEP's first interface, `deep_ep.Buffer`, whose kernels send rows from GPU to GPU without the host.

Two orders of a token's sum. ``"by_rank"`` is what such kernels are made for: a token goes to each rank once, results
are weighted and summed there, and over ranks on the way back, in bfloat16. ``"logical"`` is exact as `all_to_all` is:
each choice is a row of its own with one expert, K times the rows; results come back one for each choice, and are
weighted and summed here in the router's order.

A row is a hidden state with its router weights behind it; nothing is rounded but by float8. Towards the experts DeepEP
copies rows, so any bytes may be in them. On the way back it adds rows up, in float32: bfloat16 columns are added as
such, and weights' gradients travel a byte a column, since each then has one summand that is not zero. What a row
becomes depends on the row alone, not on where it goes.

Whether the package is there, and the buffers of a process: `distributed/transports/deepep.py`. Shape suffixes in
addition to the room's: N rows of this rank (tokens, or choices in logical order), W slots that a row may go to (K, or
1), U rows that arrive here, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...config import ConfigError, DispatchConfig
from ...distributed.transports import deepep
from ...distributed.transports.nvshmem import claim
from ..experts.compute import SlotCounts
from ..routing.water_filling import RowCounts
from . import permute
from .base import DispatchContext, Dispatched, Dispatcher, DispatchMetadata
from .channels import MicroBatchChannel

WIRE_DTYPE, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
ROW_BYTES = 32
"""DeepEP's kernels copy rows in halves of 16 bytes a channel."""
MOST_ROW_BYTES = 15 << 10
"""A row is staged in a warp's 16 KiB of shared memory, with its ids and weights."""
SCALED_COLUMNS = 128
"""That share a scale."""
MOST_SCALES = 128
"""Of a row, router weights among them; what DeepEP's buffers are sized for."""
_LARGEST = torch.finfo(FLOAT8).max
_SMALLEST_AMAX = 1e-4
"""As DeepEP's own casts: a scale is never zero."""
_WORD, _ALIGNED_BYTES = 4, 16
"""Scales are float32, and those of a row are copied 16 bytes at once."""

Float8Rows = tuple[Tensor, Tensor]
"""float8 ``[N, D]``, and float32 ``[N, D / 128 + W]``: scales, and behind them router weights, bit for bit."""
Rows = Tensor | Float8Rows
_SUMMED_BYTES = 512
"""Between nodes a warp adds rows up 32 channels of 16 bytes at a time, and asserts that nothing is left over."""
WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Hidden sizes that low-latency kernels are built for (csrc/kernels/launch.cuh, SWITCH_HIDDEN)."""
MOST_TOP_K = 11
"""Choices of a token that they take (csrc/kernels/internode_ll.cu, kNumMaxTopK)."""


@dataclass(frozen=True, eq=False)
class SendLayout(DispatchMetadata):
    """A batch before its first dispatch.

    Args:
        slots_NW: int64, physical slots; ``[T, K]`` for low-latency kernels.
        top_k: K.
        sent: DeepEP's layout: rows to each rank and node, choices for each slot, which rows go to which ranks.
        arriving: a bound of the rows that arrive here and of those that pass through, and choices for each local slot
            here; both None for low-latency kernels.
    """

    slots_NW: Tensor
    top_k: int
    sent: tuple[Tensor, Tensor | None, Tensor, Tensor] | None = None
    arriving: tuple[int, list[int]] | None = None


@dataclass(frozen=True, eq=False)
class RecvLayout(DispatchMetadata):
    """Where the rows of one batch went.

    Args:
        handle: DeepEP's.
        counts_S: rows by slot.
        received_row_M: int64, for each row by slot the received row that it is.
        choice_M: int64, and which of the choices of all received rows.
        place_UW: int64, for each choice of a received row its place by slot; -1 where it has none here.
        top_k: K of this rank's tokens.
    """

    handle: Any
    counts_S: SlotCounts
    received_row_M: Tensor
    choice_M: Tensor
    place_UW: Tensor
    top_k: int

    @classmethod
    def of(cls, handle: Any, slots_UW: Tensor, counts: list[int], top_k: int) -> RecvLayout:
        """Return rows by slot, those of a slot as they arrived: by source rank and position there. ``slots_UW``: local
        ones, -1 where a choice is on another rank, and for rows past those that came."""
        slots_N = slots_UW.reshape(-1)
        here_N = slots_N >= 0
        order_N = torch.argsort(torch.where(here_N, slots_N, 1 << 30), stable=True)
        choice_M, counts_S = order_N[: sum(counts)], SlotCounts.of(counts, slots_N.device)
        place_UW = torch.where(here_N, permute.inverse(order_N), -1).view(slots_UW.shape)
        return cls(handle, counts_S, choice_M // slots_UW.shape[1], choice_M, place_UW, top_k)


@dataclass(frozen=True, eq=False)
class LowLatencyLayout(DispatchMetadata):
    """Where the rows of one batch went: DeepEP's handle, slots, and for each row by slot its place in ``[S, R * most
    tokens]``."""

    handle: Any
    slots_TK: Tensor
    index_M: Tensor


class LowLatency:
    """DeepEP's low-latency kernels, for inference: batches of up to ``most_tokens`` on each rank, in a buffer made for
    so many. Each choice goes to its expert's rank by itself, in no order; rows are brought into the order that all
    dispatchers keep. Results are weighed and summed where the token is, in float32 and in the router's order. Without
    gradients only. Two batches at once take turns with one buffer. Raises ConfigError where DeepEP is not there, or
    cannot serve this group so."""

    def __init__(self, context: DispatchContext, most_tokens: int, in_float8: bool) -> None:
        if context.group.size() > deepep.RANKS_OF_A_NODE:
            raise ConfigError(
                "low_latency_tokens is for the ranks of one node: between nodes DeepEP's other kernels have started "
                "NVSHMEM, and a process starts it once; leave low_latency_tokens out"
            )
        self.most_tokens = most_tokens
        self._package = deepep.imported()
        self._group, self.channels, self._slots = context.group, context.channels, context.slots_per_rank
        self._num_experts = self._group.size() * self._slots
        self._in_float8 = in_float8
        self._made: tuple[int, Any] | None = None

    def refusal(self, hidden_TD: Tensor, weights_TK: Tensor) -> str:
        """Return why there are no kernels for these, by shapes alone, or ""."""
        width, top_k = hidden_TD.shape[1], weights_TK.shape[1]
        if width in WIDTHS and top_k <= MOST_TOP_K and (self._made is None or self._made[0] == width):
            return ""
        one = "" if self._made is None else f", all of one size ({self._made[0]})"
        return (
            f"low_latency_tokens is for hidden states of {', '.join(map(str, WIDTHS))} columns{one} and up to "
            f"{MOST_TOP_K} choices a token, and these are {width} columns with {top_k}: leave low_latency_tokens out"
        )

    def dispatch(self, hidden_TD: Tensor, weights_TK: Tensor, slots_TK: Tensor) -> Dispatched:
        """Return the rows of `Dispatcher.dispatch`, of what is not refused. One host sync, for their numbers."""
        width = hidden_TD.shape[1]
        with self.channels.launching(), self.channels.shared("low latency"):
            rows, counts_S, handle, *_ = self._buffer(width).low_latency_dispatch(
                hidden_TD.contiguous(), slots_TK, self.most_tokens, self._num_experts, use_fp8=self._in_float8
            )
        counts = counts_S.tolist()
        index_M = self._in_order(*handle[:2])[: sum(counts)]
        flat = (rows[0].flatten(0, 1), rows[1].flatten(0, 1)) if self._in_float8 else rows.flatten(0, 1)
        layout, known_S = LowLatencyLayout(handle, slots_TK, index_M), SlotCounts.of(counts, hidden_TD.device)
        rows_MD = unpack(flat, index_M, width)
        return Dispatched(rows_MD, known_S, None, weights_TK.detach(), hidden_TD.dtype, layout)

    def combine(self, out_MD: Tensor, dispatched: Dispatched) -> Tensor:
        """Return the sums of `Dispatcher.combine`, in bfloat16 on the way."""
        layout, width = dispatched.metadata, out_MD.shape[1]
        assert isinstance(layout, LowLatencyLayout)
        places = self._group.size() * self.most_tokens
        out_SND = out_MD.new_empty(self._slots, places, width, dtype=WIRE_DTYPE)
        out_SND.view(-1, width).index_copy_(0, layout.index_M, out_MD.to(WIRE_DTYPE))
        weights_TK = dispatched.combine_weights.float().contiguous()
        with self.channels.launching(), self.channels.shared("low latency"):
            combined = self._buffer(width).low_latency_combine(out_SND, layout.slots_TK, weights_TK, layout.handle)
        result: Tensor = combined[0].to(dispatched.dtype)
        return result

    def _in_order(self, token_SN: Tensor, range_SR: Tensor) -> Tensor:
        """int64: places of rows by slot, then by source rank, then by position there; then all others. A slot's rows of
        a rank begin where the high half of its range says, and the low half says how many they are."""
        begin_SR1, count_SR1 = (range_SR >> 32).unsqueeze(2), (range_SR & 0xFFFFFFFF).unsqueeze(2)
        place_N = torch.arange(token_SN.shape[1], device=token_SN.device)
        inside_SRN = (place_N >= begin_SR1) & (place_N < begin_SR1 + count_SR1)
        slot_of_source_SR1 = torch.arange(range_SR.numel(), device=token_SN.device).view(*range_SR.shape, 1)
        key_SN = (inside_SRN * slot_of_source_SR1).sum(dim=1) * self.most_tokens + token_SN
        return key_SN.masked_fill(~inside_SRN.any(dim=1), torch.iinfo(torch.int64).max).view(-1).argsort()

    def _buffer(self, width: int) -> Any:
        deepep.refuse_filled_memory()
        if self._made is None:
            if why := claim("low_latency_tokens", self._group, again=True):
                raise ConfigError(f"low_latency_tokens: {why}; leave low_latency_tokens out")
            size = self._package.Buffer.get_low_latency_rdma_size_hint
            nbytes = size(self.most_tokens, width, self._group.size(), self._num_experts)
            buffer = self._package.Buffer(
                self._group, num_rdma_bytes=nbytes, low_latency_mode=True, num_qps_per_rank=self._slots
            )
            self._made = width, buffer
        return self._made[1]


class DeepEPDispatcher(Dispatcher):
    """Dispatch and combine of bfloat16 for one EP group; physical slots are DeepEP's experts. A process keeps DeepEP's
    buffers.

    Args:
        context: of an EP group on GPUs; DeepEP exchanges addresses in it (as pickles) when buffers are made.
        config: ``combine_order``, ``sms``, ``dtype`` and ``low_latency_tokens`` are used here.
        otherwise: carries what DeepEP refuses; None: an error.

    Raises:
        ConfigError: the package is not there or cannot serve this group.
    """

    def __init__(self, context: DispatchContext, config: DispatchConfig, otherwise: Dispatcher | None = None) -> None:
        super().__init__(context)
        self._otherwise = otherwise
        self.combine_order = config.combine_order
        self._by_rank = config.combine_order == "by_rank"
        self._package = deepep.imported()
        self._sms, self._between_nodes = config.sms, self._num_ranks > deepep.RANKS_OF_A_NODE
        self._package.Buffer.set_num_sms(config.sms)
        # They hold the number of multiprocessors: made after it was set.
        self._there, self._back = deepep.settings(self._package, self._num_ranks)
        self._buffers: dict[MicroBatchChannel, Any] = {}
        self._in_float8 = config.dtype == "float8"
        self._low_latency: LowLatency | None = None
        if config.low_latency_tokens:
            self._low_latency = LowLatency(context, config.low_latency_tokens, self._in_float8)

    def carrier(self, hidden_TD: Tensor, weights_TK: Tensor) -> Dispatcher:
        refused = refusal(hidden_TD, weights_TK, self._in_float8)
        if not refused and self._low_latency is not None and self._nothing_learns():
            refused = self._low_latency.refusal(hidden_TD, weights_TK)
        if refused and self._otherwise is None:
            raise ConfigError(refused)
        return self._otherwise if refused and self._otherwise is not None else self

    def plan(self, slots_TK: Tensor, counts: RowCounts | None = None) -> SendLayout:
        top_k = slots_TK.shape[1]
        if self._low_latency is not None and self._nothing_learns():
            # All ranks take the same kernels, also where only one has too many tokens for them.
            most = self.gather_counts(slots_TK.new_full((1,), slots_TK.shape[0])).max()
            if most <= self._low_latency.most_tokens:
                return SendLayout(slots_TK.contiguous(), top_k)
        slots_NW = (slots_TK if self._by_rank else slots_TK.reshape(-1, 1)).contiguous()
        with self.channels.launching():  # the first call makes the buffer with the other ranks
            sent = self._buffer().get_dispatch_layout(slots_NW, self._num_ranks * self._slots_per_rank)[:4]
        return SendLayout(slots_NW, top_k, sent, self._arriving(sent, counts))

    def dispatch(self, hidden_TD: Tensor, weights_TK: Tensor, metadata: DispatchMetadata) -> Dispatched:
        if self._low_latency is not None and isinstance(metadata, SendLayout) and metadata.sent is None:
            return self._low_latency.dispatch(hidden_TD, weights_TK, metadata.slots_NW)
        return super().dispatch(hidden_TD, weights_TK, metadata)

    def combine(self, out_MD: Tensor, dispatched: Dispatched) -> Tensor:
        if self._low_latency is not None and isinstance(dispatched.metadata, LowLatencyLayout):
            return self._low_latency.combine(out_MD, dispatched)
        return super().combine(out_MD, dispatched)

    def dispatch_rows(
        self, hidden_TD: Tensor, weights_TK: Tensor | None, metadata: SendLayout | RecvLayout
    ) -> tuple[Tensor, Tensor | None, SlotCounts, DispatchMetadata]:
        width = hidden_TD.shape[1]
        rows, layout = self._send(hidden_TD, weights_TK, metadata, self._in_float8)
        rows_MD = unpack(rows, layout.received_row_M, width)
        if weights_TK is None:
            return rows_MD, None, layout.counts_S, layout
        weights_UW = unpack_weights(rows, width, layout.place_UW.shape[1], weights_TK.dtype)
        return rows_MD, weights_UW.reshape(-1).index_select(0, layout.choice_M), layout.counts_S, layout

    def combine_rows(self, out_MD: Tensor, weights: Tensor, metadata: RecvLayout) -> Tensor:
        rows_ND, _ = self._sums_to_tokens(out_MD, weights if self._by_rank else None, None, metadata)
        return rows_ND if self._by_rank else self._sum(rows_ND, weights, metadata)

    def combine_gradients(
        self, grad_MD: Tensor, grad_M: Tensor | None, metadata: RecvLayout, hidden_needed: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows_ND, grad_NW = self._sums_to_tokens(grad_MD, None, grad_M, metadata)
        hidden_TD = rows_ND if self._by_rank else self._sum(rows_ND, None, metadata)
        return hidden_TD, None if grad_NW is None else grad_NW.reshape(-1, metadata.top_k)

    def dispatch_gradients(self, grad_TD: Tensor, metadata: RecvLayout) -> Tensor:
        rows, layout = self._send(grad_TD, None, metadata, in_float8=False)
        return unpack(rows, layout.received_row_M, grad_TD.shape[1])

    # -- DeepEP's calls ------------------------------------------------------------------------------------------------

    def _buffer(self) -> Any:
        """The buffer of the current micro-batch. Experts and their replicas may go by the first one's.

        Kernels of both micro-batches may be on a GPU at once and wait for their peers there. That ends: all ranks
        launch them in one order (`MicroBatchChannels.launching`), and there are multiprocessors for both
        (`Balancer.at_once` checks it), while compute ends by itself.
        """
        deepep.refuse_filled_memory()
        channel = self.channels.current()
        if channel not in self._buffers:
            given = self._package, channel.tokens
            self._buffers[channel] = (
                deepep.shared_buffer(*given, self._sms, self._there, self._back)
                if channel is self.channels.first
                else deepep.new_buffer(*given, self._there, self._back)
            )
        return self._buffers[channel]

    def _send(
        self, source_TD: Tensor, weights_TK: Tensor | None, metadata: SendLayout | RecvLayout, in_float8: bool
    ) -> tuple[Rows, RecvLayout]:
        """Rows that arrive, and their layout: a new one, or that of an earlier dispatch, without a host sync.

        DeepEP need not tell the host what arrives. Inside a node it would wait with Python's interpreter locked
        (csrc/deep_ep.cpp, `intranode_dispatch`): no thread of this process could answer the rank that it waits for.
        """
        times = 1 if self._by_rank else metadata.top_k
        rows_NC = pack(source_TD, weights_TK, times, in_float8)
        with self.channels.launching():
            if isinstance(metadata, RecvLayout):
                return self._buffer().dispatch(rows_NC, handle=metadata.handle, config=self._there)[0], metadata
            assert metadata.sent is not None and metadata.arriving is not None
            to_ranks, to_nodes, to_slots, in_rank = metadata.sent
            (most, choices_S), slots_NW = metadata.arriving, metadata.slots_NW
            # Weights go behind the rows' other bytes: those given here would not go when a handle is used again.
            unused = torch.zeros(slots_NW.shape, dtype=torch.float32, device=slots_NW.device)
            rows, slots_UW, _, _, handle, _ = self._buffer().dispatch(
                rows_NC,
                num_tokens_per_rank=to_ranks,
                num_tokens_per_rdma_rank=to_nodes,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=to_slots,
                topk_idx=slots_NW,
                topk_weights=unused,
                num_worst_tokens=max(1, most),
                config=self._there,
            )
        return rows, RecvLayout.of(handle, slots_UW, choices_S, metadata.top_k)

    def _sums_to_tokens(
        self, rows_MD: Tensor, weights_M: Tensor | None, exact_M: Tensor | None, layout: RecvLayout
    ) -> tuple[Tensor, Tensor | None]:
        """Sum rows by slot for each received row, and send them to where their choices were made, with a value of each
        choice; returns ``[N, D]`` and ``[N, W]``."""
        sums_UD = self.kernels.sum_here(rows_MD, layout.place_UW, weights_M, WIRE_DTYPE)
        exact_UW, choices = None, layout.place_UW.shape[1]
        if exact_M is not None:  # each choice is on one rank, and zero from all others
            exact_UW = exact_M.new_zeros(layout.place_UW.shape)
            exact_UW.view(-1).index_copy_(0, layout.choice_M, exact_M)
        wide = _SUMMED_BYTES if self._between_nodes else ROW_BYTES
        packed_UC = pack_sums(sums_UD, exact_UW, wide)
        with self.channels.launching():
            summed_NC = self._buffer().combine(packed_UC, layout.handle, config=self._back)[0]
        if exact_M is None:
            return unpack_sums(summed_NC, rows_MD.shape[1], 0, sums_UD.dtype)[0], None
        return unpack_sums(summed_NC, rows_MD.shape[1], choices, exact_M.dtype)

    def _sum(self, rows_ND: Tensor, weights_TK: Tensor | None, layout: RecvLayout) -> Tensor:
        """Each token's choices, which come back to where they were sent from, summed in the router's order."""
        place_TK = torch.arange(rows_ND.shape[0], device=rows_ND.device).view(-1, layout.top_k)
        return self.kernels.sum_choices(rows_ND, place_TK, self._memory, weights_TK)

    # -- counts --------------------------------------------------------------------------------------------------------

    def _arriving(
        self, sent: tuple[Tensor, Tensor | None, Tensor, Tensor], known: RowCounts | None
    ) -> tuple[int, list[int]]:
        """Return a bound of the rows that arrive here and of those that pass through, and choices of each slot here;
        compares forwards."""
        to_ranks, to_nodes, to_slots, _ = sent
        if known is not None and to_nodes is None and not self._by_rank:  # then a row is a choice
            choices_S = known.received_RS.sum(axis=0).tolist()
            return sum(choices_S), choices_S
        to_nodes = to_ranks[:0] if to_nodes is None else to_nodes
        counts_RW = self.gather_counts(torch.cat([to_nodes, to_ranks, to_slots]).to(torch.int64))
        rows_RN, rows_W = counts_RW[:, : len(to_nodes)], counts_RW[:, len(to_nodes) :].sum(axis=0)
        node, place = divmod(self._rank, deepep.RANKS_OF_A_NODE)  # rows cross between ranks of the same place
        passing = int(rows_RN[place :: deepep.RANKS_OF_A_NODE, node : node + 1].sum())
        first = self._num_ranks + self._rank * self._slots_per_rank
        return max(int(rows_W[self._rank]), passing), rows_W[first : first + self._slots_per_rank].tolist()

    def _nothing_learns(self) -> bool:
        """And nothing will: activation checkpointing repeats forwards of training that had no gradients at first."""
        return not torch.is_grad_enabled() and not self.forward_tag.training


# -- What is in a row -------------------------------------------------------------------------------------------------


def refusal(hidden_TD: Tensor, weights_TK: Tensor, in_float8: bool) -> str:
    """Return why such hidden states cannot travel so, or ""."""
    (_, width), weight_bytes = hidden_TD.shape, weights_TK.shape[1] * weights_TK.element_size()
    given = f"these hidden states have {width} columns of {hidden_TD.dtype} and {weights_TK.shape[1]} choices"
    if hidden_TD.dtype != WIRE_DTYPE:
        return f"DeepEP carries and sums bfloat16, and {given}: train in bfloat16 (autocast) or take another dispatch"
    if not in_float8 and 2 * (width + weight_bytes) > MOST_ROW_BYTES:  # weights' gradients take a column a byte
        return f"DeepEP carries rows of {MOST_ROW_BYTES} bytes, and {given}: take another dispatch"
    if in_float8 and width % SCALED_COLUMNS:
        return f"dtype='float8' has a scale for {SCALED_COLUMNS} columns, and {given}: leave dtype out"
    scale_bytes = -(-(width // SCALED_COLUMNS * _WORD + weight_bytes) // _ALIGNED_BYTES) * _ALIGNED_BYTES
    if in_float8 and scale_bytes > MOST_SCALES * _WORD:
        return f"dtype='float8' carries {MOST_SCALES} scales and router weights a row, and {given}: leave dtype out"
    return ""


def pack(hidden_TD: Tensor, weights_TW: Tensor | None, times: int, in_float8: bool) -> Rows:
    """Return ``T * times`` rows with a token's hidden state and a share of its weights each."""
    (tokens, width), multiple = hidden_TD.shape, ROW_BYTES
    if in_float8:
        blocks_TBC = hidden_TD.reshape(tokens, width // SCALED_COLUMNS, SCALED_COLUMNS).float()
        amax_TB = blocks_TBC.abs().amax(dim=2).clamp(_SMALLEST_AMAX)
        rows_TD = (blocks_TBC * (_LARGEST / amax_TB).unsqueeze(2)).to(FLOAT8).view(tokens, width)
        # Repeated as bytes: not every version of torch selects rows of float8.
        rows_ND = rows_TD.view(torch.uint8).repeat_interleave(times, dim=0).view(FLOAT8)
        hidden_TD, multiple = amax_TB / _LARGEST, _ALIGNED_BYTES
    parts = [_packed(hidden_TD).view(WIRE_DTYPE).unsqueeze(1)]
    if weights_TW is not None:
        weights = _packed(weights_TW).view(WIRE_DTYPE)
        parts.append(weights.view(tokens, times, weights.shape[1] // times))
    columns = -(-2 * sum(part.shape[2] for part in parts) // multiple) * multiple // 2
    rows = torch.empty(tokens, times, columns, dtype=WIRE_DTYPE, device=hidden_TD.device)
    begin = 0
    for part in parts:
        rows[:, :, begin : begin + part.shape[2]] = part
        begin += part.shape[2]
    rows_NC = rows.flatten(0, 1)
    return (rows_ND, rows_NC.view(torch.float32)) if in_float8 else rows_NC


def unpack(rows: Rows, index_M: Tensor, width: int) -> Tensor:
    """Return bfloat16 ``[M, D]``, the hidden states of some rows, in memory of its own."""
    if isinstance(rows, Tensor):
        return rows[:, :width].index_select(0, index_M)
    rows_MD = rows[0].view(torch.uint8).index_select(0, index_M).view(FLOAT8)
    scales_MB = rows[1][:, : width // SCALED_COLUMNS].index_select(0, index_M)
    blocks_MBC = rows_MD.view(-1, width // SCALED_COLUMNS, SCALED_COLUMNS).float() * scales_MB.unsqueeze(2)
    return blocks_MBC.view(-1, width).to(WIRE_DTYPE)


def unpack_weights(rows: Rows, width: int, weights: int, dtype: torch.dtype) -> Tensor:
    """Return ``[N, W]``, the weights of all rows."""
    behind, begin = (
        (rows, width) if isinstance(rows, Tensor) else (rows[1].view(WIRE_DTYPE), 2 * (width // SCALED_COLUMNS))
    )
    return _copied(behind[:, begin : begin + weights * dtype.itemsize // 2]).view(dtype)


def pack_sums(rows_ND: Tensor, exact_NW: Tensor | None, multiple: int = ROW_BYTES) -> Tensor:
    """Return bfloat16 ``[N, C]``, a multiple of so many bytes wide: rows to be added up on the way. Each value of
    ``exact_NW`` is zero in all summands but one."""
    parts = [rows_ND] if exact_NW is None else [rows_ND, _packed(exact_NW).view(torch.uint8).to(WIRE_DTYPE)]
    if left_over := -sum(part.shape[1] for part in parts) % (multiple // WIRE_DTYPE.itemsize):
        parts.append(rows_ND.new_zeros(rows_ND.shape[0], left_over))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def unpack_sums(rows_NC: Tensor, width: int, weights: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what `pack_sums` has put in, added up: ``[N, D]`` and ``[N, W]``."""
    exact_NB = rows_NC[:, width : width + weights * dtype.itemsize].to(torch.uint8)  # bfloat16 has all numbers to 256
    rows_ND = rows_NC if rows_NC.shape[1] == width else rows_NC[:, :width].clone()  # no view: models write in place
    return rows_ND, exact_NB.view(dtype)


def _packed(values: Tensor) -> Tensor:
    """Contiguous, in its strides too: one column, or no rows, pass for contiguous whatever theirs are."""
    return values if values.is_contiguous() and values.stride(-1) == 1 else _copied(values)


def _copied(values: Tensor) -> Tensor:
    """In memory of its own, which begins where any dtype may; also of one row or none, which pass for contiguous."""
    return torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)
