"""Dispatch over DeepEP's first interface, `deep_ep.Buffer`, whose kernels send rows from GPU to GPU without the host.

Two orders of sums: ``"by_rank"``, a row for each rank that a token visits, and ``"logical"``, a row for each choice
(README). A row is a hidden state in bfloat16, or in float8 with scales. Router weights, and their gradients on the way
back, go beside the rows in float32 and keep every bit: a gradient has one summand that is not zero. A handle that is
used again carries rows alone, so weights are kept from its first use.

The buffers of a process: `distributed/transports/deepep.py`. Shape suffixes in addition to the room's: N rows of this
rank (tokens, or choices in logical order), W slots that a row may go to (K, or 1), U rows that arrive here, C columns.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from ...config import ConfigError, DispatchConfig
from ...distributed.transports import deepep
from ...distributed.transports.nvshmem import claim
from ..experts.compute import SlotCounts
from ..routing.water_filling import RowCounts
from . import permute
from .base import DispatchContext, Dispatcher, DispatchMetadata
from .channels import MicroBatchChannel

WIRE_DTYPE, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
ROW_BYTES, MOST_ROW_BYTES = 32, 15 << 10
"""DeepEP's kernels copy rows in halves of 16 bytes a channel. One is staged in a warp's 16 KiB of shared memory, with
its scales, ids and weights."""
_SUMMED_BYTES = 512
"""Between nodes a warp adds rows up 32 channels of 16 bytes at a time, and asserts that nothing is left over."""
SCALED_COLUMNS, _SCALES = 128, 4
"""Columns that share a scale, and scales of a row that are copied at once."""
_LARGEST, _SMALLEST_AMAX = torch.finfo(FLOAT8).max, 1e-4
"""Least value that a scale is made of, as in DeepEP's own casts: a scale is never zero."""
WIDTHS, MOST_TOP_K = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192), 11
"""Hidden sizes that low-latency kernels are built for (csrc/kernels/launch.cuh, SWITCH_HIDDEN), and choices of a token
that they take (csrc/kernels/internode_ll.cu, kNumMaxTopK)."""
Rows = Tensor | tuple[Tensor, Tensor]
"""bfloat16 ``[N, C]``; or float8 ``[N, D]`` and scales, float32 ``[N, C]``. What is past D, or D / 128, fills up."""


@dataclass(frozen=True, eq=False)
class SendLayout(DispatchMetadata):
    """A batch before its first dispatch.

    Args:
        slots_NW: int64, physical slots.
        top_k: K.
        sent: DeepEP's layout: rows to each rank and node, choices for each slot, which rows go to which ranks.
        most: a bound of the rows that arrive here and of those that pass through.
        choices_S: choices for each local slot.
    """

    slots_NW: Tensor
    top_k: int
    sent: tuple[Tensor, Tensor | None, Tensor, Tensor]
    most: int
    choices_S: list[int]


@dataclass(frozen=True, eq=False)
class RecvLayout(DispatchMetadata):
    """Where the rows of one batch went.

    Args:
        handle: DeepEP's.
        top_k: K of this rank's tokens.
        weights_M: float32, the router weight of each row by slot; None if none were sent.
        counts_S: rows by slot.
        choice_M: int64, for each row by slot which it is of the choices of all received rows.
        place_UW: int64, for each choice of a received row its place by slot; -1 where it has none here.
    """

    handle: Any
    top_k: int
    weights_M: Tensor | None
    counts_S: SlotCounts
    choice_M: Tensor
    place_UW: Tensor

    @classmethod
    def of(cls, handle: Any, slots_UW: Tensor, weights_UW: Tensor | None, sent: SendLayout) -> Self:
        """Return the layout of the choices that arrived: by slot, then by source rank and position there. ``slots_UW``:
        local slots; -1 where a choice is on another rank, and in rows that did not come."""
        slots_N = slots_UW.reshape(-1)
        here_N = slots_N >= 0
        order_N = torch.argsort(torch.where(here_N, slots_N, 1 << 30), stable=True)
        choice_M, counts_S = order_N[: sum(sent.choices_S)], SlotCounts.of(sent.choices_S, slots_N.device)
        place_UW = torch.where(here_N, permute.inverse(order_N), -1).view(slots_UW.shape)
        weights_M = None if weights_UW is None else weights_UW.reshape(-1).index_select(0, choice_M)
        return cls(handle, sent.top_k, weights_M, counts_S, choice_M, place_UW)


_Layout = SendLayout | RecvLayout


@dataclass(frozen=True, eq=False)
class LowLatencyLayout(DispatchMetadata):
    """Where the rows of one batch go: slots, and once they went DeepEP's handle and each row's place (``index_M``, by
    slot) in ``[S, R * most tokens]``."""

    slots_TK: Tensor
    handle: Any = None
    index_M: Tensor | None = None


