"""DeepEP's first interface, `deep_ep.Buffer`, as a carrier of rows: NVLink inside a node, RDMA between nodes.

Here stands what DeepEP asks of whoever calls it (widths, dtypes, numbers of slots) and nothing of what the rows mean.
Whether it is there at all, and the buffers: `distributed/transports/deepep_package.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ...config import ConfigError
from ...distributed.transports import deepep_package
from ...distributed.transports.deepep_package import refuse_filled_memory, settings
from .carrier import Arrival, parts, whole
from .lanes import Lane, Lanes

MOST_ROW_BYTES = 15 << 10
"""A row is staged in a warp's 16 KiB of shared memory, with its ids and weights; wider ones go in several calls."""
_MOST_LOCAL_EXPERTS = 1024
_SUMMED_BYTES = 512
"""Between nodes a warp adds rows up 32 lanes of 16 bytes at a time, and asserts that nothing is left over."""


class BufferCarrier:
    """One EP group's way through DeepEP. Every method is collective over the group.

    Args:
        group: the EP group, on GPUs; DeepEP hands addresses around in it (as pickles) when buffers are made.
        slots_per_rank: S; physical slots are DeepEP's experts.
        num_sms: multiprocessors that its kernels take; even.
        lanes: two batches that travel at once have buffers of their own.
        package: `deep_ep`; None: imported.

    Raises:
        ConfigError: DeepEP is not there, or does not know so many ranks or slots.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots_per_rank: int,
        num_sms: int,
        lanes: Lanes | None = None,
        package: Any = None,
    ) -> None:
        self._package = package if package is not None else deepep_package.imported()
        self._lanes = lanes or Lanes(Lane(group, group))
        self._shared = deepep_package.shared_between(self._package, group)
        self._num_sms = num_sms
        self._num_ranks = group.size()
        self._num_experts = group.size() * slots_per_rank
        if slots_per_rank > _MOST_LOCAL_EXPERTS:
            raise ConfigError(f"dispatch='deepep' knows up to {_MOST_LOCAL_EXPERTS} slots a rank, not {slots_per_rank}")
        self._package.Buffer.set_num_sms(num_sms)
        # They hold the number of multiprocessors: made after it was set.
        self._there, self._back = settings(self._package, group.size())
        self._others: dict[Lane, Any] = {}

    def carry(self, rows_NC: Any, slots_NK: Tensor, most_rows: int = 0) -> Arrival:
        """As `Carrier.carry`; without ``most_rows`` one host sync, DeepEP's own. With them, ranks of one node only."""
        buffer = self._buffer()
        slots_NK = slots_NK.contiguous()
        to_ranks, to_nodes, to_experts, in_rank, _ = buffer.get_dispatch_layout(slots_NK, self._num_experts)
        first, *more = parts(rows_NC, MOST_ROW_BYTES)
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
            config=self._there,
        )
        rows = whole([rows, *(self._again(buffer, part, handle) for part in more)])
        return Arrival(rows, slots_UK, None if most_rows else counts, handle)

    def again(self, rows_NC: Any, ticket: Any) -> Any:
        """As `Carrier.again`; no sync."""
        buffer = self._buffer()
        return whole([self._again(buffer, part, ticket) for part in parts(rows_NC, MOST_ROW_BYTES)])

    def back(self, rows_UC: Tensor, ticket: Any) -> Tensor:
        """As `Carrier.back`."""
        columns = rows_UC.shape[1]
        if self._num_ranks > deepep_package.RANKS_OF_A_NODE:
            left_over = -columns % (_SUMMED_BYTES // rows_UC.element_size())
            rows_UC = functional.pad(rows_UC, (0, left_over)) if left_over else rows_UC
        buffer = self._buffer()
        back = whole([buffer.combine(part, ticket, config=self._back)[0] for part in parts(rows_UC, MOST_ROW_BYTES)])
        return back if back.shape[1] == columns else back[:, :columns].contiguous()

    def close(self, deadline: float) -> None:
        """Nothing: a process keeps DeepEP's buffers (`deepep_package.py`)."""

    def _again(self, buffer: Any, part: Any, handle: Any) -> Any:
        rows = buffer.dispatch(part, handle=handle, config=self._there)[0]
        return rows

    def _buffer(self) -> Any:
        """The buffer of the current micro-batch's way. Experts and their copies may go by the first way's.

        Kernels of both ways may be on a GPU at once and wait for their peers there. That ends: all ranks launch them in
        one order (`Lanes.launching`), experts' among them, and both ways' multiprocessors are there besides each other
        (`Balancer.at_once` asks for as many), while what computes ends by itself.
        """
        refuse_filled_memory()
        lane = self._lanes.here()
        if self._lanes.is_first(lane):
            return self._shared.buffer(lane.tokens, self._num_sms, self._there, self._back)
        if lane not in self._others:
            self._others[lane] = deepep_package.new_buffer(self._package, lane.tokens, self._there, self._back)
        return self._others[lane]
