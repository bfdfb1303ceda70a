"""Rows to slots and back through DeepEP's first interface, `deep_ep.Buffer`: NVLink inside a node, RDMA between nodes.

Holds what DeepEP asks of its caller (widths, dtypes, numbers of slots), and nothing of what rows mean. Whether the
package is there, and its buffers: `distributed/transports/deepep_package.py`.

Shape suffixes: N rows of this rank, U rows that arrive here, C columns, K slots that a row may go to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ...config import ConfigError
from ...distributed.transports import deepep_package
from .channels import MicroBatchChannel, MicroBatchChannels

MOST_ROW_BYTES = 15 << 10
"""A row is staged in a warp's 16 KiB of shared memory, with its ids and weights; wider ones go in several calls."""
_MOST_LOCAL_EXPERTS, _MOST_LOCAL_EXPERTS_OF_A_NODE = 1024, 128
"""Slots a rank: in all (NUM_MAX_LOCAL_EXPERTS), and inside a node (threads of `intranode::notify_dispatch`)."""
_SUMMED_BYTES = 512
"""Between nodes a warp adds rows up 32 channels of 16 bytes at a time, and asserts that nothing is left over."""


@dataclass(frozen=True, eq=False)
class SendTokens:
    """Where rows go.

    Args:
        slots_NK: int64, physical slots.
        to_ranks: int32 ``[R]``, rows to each rank.
        to_nodes: int32, rows to each node; None inside a node.
        to_experts: int32 ``[P]``, choices for each slot.
        in_rank: bool ``[N, R]``, which rows go to which ranks.
    """

    slots_NK: Tensor
    to_ranks: Tensor
    to_nodes: Tensor | None
    to_experts: Tensor
    in_rank: Tensor


@dataclass(frozen=True)
class RecvCounts:
    """How many rows, and how many choices for each local slot, arrive here; on the host. ``passing``: rows that
    come to this node by this rank, whichever rank there they are for."""

    rows: int
    choices_S: list[int]
    passing: int = 0


@dataclass(frozen=True, eq=False)
class RecvTokens:
    """Rows that arrived: ordered by source rank, then by their position there.

    Args:
        rows_UC: bfloat16 ``[U, C]``, or `float8.Rows` where those were sent. Rows past those that came may follow, with
            no slot (-1) and memory that nobody has written.
        slots_UK: int64, the local slots of each row, -1 where a choice is on another rank.
        counts: choices for each local slot.
        handle: DeepEP's, for `DeepEPBuffer.dispatch_cached` and `DeepEPBuffer.combine`.
    """

    rows_UC: Any
    slots_UK: Tensor
    counts: list[int]
    handle: Any