class LowLatency(Dispatcher):
    """DeepEP's low-latency kernels, for inference without gradients: up to ``most_tokens`` tokens on each rank. Each
    choice goes to its expert's rank by itself; rows are brought into the order that all dispatchers keep. Results are
    weighed and summed where the token is, in float32 and in the router's order. Two batches at once take turns with one
    buffer. Raises ConfigError where DeepEP is not there, or cannot serve this group so."""

    def __init__(self, context: DispatchContext, most_tokens: int, in_float8: bool) -> None:
        super().__init__(context)
        if self._num_ranks > deepep.RANKS_OF_A_NODE:
            raise ConfigError(
                "low_latency_tokens is for the ranks of one node: between nodes DeepEP's other kernels have started "
                "NVSHMEM, and a process starts it once; leave low_latency_tokens out"
            )
        self.most_tokens, self._in_float8 = most_tokens, in_float8
        self._package = deepep.imported()
        self._made: tuple[int, Any] | None = None

    def refusal(self, hidden_TD: Tensor, weights_TK: Tensor) -> str:
        """Return why the kernels cannot take this top-k or width, or a width that is not the buffer's; "": they can."""
        width, top_k = hidden_TD.shape[1], weights_TK.shape[1]
        if width in WIDTHS and top_k <= MOST_TOP_K and (self._made is None or self._made[0] == width):
            return ""
        one = "" if self._made is None else f", all of one size ({self._made[0]})"
        return (
            f"low_latency_tokens is for hidden states of {', '.join(map(str, WIDTHS))} columns{one} and up to "
            f"{MOST_TOP_K} choices a token, and these are {width} columns with {top_k}: leave low_latency_tokens out"
        )

    def plan(self, slots_TK: Tensor, counts: RowCounts | None = None) -> LowLatencyLayout:
        return LowLatencyLayout(slots_TK.contiguous())

    def to_experts(
        self, source_TD: Tensor, weights_TK: Tensor | None, metadata: LowLatencyLayout, *, gradients: bool = False
    ) -> tuple[Tensor, None, SlotCounts, LowLatencyLayout]:
        width, sizes = source_TD.shape[1], (self.most_tokens, self._num_ranks * self._slots_per_rank)
        with self.channels.launching(), self.channels.shared("low latency"):
            rows, counts_S, handle, *_ = self._buffer(width).low_latency_dispatch(
                source_TD.contiguous(), metadata.slots_TK, *sizes, use_fp8=self._in_float8
            )
        counts = counts_S.tolist()  # the host waits for their numbers
        index_M = self._in_order(*handle[:2])[: sum(counts)]
        flat = (rows[0].flatten(0, 1), rows[1].flatten(0, 1)) if self._in_float8 else rows.flatten(0, 1)
        layout, known_S = replace(metadata, handle=handle, index_M=index_M), SlotCounts.of(counts, source_TD.device)
        return unpack(flat, index_M, width), None, known_S, layout

    def to_tokens(
        self, rows_MD: Tensor, weights: Tensor | None, grad_M: Tensor | None, metadata: LowLatencyLayout
    ) -> tuple[Tensor, None]:
        assert weights is not None and metadata.index_M is not None
        width = rows_MD.shape[1]
        rows_SND = rows_MD.new_empty(self._slots_per_rank, self._num_ranks * self.most_tokens, width, dtype=WIRE_DTYPE)
        rows_SND.view(-1, width).index_copy_(0, metadata.index_M, rows_MD.to(WIRE_DTYPE))
        weights_TK = weights.float().contiguous()
        with self.channels.launching(), self.channels.shared("low latency"):
            buffer = self._buffer(width)
            return buffer.low_latency_combine(rows_SND, metadata.slots_TK, weights_TK, metadata.handle)[0], None

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
            ranks, slots = self._num_ranks, self._slots_per_rank
            size = self._package.Buffer.get_low_latency_rdma_size_hint
            nbytes = size(self.most_tokens, width, ranks, ranks * slots)
            buffer = self._package.Buffer(
                self._group, num_rdma_bytes=nbytes, low_latency_mode=True, num_qps_per_rank=slots
            )
            self._made = width, buffer
        return self._made[1]


