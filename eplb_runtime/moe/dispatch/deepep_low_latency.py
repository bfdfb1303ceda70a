"""DeepEP's low-latency kernels, for inference: small batches, in buffers made for so many tokens a rank.

Each choice goes to its expert's rank by itself, in no order; rows are brought into the order that all dispatchers keep.
Results are weighed and summed where the token is, in float32 and in the router's order. Without gradients only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...config import ConfigError
from ...distributed.transports import deepep_package
from ...distributed.transports.nvshmem import claim
from ..experts.compute import SlotCounts
from . import wire_format
from .base import DispatchContext, Dispatched, DispatchMetadata

WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Hidden sizes that these kernels are built for (csrc/kernels/launch.cuh, SWITCH_HIDDEN)."""
MOST_TOP_K = 11
"""Choices of a token (csrc/kernels/internode_ll.cu, kNumMaxTopK)."""


@dataclass(frozen=True, eq=False)
class LowLatencyLayout(DispatchMetadata):
    """Where the rows of one batch went: DeepEP's handle, slots, and for each row by slot its place in ``[S, R * most
    tokens]``."""

    handle: Any
    slots_TK: Tensor
    index_M: Tensor


class LowLatency:
    """One EP group's way for batches of up to ``most_tokens`` on each rank, collective over the group. Two batches at
    once take turns with one buffer. Raises ConfigError where DeepEP is not there, or cannot serve this group so."""

    def __init__(self, context: DispatchContext, most_tokens: int, in_float8: bool) -> None:
        if context.group.size() > deepep_package.RANKS_OF_A_NODE:
            raise ConfigError(
                "low_latency_tokens is for the ranks of one node: between nodes DeepEP's other kernels have started "
                "NVSHMEM, and a process starts it once; leave low_latency_tokens out"
            )
        self.most_tokens = most_tokens
        self._package = deepep_package.imported()
        self._group, self._channels, self._slots = context.group, context.channels, context.slots_per_rank
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
        """As `Dispatcher.dispatch`, of what is not refused. One host sync, for the numbers of rows."""
        width = hidden_TD.shape[1]
        with self._channels.shared("low latency"):
            rows, counts_S, handle, *_ = self._buffer(width).low_latency_dispatch(
                hidden_TD.contiguous(), slots_TK, self.most_tokens, self._num_experts, use_fp8=self._in_float8
            )
        counts = counts_S.tolist()
        index_M = self._in_order(*handle[:2])[: sum(counts)]
        flat = (rows[0].flatten(0, 1), rows[1].flatten(0, 1)) if self._in_float8 else rows.flatten(0, 1)
        rows_MD, known_S = wire_format.unpack(flat, index_M, width), SlotCounts.of(counts, hidden_TD.device)
        layout = LowLatencyLayout(handle, slots_TK, index_M)
        return Dispatched(rows_MD, known_S, None, weights_TK.detach(), hidden_TD.dtype, layout)

    def combine(self, out_MD: Tensor, dispatched: Dispatched) -> Tensor:
        """As `Dispatcher.combine`, in bfloat16 on the way."""
        layout, width = dispatched.metadata, out_MD.shape[1]
        assert isinstance(layout, LowLatencyLayout)
        places = self._group.size() * self.most_tokens
        out_SND = out_MD.new_empty(self._slots, places, width, dtype=wire_format.WIRE_DTYPE)
        out_SND.view(-1, width).index_copy_(0, layout.index_M, out_MD.to(wire_format.WIRE_DTYPE))
        weights_TK = dispatched.combine_weights.float().contiguous()
        with self._channels.shared("low latency"):
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
        deepep_package.refuse_filled_memory()
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
