"""What torchtitan's own dispatchers run on a GPU with, over gloo: the buffers of deep_ep (`ElasticBuffer`,
`HybridEPBuffer`) with their signatures, orders and demands, and the memory and kernels of MinimalAsyncEP.

A token travels once to each rank that has any of its experts, and what ranks give back for it is added in float32, in
the order of ranks. torchtitan's operators themselves are its own, registered for a CPU by `use`.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import symmetric_memory_double
import torch
from flex_dispatch_double import Handle, handle_of
from torch import Tensor

NARROW_OR_DOUBLE = (torch.bfloat16, torch.float64)
"""What the buffers take, and what stands for it where a training is in float64 (`titan_float64`)."""
HAS_HYBRIDEP = torch.__version__ >= "2.14"
"""torchtitan's part for it is not imported with an older one."""
NO_ROW = 1e4
"""In memory that is not written: what is read of it is seen in any result."""
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


@dataclass(frozen=True)
class HybridHandle:
    """What HybridEP keeps of a dispatch.

    Args:
        token_N, expert_N: of each row that came: which of the received tokens it is of, and whose.
        place_N: of the row, among those that fill up experts.
        rows: as many as there are places.
    """

    way: Handle
    token_N: Tensor
    expert_N: Tensor
    place_N: Tensor
    rows: int
    counts_e: Tensor = field(repr=False)


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor]:
    chosen = torch.zeros(num_of_tokens, num_of_experts, dtype=torch.bool).scatter(1, topk_idx, True)
    return chosen, topk_weights.new_zeros(num_of_tokens, num_of_experts).scatter(1, topk_idx, topk_weights)


class HybridEPBuffer:
    """Of DeepEP's branch hybrid-ep."""

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
    ) -> None:
        assert not use_fp8
        self.group = group
        self.configurer = SimpleNamespace(
            buffer_config=SimpleNamespace(
                hidden_dim=hidden_dim,
                max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
                num_of_experts_per_rank=num_local_experts,
            )
        )

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        num_of_experts_per_rank: int | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: HybridHandle | None = None,
        non_blocking: bool = False,
    ) -> tuple[Tensor, Tensor | None, None, Tensor, HybridHandle]:
        assert hidden.dtype in NARROW_OR_DOUBLE and scaling_factor is None
        CALLS.append("dispatch" if handle is None else "dispatch again")
        if handle is None:
            assert routing_map is not None and num_of_experts_per_rank is not None
            assert routing_map.dtype == torch.bool and len(routing_map) == len(hidden)
            assert (num_permuted_tokens is not None) == non_blocking
            handle = self._handle(routing_map, num_of_experts_per_rank, num_permuted_tokens, pad_multiple or 1)
        assert num_permuted_tokens in (None, handle.rows)
        rows = _placed(handle, handle.way.there(hidden)[handle.token_N])
        if probs is None:
            return rows, None, None, handle.counts_e, handle
        first = self.group.rank() * len(handle.counts_e)
        return (
            rows,
            _placed(handle, handle.way.there(probs)[handle.token_N, first + handle.expert_N]),
            None,
            handle.counts_e,
            handle,
        )

    def _handle(self, routing_map: Tensor, local: int, most: int | None, multiple: int) -> HybridHandle:
        way = handle_of(self.group, routing_map.unflatten(1, (-1, local)).any(dim=-1))
        first = self.group.rank() * local
        chosen = way.there(routing_map.to(torch.uint8))[:, first : first + local].bool()
        expert, token = chosen.T.nonzero(as_tuple=True)
        counts = chosen.sum(dim=0)
        filled = (counts + multiple - 1) // multiple * multiple
        within = torch.arange(len(expert)) - (counts.cumsum(0) - counts)[expert]
        place = (filled.cumsum(0) - filled)[expert] + within
        assert most is None or int(filled.sum()) <= most, "the real one drops tokens"
        return HybridHandle(way, token, expert, place, int(filled.sum()) if most is None else most, filled)

    def combine_with_unpermute(
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: HybridHandle
    ) -> tuple[Tensor, Tensor | None]:
        assert hidden.dtype in NARROW_OR_DOUBLE and len(hidden) == handle.rows
        CALLS.append("combine")
        count = sum(handle.way.received)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        rows = torch.zeros(count, hidden.shape[1], dtype=wide)
        rows.index_add_(0, handle.token_N, hidden[handle.place_N].to(wide))
        combined = handle.way.back(rows.to(hidden.dtype))
        if probs is None:
            return combined, None
        local = len(handle.counts_e)
        dense = torch.zeros(count, local * self.group.size(), dtype=torch.promote_types(probs.dtype, torch.float32))
        dense[handle.token_N, self.group.rank() * local + handle.expert_N] = probs[handle.place_N].to(dense.dtype)
        return combined, handle.way.back(dense)