class DeepEPBuffer:
    """The buffers of one EP group. Every method is collective over the group.

    Args:
        group: the EP group, on GPUs; DeepEP exchanges addresses in it (as pickles) when buffers are made.
        slots_per_rank: S; physical slots are DeepEP's experts.
        num_sms: multiprocessors that its kernels take; even.
        channels: two micro-batches that travel at once have buffers of their own.

    Raises:
        ConfigError: DeepEP is not there, or does not know so many ranks or slots.
    """

    def __init__(
        self, group: dist.ProcessGroup, slots_per_rank: int, num_sms: int, channels: MicroBatchChannels | None = None
    ) -> None:
        self._package = deepep_package.imported()
        self._channels = channels or MicroBatchChannels(MicroBatchChannel(group, group))
        self._num_sms = num_sms
        self._num_ranks = group.size()
        self._num_experts = group.size() * slots_per_rank
        between_nodes = self._num_ranks > deepep_package.RANKS_OF_A_NODE
        most = _MOST_LOCAL_EXPERTS if between_nodes else _MOST_LOCAL_EXPERTS_OF_A_NODE
        if slots_per_rank > most:
            raise ConfigError(f"dispatch='deepep' knows up to {most} slots a rank here, not {slots_per_rank}")
        self._package.Buffer.set_num_sms(num_sms)
        # They hold the number of multiprocessors: made after it was set.
        self._dispatch_config, self._combine_config = deepep_package.settings(self._package, group.size())
        self._buffers: dict[MicroBatchChannel, Any] = {}

    def layout(self, slots_NK: Tensor) -> SendTokens:
        """Count the rows to each rank and slot on the device. No other rank is waited for."""
        slots_NK = slots_NK.contiguous()
        to_ranks, to_nodes, to_experts, in_rank, _ = self._buffer().get_dispatch_layout(slots_NK, self._num_experts)
        return SendTokens(slots_NK, to_ranks, to_nodes, to_experts, in_rank)

    def dispatch(self, rows_NC: Any, sent: SendTokens, counts: RecvCounts) -> RecvTokens:
        """Send each row once to every rank where it has a slot. DeepEP need not tell the host what arrives: inside a
        node it would wait with Python's interpreter locked (csrc/deep_ep.cpp, `intranode_dispatch`), and no thread of
        this process could answer the rank that it waits for."""
        buffer, slots_NK = self._buffer(), sent.slots_NK
        first, *more = split_columns(rows_NC, MOST_ROW_BYTES)
        # Weights go behind the rows' other bytes: those given here would not go when a handle is used again.
        unused = torch.zeros(slots_NK.shape, dtype=torch.float32, device=slots_NK.device)
        rows, slots_UK, _, _, handle, _ = buffer.dispatch(
            first,
            num_tokens_per_rank=sent.to_ranks,
            num_tokens_per_rdma_rank=sent.to_nodes,
            is_token_in_rank=sent.in_rank,
            num_tokens_per_expert=sent.to_experts,
            topk_idx=slots_NK,
            topk_weights=unused,
            num_worst_tokens=max(1, counts.rows, counts.passing),  # with 0 it would wait
            config=self._dispatch_config,
        )
        rows = cat_columns([rows, *self._columns_again(buffer, more, handle)])
        return RecvTokens(rows, slots_UK, counts.choices_S, handle)

    def dispatch_cached(self, rows_NC: Any, handle: Any) -> Any:
        """Send other rows the way of an earlier `dispatch`; no host sync."""
        return cat_columns(self._columns_again(self._buffer(), split_columns(rows_NC, MOST_ROW_BYTES), handle))

    def combine(self, rows_UC: Tensor, handle: Any) -> Tensor:
        """``[N, C]``: rows go back the way that they came, and those of one row are summed in float32."""
        columns = rows_UC.shape[1]
        if self._num_ranks > deepep_package.RANKS_OF_A_NODE:
            left_over = -columns % (_SUMMED_BYTES // rows_UC.element_size())
            rows_UC = functional.pad(rows_UC, (0, left_over)) if left_over else rows_UC
        buffer, pieces = self._buffer(), split_columns(rows_UC, MOST_ROW_BYTES)
        rows_NC = cat_columns([buffer.combine(one, handle, config=self._combine_config)[0] for one in pieces])
        return rows_NC if rows_NC.shape[1] == columns else rows_NC[:, :columns].contiguous()

    def _columns_again(self, buffer: Any, pieces: list[Any], handle: Any) -> list[Any]:
        return [buffer.dispatch(one, handle=handle, config=self._dispatch_config)[0] for one in pieces]

    def _buffer(self) -> Any:
        """The buffer of the current micro-batch. Experts and their replicas may go by the first one's.

        Kernels of both micro-batches may be on a GPU at once and wait for their peers there. That ends: all ranks
        launch them in one order (`MicroBatchChannels.launching`), and there are multiprocessors for both
        (`Balancer.at_once` checks it), while compute ends by itself.
        """
        deepep_package.refuse_filled_memory()
        channel = self._channels.current()
        if channel not in self._buffers:
            given = self._package, channel.tokens
            configs = self._dispatch_config, self._combine_config
            self._buffers[channel] = (
                deepep_package.shared_buffer(*given, self._num_sms, *configs)
                if channel is self._channels.first
                else deepep_package.new_buffer(*given, *configs)
            )
        return self._buffers[channel]


def split_columns(rows_NC: Any, most_bytes: int) -> list[Any]:
    """Return rows in pieces of as many columns as one call of ``most_bytes`` takes; float8 rows stay in one."""
    if not isinstance(rows_NC, Tensor):
        return [rows_NC]
    most = most_bytes // rows_NC.element_size()
    if rows_NC.shape[1] <= most:
        return [rows_NC.contiguous()]
    return [piece.contiguous() for piece in rows_NC.split(most, dim=1)]


def cat_columns(pieces: list[Any]) -> Any:
    """Inverse of `split_columns`."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
