"""What torchtitan's own DeepEP dispatcher runs on a GPU with, over gloo: the buffer of deep_ep, with its signatures,
orders and demands.

A token travels once to each rank that has any of its experts, and what ranks give back for it is added in float32, in
the order of ranks. torchtitan's operators themselves are its own, registered for a CPU by `use`.
"""

import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
from support.flex_dispatch_double import Handle, handle_of
from torch import Tensor

NARROW_OR_DOUBLE = (torch.bfloat16, torch.float64)
"""What a buffer takes, and what stands for it where a training is in float64."""
CALLS: list[str] = []
"""Of all buffers of this process, in order."""


class Event:
    """Of work that is done already."""

    def current_stream_wait(self) -> None:
        CALLS.append("waited")


@dataclass
class ElasticHandle:
    """As DeepEP's `EPHandle`.

    Args:
        order_N: the rows of a deterministic dispatch in the order in which this one came.
        ids_NK: experts of this rank, -1 for others.
    """

    way: Handle
    order_N: Tensor
    ids_NK: Tensor
    num_recv_tokens_per_expert_list: list[int]
    num_sms: int


class ElasticBuffer:
    """Of DeepEP 2, without its expanded layout."""

    @staticmethod
    def get_buffer_size_hint(
        group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0, use_fp8_dispatch: bool = False
    ) -> int:
        assert not use_fp8_dispatch
        return int(group.size()) * num_max_tokens_per_rank * (2 * hidden + 12 * num_topk)

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        assert num_bytes is not None and hidden and num_topk and explicitly_destroy
        self.group, self.num_bytes, self.num_max_tokens_per_rank = group, num_bytes, num_max_tokens_per_rank
        self.deterministic = deterministic

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        return 24

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        num_sms: int = 0,
        handle: ElasticHandle | None = None,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None, ElasticHandle, Event]:
        assert x.dtype in NARROW_OR_DOUBLE and x.is_contiguous() and num_sms and not do_expand
        CALLS.append("dispatch" if handle is None else "dispatch again")
        if handle is not None:
            assert topk_idx is None and topk_weights is None and not do_cpu_sync
            return handle.way.there(x)[handle.order_N], handle.ids_NK, None, handle, Event()
        assert topk_idx is not None and topk_weights is not None and num_experts is not None
        assert topk_idx.dtype == torch.int64 and topk_weights.dtype in (torch.float32, torch.float64) and do_cpu_sync
        assert topk_idx.is_contiguous() and topk_weights.is_contiguous()
        assert len(x) == num_max_tokens_per_rank <= self.num_max_tokens_per_rank
        local, rank = num_experts // self.group.size(), self.group.rank()
        ranks = torch.arange(self.group.size())
        on_rank = topk_idx.div(local, rounding_mode="floor").masked_fill(topk_idx < 0, -1)
        way = handle_of(self.group, (on_rank[..., None] == ranks).any(dim=1))
        count = sum(way.received)
        order = torch.arange(count) if self.deterministic else torch.randperm(count)
        ids = way.there(topk_idx)[order] - rank * local
        mine = (ids >= 0) & (ids < local)
        ids = torch.where(mine, ids, -1)
        weights = torch.where(mine, way.there(topk_weights)[order], 0)
        counts = ids[mine].bincount(minlength=local).tolist()
        made = ElasticHandle(way, order, ids, counts, num_sms)
        return way.there(x)[order], ids, weights, made, Event()

    def combine(
        self,
        x: Tensor,
        handle: ElasticHandle,
        topk_weights: Tensor | None = None,
        async_with_compute_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Event]:
        assert x.dtype in NARROW_OR_DOUBLE and len(x) == len(handle.order_N)
        CALLS.append("combine")
        sorted_N = handle.order_N.argsort()
        weights = None if topk_weights is None else handle.way.back(topk_weights[sorted_N])
        return handle.way.back(x[sorted_N]), weights, Event()


def use() -> None:
    """Let torchtitan find these, and run its own operators on a CPU."""
    package = types.ModuleType("deep_ep")
    package.ElasticBuffer = ElasticBuffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = package
    from torchtitan.distributed.deepep import deepep

    library = torch.library.Library("deepep", "IMPL")
    library.impl("dispatch", deepep._dispatch_op_impl, "CPU")
    library.impl("combine", deepep._combine_op_impl, "CPU")
    deepep._cpu = library  # kept: what it registers goes with it


def forget_buffers() -> None:
    """The next model makes buffers of its own, for its own process groups."""
    from torchtitan.distributed.deepep import deepep

    deepep._buffer = None