def _placed(handle: HybridHandle, rows: Tensor) -> Tensor:
    """Where they belong; rows that fill up an expert are zero, and what is behind the last is not written."""
    result = rows.new_full((handle.rows, *rows.shape[1:]), NO_ROW)
    result[: int(handle.counts_e.sum())] = 0
    result[handle.place_N] = rows
    return result


# -- MinimalAsyncEP ----------------------------------------------------------------------------------------------------


def copy_full_counts_to_peers_kernel(counts: Tensor, dsts: list[Tensor], *, rank: int, **_: Any) -> None:
    assert counts.dtype == torch.int64
    for peer in dsts:
        peer[rank] = counts


def copy_rows_to_peers_kernel(
    src: Tensor,
    dsts: list[Tensor],
    dst_ranks: Tensor,
    dst_rows: Tensor,
    *,
    num_rows: int,
    num_cols: int,
    src_rows: Tensor | None = None,
    num_valid_rows: Tensor | None = None,
    **_: Any,
) -> None:
    CALLS.append("copy")
    assert src.dtype == dsts[0].dtype
    count = num_rows if num_valid_rows is None else int(num_valid_rows)
    rows = src[:count] if src_rows is None else src[src_rows[:count]]
    for rank, peer in enumerate(dsts):
        mine = dst_ranks[:count] == rank
        peer[:, :num_cols][dst_rows[:count][mine]] = rows[mine]


def fill_dispatch_metadata_kernel(
    counts: Tensor,
    local_dest_offsets: Tensor,
    local_count_starts: Tensor,
    *,
    num_routed_tokens: int,
    num_local_experts: int,
    max_tokens_per_segment: int,
) -> tuple[Tensor, Tensor]:
    expert = torch.arange(len(counts)).repeat_interleave(counts)
    assert len(expert) == num_routed_tokens and int(counts.max()) <= max_tokens_per_segment
    within = torch.arange(num_routed_tokens) - local_count_starts[expert]
    return expert // num_local_experts, local_dest_offsets[expert] + within


def fill_combine_metadata_kernel(
    segment_lens: Tensor,
    output_starts: Tensor,
    source_input_starts: Tensor,
    *,
    ep_rank: int,
    ep_size: int,
    num_local_experts: int,
    receive_capacity: int,
    max_tokens_per_segment: int,
) -> tuple[Tensor, Tensor, Tensor]:
    segment = torch.arange(len(segment_lens)).repeat_interleave(segment_lens)
    count = len(segment)
    source, expert = segment % ep_size, ep_rank * num_local_experts + segment // ep_size
    ranks, rows = (torch.full((receive_capacity,), -1) for _ in range(2))
    ranks[:count] = source
    rows[:count] = source_input_starts[source, expert] + torch.arange(count) - output_starts[segment]
    return ranks, rows, torch.tensor([count])


def invert_flat_indices_kernel(flat_indices: Tensor, *, num_rows: int) -> Tensor:
    return torch.empty_like(flat_indices).scatter_(0, flat_indices, torch.arange(num_rows))


