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
_MOST_LOCAL_EXPERTS = 1024
_SUMMED_BYTES = 512
"""Between nodes a warp adds rows up 32 channels of 16 bytes at a time, and asserts that nothing is left over."""


@dataclass(frozen=True, eq=False)
class RecvTokens:
    """Rows that arrived: ordered by source rank, then by their position there.

    Args:
        rows_UC: bfloat16 ``[U, C]``, or `float8.Rows` where those were sent.
        slots_UK: int64, the local slots of each row, -1 where a choice is on another rank.
        counts: choices for each local slot; None: only the device knows. Then rows past those that came may follow,
            with no slot (-1) and memory that nobody has written.
        handle: DeepEP's, for `DeepEPBuffer.dispatch_cached` and `DeepEPBuffer.combine`.
    """

    rows_UC: Any
    slots_UK: Tensor
    counts: list[int] | None
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
        self._shared = deepep_package.shared_between(self._package, group)
        self._num_sms = num_sms
        self._num_ranks = group.size()
        self._num_experts = group.size() * slots_per_rank
        if slots_per_rank > _MOST_LOCAL_EXPERTS:
            raise ConfigError(f"dispatch='deepep' knows up to {_MOST_LOCAL_EXPERTS} slots a rank, not {slots_per_rank}")
        self._package.Buffer.set_num_sms(num_sms)
        # They hold the number of multiprocessors: made after it was set.
        self._dispatch_config, self._combine_config = deepep_package.settings(self._package, group.size())
        self._others: dict[MicroBatchChannel, Any] = {}

    def dispatch(self, rows_NC: Any, slots_NK: Tensor, most_rows: int = 0) -> RecvTokens:
        """Send each row once to every rank where it has a slot. Without ``most_rows`` one host sync, DeepEP's own.

        Args:
            rows_NC: bfloat16; any bytes, they are copied. Or float8 with scales.
            slots_NK: int64, physical slots.
            most_rows: no rank sends more: R times as many arrive, those that are not sent unwritten, and the host does
                not wait; ranks of one node only. 0: as many arrive as are sent.
        """
        buffer = self._buffer()
        slots_NK = slots_NK.contiguous()
        to_ranks, to_nodes, to_experts, in_rank, _ = buffer.get_dispatch_layout(slots_NK, self._num_experts)
        first, *more = split_columns(rows_NC, MOST_ROW_BYTES)
        # Weights go behind the rows' other bytes: those given here would not go when a handle is used again.
        unused = torch.zeros(slots_NK.shape, dtype=torch.float32, device=slots_NK.device)
        rows, slots_UK, _, counts, handle, _ = buffer.dispatch(
            first,
            num_tokens_per_rank=to_ranks,
            num_tokens_per_rdma_rank=to_nodes,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=to_experts,
            topk_idx=slots_NK,
            topk_weights=unused,
            num_worst_tokens=most_rows * self._num_ranks,
            config=self._dispatch_config,
        )
        rows = cat_columns([rows, *self._columns_again(buffer, more, handle)])
        return RecvTokens(rows, slots_UK, None if most_rows else counts, handle)

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
        configs = self._dispatch_config, self._combine_config
        if self._channels.is_first(channel):
            return self._shared.buffer(channel.tokens, self._num_sms, *configs)
        if channel not in self._others:
            self._others[channel] = deepep_package.new_buffer(self._package, channel.tokens, *configs)
        return self._others[channel]


def split_columns(rows_NC: Any, most_bytes: int) -> list[Any]:
    """Rows in pieces of as many columns as one call takes; float8 rows stay in one.

    Args:
        most_bytes: of a row.
    """
    if not isinstance(rows_NC, Tensor):
        return [rows_NC]
    most = most_bytes // rows_NC.element_size()
    if rows_NC.shape[1] <= most:
        return [rows_NC.contiguous()]
    return [piece.contiguous() for piece in rows_NC.split(most, dim=1)]


def cat_columns(pieces: list[Any]) -> Any:
    """Inverse of `split_columns`."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