class DeepEPDispatcher(Dispatcher):
    """Dispatch and combine of bfloat16 for one EP group; physical slots are DeepEP's experts. A process keeps DeepEP's
    buffers. Raises ConfigError if the package is not there or cannot serve this group.

    Args:
        context: of an EP group on GPUs; DeepEP exchanges addresses in it (as pickles) when buffers are made.
        config: ``combine_order``, ``num_sms``, ``dtype`` and ``low_latency_tokens`` are used here.
        otherwise: carries what DeepEP refuses; None: an error.
    """

    def __init__(self, context: DispatchContext, config: DispatchConfig, otherwise: Dispatcher | None = None) -> None:
        super().__init__(context)
        self.combine_order, self._otherwise = config.combine_order, otherwise
        self._by_rank, self._in_float8 = config.combine_order == "by_rank", config.dtype == "float8"
        self._package, self._sms = deepep.imported(), config.num_sms
        self._between_nodes = self._num_ranks > deepep.RANKS_OF_A_NODE
        self._package.Buffer.set_num_sms(config.num_sms)
        # They hold the number of multiprocessors: made after it was set.
        self._there, self._back = deepep.settings(self._package, self._num_ranks)
        self._buffers: dict[MicroBatchChannel, Any] = {}
        few = config.low_latency_tokens
        self._low_latency = LowLatency(context, few, self._in_float8) if few else None

    def carrier(self, hidden_TD: Tensor, weights_TK: Tensor) -> Dispatcher:
        refused, few = refusal(hidden_TD, weights_TK, self._in_float8), self._low_latency
        # Activation checkpointing repeats forwards of training that had no gradients at first.
        if few is not None and not torch.is_grad_enabled() and not self.forward_tag.training:
            refused = refused or few.refusal(hidden_TD, weights_TK)
            # All ranks take the same kernels, also where only one has too many tokens for them.
            tokens = torch.full((1,), len(hidden_TD), device=hidden_TD.device)
            if not refused and self.gather_counts(tokens).max() <= few.most_tokens:
                return few
        if not refused:
            return self
        if self._otherwise is None:
            raise ConfigError(refused)
        return self._otherwise

    def plan(self, slots_TK: Tensor, counts: RowCounts | None = None) -> SendLayout:
        slots_NW = (slots_TK if self._by_rank else slots_TK.reshape(-1, 1)).contiguous()
        with self.channels.launching():  # the first call makes the buffer with the other ranks
            sent = self._buffer().get_dispatch_layout(slots_NW, self._num_ranks * self._slots_per_rank)[:4]
        return SendLayout(slots_NW, slots_TK.shape[1], sent, *self._arriving(sent, counts))

    def to_experts(
        self, source_TD: Tensor, weights_TK: Tensor | None, metadata: _Layout, *, gradients: bool = False
    ) -> tuple[Tensor, Tensor | None, SlotCounts, DispatchMetadata]:
        sent_NC = pack(source_TD, 1 if self._by_rank else metadata.top_k, self._in_float8 and not gradients)
        with self.channels.launching():
            if isinstance(metadata, SendLayout):
                rows, layout = self._send(sent_NC, weights_TK, metadata)
            else:
                rows, layout = self._buffer().dispatch(sent_NC, handle=metadata.handle, config=self._there)[0], metadata
        rows_MD = unpack(rows, layout.choice_M // layout.place_UW.shape[1], source_TD.shape[1])
        if weights_TK is None:
            return rows_MD, None, layout.counts_S, layout
        assert layout.weights_M is not None
        return rows_MD, layout.weights_M.to(weights_TK.dtype, copy=True), layout.counts_S, layout

    def to_tokens(
        self, rows_MD: Tensor, weights: Tensor | None, grad_M: Tensor | None, metadata: RecvLayout
    ) -> tuple[Tensor, Tensor | None]:
        weights_M, width = weights if self._by_rank else None, rows_MD.shape[1]
        sums_UD = self.kernels.sum_local_choices(rows_MD, metadata.place_UW, weights_M, WIRE_DTYPE)
        grad_UW = None
        if grad_M is not None:  # each choice is on one rank, and zero from all others
            grad_UW = torch.zeros_like(metadata.place_UW, dtype=torch.float32)
            grad_UW.view(-1).index_copy_(0, metadata.choice_M, grad_M.float())
        filled_UC = _filled(sums_UD, (_SUMMED_BYTES if self._between_nodes else ROW_BYTES) // WIRE_DTYPE.itemsize)
        with self.channels.launching():
            rows_NC, grad_NW, _ = self._buffer().combine(filled_UC, metadata.handle, grad_UW, config=self._back)
        rows_ND = rows_NC if rows_NC.shape[1] == width else rows_NC[:, :width].clone()  # models write in place
        grad_TK = None if grad_M is None else grad_NW.to(grad_M.dtype).reshape(-1, metadata.top_k)
        if self._by_rank:
            return rows_ND, grad_TK
        # Each token's choices come back to where they were sent from.
        place_TK = torch.arange(rows_ND.shape[0], device=rows_ND.device).view(-1, metadata.top_k)
        return self.kernels.sum_choices(rows_ND, place_TK, self._memory, weights), grad_TK

    # -- DeepEP's calls ------------------------------------------------------------------------------------------------

    def _buffer(self) -> Any:
        """Return the buffer of the current micro-batch. Kernels of both micro-batches may be on a GPU at once and wait
        for their peers. That ends: all ranks launch them in one order (`MicroBatchChannels.launching`), and
        `Balancer.at_once` checks that there are multiprocessors for both."""
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

    def _send(self, rows_NC: Rows, weights_TK: Tensor | None, metadata: SendLayout) -> tuple[Rows, RecvLayout]:
        """Return the rows that arrive, and their layout, without a host sync: inside a node DeepEP would wait with
        Python's interpreter locked (`intranode_dispatch`), so no thread could answer the rank that it waits for."""
        (to_ranks, to_nodes, to_slots, in_rank), slots_NW = metadata.sent, metadata.slots_NW
        weights = torch.zeros_like(slots_NW) if weights_TK is None else weights_TK
        rows, slots_UW, weights_UW, _, handle, _ = self._buffer().dispatch(
            rows_NC,
            num_tokens_per_rank=to_ranks,
            num_tokens_per_rdma_rank=to_nodes,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=to_slots,
            topk_idx=slots_NW,
            topk_weights=weights.float().reshape(slots_NW.shape).contiguous(),
            num_worst_tokens=max(1, metadata.most),
            config=self._there,
        )
        return rows, RecvLayout.of(handle, slots_UW, None if weights_TK is None else weights_UW, metadata)

    def _arriving(
        self, sent: tuple[Tensor, Tensor | None, Tensor, Tensor], known: RowCounts | None
    ) -> tuple[int, list[int]]:
        """Return ``most`` and ``choices_S`` of `SendLayout`; compares forwards."""
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


# -- What is in a row -------------------------------------------------------------------------------------------------


def refusal(hidden_TD: Tensor, weights_TK: Tensor, in_float8: bool) -> str:
    """Return why DeepEP cannot carry rows of this width and these dtypes, or "" if it can."""
    width, dtype = hidden_TD.shape[1], FLOAT8 if in_float8 else WIRE_DTYPE
    given = f"these hidden states have {width} columns of {hidden_TD.dtype}, and weights are {weights_TK.dtype}"
    if hidden_TD.dtype != WIRE_DTYPE or weights_TK.dtype.itemsize > torch.float32.itemsize:
        return (
            f"DeepEP carries and sums bfloat16, with router weights in float32 at most, and {given}: train in bfloat16 "
            "(autocast) or take another dispatch"
        )
    if width * dtype.itemsize > MOST_ROW_BYTES:
        return f"DeepEP carries rows of {MOST_ROW_BYTES} bytes, and {given}: take another dispatch"
    if in_float8 and width % SCALED_COLUMNS:
        return f"dtype='float8' has a scale for {SCALED_COLUMNS} columns, and {given}: leave dtype out"
    return ""


def pack(hidden_TD: Tensor, times: int, in_float8: bool) -> Rows:
    """Return the rows to send: each hidden state ``times`` times in a row, with zero columns added up to DeepEP's
    sizes. ``in_float8``: rows in float8 and their scales, one for 128 columns."""
    if not in_float8:
        return _filled(hidden_TD, ROW_BYTES // WIRE_DTYPE.itemsize).repeat_interleave(times, dim=0)
    blocks_TBC = hidden_TD.unflatten(1, (-1, SCALED_COLUMNS)).float()
    amax_TB = blocks_TBC.abs().amax(dim=2).clamp(_SMALLEST_AMAX)
    rows_TD = (blocks_TBC * (_LARGEST / amax_TB).unsqueeze(2)).to(FLOAT8).flatten(1)
    # Repeated as bytes: not every version of torch selects rows of float8.
    rows_ND = rows_TD.view(torch.uint8).repeat_interleave(times, dim=0).view(FLOAT8)
    return rows_ND, _filled(amax_TB / _LARGEST, _SCALES).repeat_interleave(times, dim=0)


def unpack(rows: Rows, index_M: Tensor, width: int) -> Tensor:
    """Return bfloat16 ``[M, D]`` in new memory: rows ``index_M``, without added columns; float8 times its scales."""
    if isinstance(rows, Tensor):
        return rows[:, :width].index_select(0, index_M)
    rows_MD = rows[0].view(torch.uint8).index_select(0, index_M).view(FLOAT8)
    scales_MB = rows[1][:, : width // SCALED_COLUMNS].index_select(0, index_M)
    return (rows_MD.unflatten(1, (-1, SCALED_COLUMNS)).float() * scales_MB.unsqueeze(2)).flatten(1).to(WIRE_DTYPE)


def _filled(rows_ND: Tensor, multiple: int) -> Tensor:
    """Return contiguous rows, filled up with zeros to a multiple of so many columns."""
    missing = -rows_ND.shape[1] % multiple
    return (functional.pad(rows_ND, (0, missing)) if missing else rows_ND).contiguous()