def reduce_topk_slots_kernel(
    routed_output: Tensor,
    slot_to_row: Tensor,
    scores: Tensor | None,
    *,
    num_tokens: int,
    top_k: int,
    scores_are_slot_ordered: bool = False,
) -> Tensor:
    total = torch.zeros(num_tokens, routed_output.shape[1])
    for slot in range(top_k):
        row = slot_to_row.view(num_tokens, top_k)[:, slot]
        value = routed_output[row].float()
        if scores is not None:
            assert scores_are_slot_ordered
            value = value * scores.view(num_tokens, top_k)[:, slot, None].float()
        total += value
    return total.to(routed_output.dtype)


def expand_topk_grad_kernel(
    grad_out: Tensor,
    flat_indices: Tensor,
    scores: Tensor,
    *,
    top_k: int,
    dtype: torch.dtype,
    scores_are_slot_ordered: bool = False,
) -> Tensor:
    assert scores_are_slot_ordered
    return (grad_out[flat_indices // top_k].float() * scores[flat_indices, None].float()).to(dtype)


def topk_scores_grad_kernel(
    routed_output: Tensor,
    grad_out: Tensor,
    flat_indices: Tensor,
    *,
    top_k: int,
    dtype: torch.dtype,
    scores_are_slot_ordered: bool = False,
) -> Tensor:
    assert scores_are_slot_ordered
    products = (routed_output.float() * grad_out[flat_indices // top_k].float()).sum(dim=1)
    return torch.empty(len(products), dtype=dtype).scatter_(0, flat_indices, products.to(dtype))


KERNELS = (
    copy_full_counts_to_peers_kernel,
    copy_rows_to_peers_kernel,
    fill_dispatch_metadata_kernel,
    fill_combine_metadata_kernel,
    invert_flat_indices_kernel,
    reduce_topk_slots_kernel,
    expand_topk_grad_kernel,
    topk_scores_grad_kernel,
)


def use() -> None:
    """Let torchtitan find these, and run its own operators on a CPU."""
    package, of_hybrid = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.hybrid_ep_buffer")
    package.__path__ = []  # type: ignore[attr-defined]
    package.ElasticBuffer, package.HybridEPBuffer = ElasticBuffer, HybridEPBuffer  # type: ignore[attr-defined]
    of_hybrid.indices_to_map = indices_to_map  # type: ignore[attr-defined]
    sys.modules["deep_ep"], sys.modules["deep_ep.hybrid_ep_buffer"] = package, of_hybrid
    from torchtitan.distributed.deepep import deepep
    from torchtitan.distributed.minimal_async_ep import api

    library = torch.library.Library("deepep", "IMPL")
    library.impl("dispatch", deepep._dispatch_op_impl, "CPU")
    library.impl("combine", deepep._combine_op_impl, "CPU")
    deepep._cpu = library  # kept: what it registers goes with it
    operators = [api.dispatch_op, api.combine_op, api.dispatch_backward_op, api.combine_backward_op]
    if HAS_HYBRIDEP:
        from torchtitan.distributed.deepep import hybridep

        operators += [hybridep._dispatch_impl, hybridep._combine_impl]
        operators += [hybridep._dispatch_bwd_impl, hybridep._combine_bwd_impl]
    for operator in operators:
        operator.register_kernel("cpu")(operator._init_fn)
    api.symm_mem = symmetric_memory_double
    for kernel in KERNELS:
        setattr(api, kernel.__name__, kernel)


def forget_buffers() -> None:
    """The next model makes buffers of its own, for its own process groups."""
    from torchtitan.distributed.deepep import deepep
    from torchtitan.distributed.minimal_async_ep import api

    deepep._buffer = api._buffer_state = api._buffer_key = None
    if HAS_HYBRIDEP:
        from torchtitan.distributed.deepep import hybridep

        hybridep._buffer = None
