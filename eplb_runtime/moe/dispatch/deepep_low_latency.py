"""DeepEP's low-latency kernels, for inference: small batches, in buffers made for so many tokens a rank.

Each choice goes to its expert's rank by itself, in no order; rows are brought into the order that all dispatchers keep.
Results are weighed and summed where the token is, in float32 and in the router's order. Without gradients only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import ConfigError
from ...distributed.transports import deepep_package
from ...distributed.transports.nvshmem import claim
from ..experts.compute import SlotCounts
from . import float8, row_bytes
from .base import Dispatched
from .channels import MicroBatchChannel, MicroBatchChannels
from .metadata import DispatchMetadata

WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Hidden sizes that these kernels are built for (csrc/kernels/launch.cuh, SWITCH_HIDDEN)."""
MOST_TOP_K = 11
"""Choices of a token (csrc/kernels/internode_ll.cu, kNumMaxTopK)."""
_LOW = (1 << 32) - 1


@dataclass(frozen=True, eq=False)
class LowLatencyLayout(DispatchMetadata):
    """Where the rows of one batch went: DeepEP's handle, slots, and for each row by slot its place in ``[S, R * most
    tokens]``."""

    handle: Any
    slots_TK: Tensor
    index_M: Tensor


class LowLatency:
    """One EP group's way for batches of few tokens. Every method is collective over the group.

    Args:
        group: the EP group, on GPUs of one node.
        slots_per_rank: S; physical slots are DeepEP's experts.
        most_tokens: of a rank and batch; equal on all ranks.
        in_float8: DeepEP rounds hidden states on their way.
        channels: two batches at once take turns with one buffer, since a process starts NVSHMEM once.

    Raises:
        ConfigError: DeepEP is not there, or cannot serve this group so.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots_per_rank: int,
        most_tokens: int,
        in_float8: bool = False,
        channels: MicroBatchChannels | None = None,
    ) -> None:
        if group.size() > deepep_package.RANKS_OF_A_NODE:
            raise ConfigError(
                "low_latency_tokens is for the ranks of one node: between nodes DeepEP's other kernels have started "
                "NVSHMEM, and a process starts it once; leave low_latency_tokens out"
            )
        self.most_tokens = most_tokens
        self._package = deepep_package.imported()
        self._group = group
        self._slots = slots_per_rank
        self._num_experts = group.size() * slots_per_rank
        self._in_float8 = in_float8
        self._channels = channels or MicroBatchChannels(MicroBatchChannel(group, group))
        self._made: tuple[int, Any] | None = None

    def dispatch(self, hidden_TD: Tensor, weights_TK: Tensor, slots_TK: Tensor) -> Dispatched:
        """As `Dispatcher.dispatch`, of what `check` lets through. One host sync, for the numbers of rows."""
        slots_TK = slots_TK.contiguous()
        hidden_there = hidden_TD.contiguous()
        with self._channels.shared("low latency"):
            rows, counts_S, handle, *_ = self._buffer(hidden_TD.shape[1]).low_latency_dispatch(
                hidden_there, slots_TK, self.most_tokens, self._num_experts, use_fp8=self._in_float8
            )
        counts = counts_S.tolist()
        index_M = self._in_order(handle, counts_S, sum(counts))
        if self._in_float8:
            rows_MD = float8.unpack((rows[0].flatten(0, 1), rows[1].flatten(0, 1)), index_M)
        else:
            rows_MD = rows.flatten(0, 1).index_select(0, index_M)
        known_S = SlotCounts.of(counts, hidden_TD.device)
        layout = LowLatencyLayout(handle, slots_TK, index_M)
        return Dispatched(rows_MD, known_S, None, weights_TK.detach(), hidden_TD.dtype, layout)

    def combine(self, out_MD: Tensor, dispatched: Dispatched) -> Tensor:
        """As `Dispatcher.combine`, in bfloat16 on the way."""
        layout, width = dispatched.metadata, out_MD.shape[1]
        assert isinstance(layout, LowLatencyLayout)
        places = self._group.size() * self.most_tokens
        out_SND = out_MD.new_empty(self._slots, places, width, dtype=row_bytes.WIRE_DTYPE)
        out_SND.view(-1, width).index_copy_(0, layout.index_M, out_MD.to(row_bytes.WIRE_DTYPE))
        weights_TK = dispatched.combine_weights.float().contiguous()
        with self._channels.shared("low latency"):
            combined_TD, *_ = self._buffer(width).low_latency_combine(
                out_SND, layout.slots_TK, weights_TK, layout.handle
            )
        result: Tensor = combined_TD.to(dispatched.dtype)
        return result

    def _in_order(self, handle: Any, counts_S: Tensor, rows: int) -> Tensor:
        """int64 ``[M]``: places of rows by slot, then by source rank, then by position there."""
        token_SN, range_SR, *_ = handle
        begin_SR, count_SR = range_SR >> 32, range_SR & _LOW
        device = token_SN.device
        place_N = torch.arange(token_SN.shape[1], device=device)
        inside_SRN = (place_N >= begin_SR.unsqueeze(2)) & (place_N < (begin_SR + count_SR).unsqueeze(2))
        source_R1 = torch.arange(range_SR.shape[1], device=device).unsqueeze(1)
        key_SN = (inside_SRN * source_R1).sum(dim=1) * self.most_tokens + token_SN
        order_SN = key_SN.masked_fill(~inside_SRN.any(dim=1), torch.iinfo(torch.int64).max).argsort(dim=1)
        # Of each slot, the first so many.
        taken_SN = place_N < counts_S.unsqueeze(1)
        first_S1 = torch.arange(self._slots, device=device).unsqueeze(1) * token_SN.shape[1]
        found_M = (order_SN + first_S1).view(-1)
        chosen_M = taken_SN.view(-1).to(torch.int8).argsort(descending=True, stable=True)[:rows]
        return found_M.index_select(0, chosen_M)

    def check(self, hidden_TD: Tensor, top_k: int) -> None:
        """Refuse what there are no kernels for, by shapes and dtypes alone."""
        width = hidden_TD.shape[1]
        if hidden_TD.dtype != row_bytes.WIRE_DTYPE or width not in WIDTHS or top_k > MOST_TOP_K:
            raise ConfigError(
                f"low_latency_tokens is for bfloat16 hidden states of {', '.join(map(str, WIDTHS))} columns and up to "
                f"{MOST_TOP_K} choices a token, and these are {width} columns of {hidden_TD.dtype} with {top_k}: "
                "leave low_latency_tokens out"
            )

    def _buffer(self, width: int) -> Any:
        deepep_package.refuse_filled_memory()
        if self._made is None:
            if why := claim("low_latency_tokens", self._group, again=True):
                raise ConfigError(f"low_latency_tokens: {why}; leave low_latency_tokens out")
            nbytes = self._package.Buffer.get_low_latency_rdma_size_hint(
                self.most_tokens, width, self._group.size(), self._num_experts
            )
            buffer = self._package.Buffer(
                self._group, num_rdma_bytes=nbytes, low_latency_mode=True, num_qps_per_rank=self._slots
            )
            self._made = width, buffer
        made_for, buffer = self._made
        if width != made_for:
            raise ConfigError(
                f"low_latency_tokens serves layers of one hidden size, and these have {made_for} and {width}: "
                "leave low_latency_tokens out"
            )
        return buffer
