"""DeepEP's second interface, `deep_ep.ElasticBuffer`, as a carrier of rows. What rows mean stands elsewhere.

Its buffers are made for the most tokens that any rank sends at once, so ranks tell each other how many they have ahead
of each new way; rows are asked for in a fixed order, which costs it a sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..migration.transports.deepep_package import imported, refuse_filled_memory
from .carrier import Arrival, agreed, grown, parts, whole
from .deepep_buffer import MOST_ROW_BYTES
from .lanes import Lane, Lanes


class ElasticCarrier:
    """As `BufferCarrier`; between any number of ranks.

    Args:
        group: the EP group, on GPUs.
        slots_per_rank: S; physical slots are DeepEP's experts.
        num_sms: multiprocessors that its kernels take; even.
        lanes: two batches that travel at once have buffers of their own; sizes are exchanged in their counts' groups.
        package: `deep_ep`; None: imported.

    Raises:
        ConfigError: DeepEP is not there, or is older than this interface.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots_per_rank: int,
        num_sms: int,
        lanes: Lanes | None = None,
        package: Any = None,
    ) -> None:
        self._package = package if package is not None else imported("ElasticBuffer")
        self._lanes = lanes or Lanes(Lane(group, group))
        self._num_experts = group.size() * slots_per_rank
        self._num_sms = num_sms
        self._buffers: dict[Lane, tuple[Any, tuple[int, ...]]] = {}

    def carry(self, rows_NC: Tensor, slots_NK: Tensor, most_rows: int = 0) -> Arrival:
        """As `BufferCarrier.carry`, of bfloat16; a token may not name a slot twice."""
        first, *more = parts(rows_NC, MOST_ROW_BYTES)
        sizes = (max(1, len(first)), first.shape[1], slots_NK.shape[1])
        buffer, most = self._buffer(agreed(sizes, rows_NC.device, self._lanes.here()))
        arrived, slots_UK, _, handle, _ = buffer.dispatch(
            first,
            topk_idx=slots_NK.contiguous().to(self._package.topk_idx_t),
            num_experts=self._num_experts,
            num_max_tokens_per_rank=most,
            num_sms=self._num_sms,
        )
        arrived = whole([arrived, *(self._again(part, handle) for part in more)])
        return Arrival(arrived, slots_UK.long(), list(handle.num_recv_tokens_per_expert_list), handle)

    def again(self, rows_NC: Tensor, ticket: Any) -> Tensor:
        """As `BufferCarrier.again`."""
        return whole([self._again(part, ticket) for part in parts(rows_NC, MOST_ROW_BYTES)])

    def back(self, rows_UC: Tensor, ticket: Any) -> Tensor:
        """As `BufferCarrier.back`."""
        return whole([self._back(part, ticket) for part in parts(rows_UC, MOST_ROW_BYTES)])

    def close(self, deadline: float) -> None:
        """Nothing: a process keeps DeepEP's buffers (`deepep_package.py`)."""

    def _again(self, part: Tensor, handle: Any) -> Tensor:
        buffer, _ = self._buffer(_sizes(part, handle))
        rows: Tensor = buffer.dispatch(part, handle=handle, num_sms=self._num_sms)[0]
        return rows

    def _back(self, part: Tensor, handle: Any) -> Tensor:
        buffer, _ = self._buffer(_sizes(part, handle))
        rows: Tensor = buffer.combine(part, handle, num_sms=self._num_sms)[0]
        return rows

    def _buffer(self, wanted: Sequence[int]) -> tuple[Any, int]:
        """One that is large enough, made anew on all ranks alike; and the rows of a rank that it is made for.

        Args:
            wanted: rows, columns and choices, equal on all ranks.
        """
        refuse_filled_memory()
        lane = self._lanes.here()
        buffer, had = self._buffers.get(lane, (None, (0, 0, 0)))
        if (sizes := grown(had, wanted)) != had:
            had = sizes
            buffer = self._package.ElasticBuffer(
                lane.tokens, num_max_tokens_per_rank=had[0], hidden=had[1], num_topk=had[2], deterministic=True
            )
            self._buffers[lane] = buffer, had
        return buffer, had[0]


def _sizes(part: Tensor, handle: Any) -> tuple[int, int, int]:
    """What a buffer must have for these rows; a handle is of no one buffer."""
    return handle.num_max_tokens_per_rank, part.shape[1], handle.topk_idx.shape[1]
