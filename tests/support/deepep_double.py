"""Does over gloo what DeepEP's `Buffer` does over NVLink, and between nodes over RDMA, with its signatures, orders and
demands. For tests on a CPU.

Rows come ordered by source rank and by position there; a handle goes the same way again, without ids and weights;
combine adds up in float32, by rank, what comes back, and gives bfloat16: between nodes on each node first. What DeepEP
asserts, this asserts.
"""

import ctypes
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CALLS: list[str] = []
"""Of all buffers of this process, in order."""
DTYPES: list[torch.dtype] = []
"""Of what was sent, beside `CALLS`."""
LOW_LATENCY_WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Hidden sizes that the low-latency kernels are built for (launch.cuh)."""
NODE = 8
"""Ranks of one node where there are several. The real one has no other number."""
HOST_WAITS: list[str] = []
"""Calls in which the host waited for other ranks with Python's interpreter locked."""
WAIT_SECONDS = 10
"""NUM_CPU_TIMEOUT_SECS; 100 in the real one."""
_locked = ctypes.PyDLL(None)
"""The C library, called as DeepEP is by its binding: Python's interpreter stays locked."""
_between_nodes: list[Any] = []
"""Buffers of this process that have RDMA: NVSHMEM is started once."""


def imported(asked: str = "") -> Any:
    """Stands in for `deepep.imported`."""
    return sys.modules[__name__]


@dataclass
class Config:
    num_sms: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert num_ranks < NODE or num_ranks % NODE == 0
        return self.num_sms // 2 * min(num_ranks, NODE) * 256 * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert num_ranks > NODE and num_ranks % NODE == 0
        return self.num_sms * num_ranks // NODE * 128 * hidden_bytes


class Buffer:
    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
    ) -> None:
        assert num_nvl_bytes > 0 or (low_latency_mode and num_rdma_bytes > 0)
        self.low_latency_mode, self.num_qps, self.num_rdma_bytes = low_latency_mode, num_qps_per_rank, num_rdma_bytes
        # The real one needs the group while it is made, and not afterwards.
        members = dist.get_process_group_ranks(group)
        self.group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        self.rank, self.group_size = group.rank(), group.size()
        self.num_nvl_bytes = num_nvl_bytes
        self.nodes = -(-self.group_size // NODE)
        if self.nodes > 1:
            assert num_rdma_bytes > 0 and not _between_nodes, "a process starts NVSHMEM once"
            _between_nodes.append(self)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", WAIT_SECONDS, 0))
        ports = torch.empty(self.group_size, dtype=torch.int64)
        mine = torch.tensor([self._socket.getsockname()[1]])
        dist.all_gather_into_tensor(ports, mine, group=self.group)
        self._ports = [port for rank, port in enumerate(ports.tolist()) if rank != self.rank]

    def _notify(self, waits: bool) -> None:
        """Tell all other ranks that this one has come to a dispatch, and hear it of them.

        Args:
            waits: as the host does inside a node where it does not say how many rows come: without releasing Python's
                interpreter lock. Otherwise kernels do it, and threads go on.
        """
        for port in self._ports:
            self._socket.sendto(b"1", ("127.0.0.1", port))
        if waits:
            HOST_WAITS.append("dispatch")
            word = ctypes.create_string_buffer(1)
            for _ in self._ports:
                if _locked.recv(self._socket.fileno(), word, 1, 0) != 1:
                    raise RuntimeError("DeepEP error: CPU recv timeout")
        else:
            for _ in self._ports:
                self._socket.recv(1)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16)
        return Config(Buffer.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, None]:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and num_experts % self.group_size == 0
        chosen_N = topk_idx[topk_idx >= 0]
        to_experts = chosen_N.bincount(minlength=num_experts).int()
        in_rank = torch.zeros(len(topk_idx), self.group_size, dtype=torch.bool)
        for column in topk_idx.unbind(1):
            token = torch.nonzero(column >= 0).squeeze(1)
            in_rank[token, column[token] // (num_experts // self.group_size)] = True
        to_nodes = self._by_node(in_rank).sum(0).int() if self.nodes > 1 else None
        return in_rank.sum(0).int(), to_nodes, to_experts, in_rank, None

    def _by_node(self, in_rank: Tensor) -> Tensor:
        """Which tokens go to which nodes."""
        return in_rank.view(len(in_rank), self.nodes, self.group_size // self.nodes).any(2)

    def _fits(self, row_bytes: int, scales: int, config: Any) -> None:
        """Whether rows fit what they are staged in, and the buffers."""
        assert config.get_nvl_buffer_size_hint(row_bytes, self.group_size) <= self.num_nvl_bytes
        if self.nodes == 1:
            assert row_bytes % 32 == 0 and row_bytes // 2 + 8 <= 8192
        else:
            assert row_bytes % 16 == 0 and row_bytes + 8 + 4 * scales + 2 * 4 * 32 + 8 <= 16384
            assert config.get_rdma_buffer_size_hint(row_bytes, self.group_size) <= self.num_rdma_bytes < 2**31

    def dispatch(
        self,
        x: Any,
        handle: tuple | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, tuple | None, None]:
        x, scales = x if isinstance(x, tuple) else (x, None)
        row_bytes = x.shape[1] * x.element_size()
        assert x.dim() == 2 and x.is_contiguous()
        self._fits(row_bytes, 0 if scales is None else scales.shape[1], config)
        if scales is not None:
            assert x.dtype == torch.float8_e4m3fn and x.shape[1] % 128 == 0 and scales.dtype == torch.float32
            assert scales.dim() == 2 and len(scales) == len(x) and x.shape[1] // 128 <= scales.shape[1] <= 128
        else:
            assert x.dtype == torch.bfloat16
        CALLS.append("again" if handle is not None else "dispatch")
        DTYPES.append(x.dtype)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            in_rank, _, arrived = self._unpacked(handle)
            assert len(in_rank) == len(x)
            assert num_worst_tokens == 0, "it would clean ids that are not there"
            rows, _ = self._exchange(x, in_rank)
            return self._with_scales(rows, scales, in_rank, len(arrived)), None, None, None, None, None
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None and is_token_in_rank is not None
        assert topk_idx is not None and topk_weights is not None and topk_weights.dtype == torch.float32
        assert len(topk_idx) == len(topk_weights) == len(x) == len(is_token_in_rank)
        assert topk_idx.shape[1] <= 32
        if self.nodes > 1:
            assert num_tokens_per_rdma_rank is not None and num_tokens_per_rdma_rank.dtype == torch.int32
            to_nodes = self._by_node(is_token_in_rank).sum(0)
            assert torch.equal(num_tokens_per_rdma_rank.long(), to_nodes)
            all_RN = torch.empty(self.group_size, self.nodes, dtype=torch.int64)
            dist.all_gather_into_tensor(all_RN.view(-1), to_nodes, group=self.group)
            of_node = self.group_size // self.nodes
            passing = int(all_RN[self.rank % of_node :: of_node, self.rank // of_node].sum())
            assert not 0 < num_worst_tokens < passing, "the real one writes past its memory"
        local = len(num_tokens_per_expert) // self.group_size
        assert local <= (128 if self.nodes == 1 else 1024), "intranode.cu:154, deep_ep.cpp:522"
        self._notify(waits=num_worst_tokens == 0 and self.nodes == 1)
        rows, received = self._exchange(x, is_token_in_rank)
        ids, _ = self._exchange(topk_idx, is_token_in_rank)
        weights, _ = self._exchange(topk_weights, is_token_in_rank)
        position, _ = self._exchange(torch.arange(len(x), dtype=torch.int32).unsqueeze(1), is_token_in_rank)
        here = ids.div(local, rounding_mode="floor") == self.rank
        ids = torch.where(here, ids - self.rank * local, -1)
        counts = ids[ids >= 0].bincount(minlength=local).tolist()
        prefix = torch.tensor(received, dtype=torch.int32).cumsum(0).unsqueeze(1)
        none = torch.empty(0, dtype=torch.int32)
        weights, arriving = torch.where(here, weights, 0), len(rows)
        if num_worst_tokens:  # nothing is known on the host; what is not there is not initialised
            assert num_worst_tokens >= len(rows), "the real one writes past its memory"
            counts, arriving = [], num_worst_tokens
            ids = torch.cat([ids, ids.new_full((arriving - len(rows), ids.shape[1]), -1)])
            weights = _unwritten(weights, arriving)
        arrived = _unwritten(position.squeeze(1), arriving)
        handle = (prefix, none, none, arrived, is_token_in_rank, none)
        if self.nodes > 1:
            handle = (is_token_in_rank, none, none, none, none, none, prefix, arrived, none, none)
        return self._with_scales(rows, scales, is_token_in_rank, arriving), ids, weights, counts, handle, None

    def combine(
        self,
        x: Tensor,
        handle: tuple,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, None]:
        in_rank, prefix, arrived = self._unpacked(handle)
        row_bytes = x.shape[1] * x.element_size()
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and len(x) == len(arrived) and row_bytes % 16 == 0
        assert self.nodes == 1 or row_bytes % 512 == 0, "a warp adds 32 vectors of 16 bytes at a time"
        self._fits(-(-row_bytes // 32) * 32, 0, config)
        CALLS.append("combine")
        DTYPES.append(x.dtype)
        weights = topk_weights
        assert weights is None or (
            weights.dtype == torch.float32 and weights.is_contiguous() and len(weights) == len(x)
        )
        assert weights is None or weights.shape[1] <= 32
        summed = self._summed(x, in_rank, prefix)
        return summed, None if weights is None else self._summed(weights, in_rank, prefix), None

    def _summed(self, rows: Tensor, in_rank: Tensor, prefix: Tensor) -> Tensor:
        received = torch.diff(prefix.squeeze(1), prepend=prefix.new_zeros(1)).tolist()
        sent = in_rank.sum(0).tolist()
        back = torch.empty(sum(sent), rows.shape[1], dtype=rows.dtype)
        rows = rows[: sum(received)]  # what is behind is not read
        dist.all_to_all_single(back.view(torch.uint8), rows.view(torch.uint8), sent, received, group=self.group)
        total = torch.zeros(len(in_rank), rows.shape[1])
        per_node = -(-self.group_size // self.nodes)
        of_ranks = back.split(sent)
        for first in range(0, self.group_size, per_node):
            of_node = torch.zeros_like(total)
            for rank in range(first, first + per_node):
                of_node[in_rank[:, rank]] += of_ranks[rank].float()
            total += of_node if self.nodes == 1 else of_node.to(rows.dtype).float()
        return total.to(rows.dtype)

    def _unpacked(self, handle: tuple) -> tuple[Tensor, Tensor, Tensor]:
        """Of a handle: which tokens went to which ranks, how many came by rank, where they were."""
        if self.nodes == 1:
            prefix, _, _, arrived, in_rank, _ = handle
        else:
            in_rank, _, _, _, _, _, prefix, arrived, _, _ = handle
        return in_rank, prefix, arrived

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return num_max_dispatch_tokens_per_rank * hidden * num_experts * 8

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Any = None,
        dispatch_wait_recv_cost_stats: Any = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, tuple, None, None]:
        """Rows of a slot come in any order of ranks and tokens; what is not a row is not initialised."""
        most, ranks = num_max_dispatch_tokens_per_rank, self.group_size
        local, (_, hidden) = num_experts // ranks, x.shape
        assert not async_finish and not return_recv_hook, "here it returns when all is there"
        assert self.low_latency_mode and self.num_qps == local and (most + 1) * 2 <= 1024 and ranks * most % 4 == 0
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and hidden in LOW_LATENCY_WIDTHS
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and topk_idx.shape[1] <= 11
        assert len(x) == len(topk_idx) <= most
        assert self.get_low_latency_rdma_size_hint(most, hidden, ranks, num_experts) <= self.num_rdma_bytes
        CALLS.append("low latency dispatch")
        token, column = torch.nonzero(topk_idx >= 0, as_tuple=True)
        slot = topk_idx[token, column]
        mine = torch.zeros(len(slot), ranks, dtype=torch.bool)
        mine[torch.arange(len(slot)), slot // local] = True
        rows, received = self._exchange(x[token], mine)
        sent, _ = self._exchange(torch.stack([slot % local, token], dim=1), mine)
        source = torch.repeat_interleave(torch.arange(ranks), torch.tensor(received))
        packed = torch.full((local, ranks * most, hidden), float("nan"), dtype=x.dtype)
        info = torch.full((local, ranks * most), 1 << 20, dtype=torch.int32)
        layout, counts = torch.zeros(local, ranks, dtype=torch.int64), torch.zeros(local, dtype=torch.int32)
        for here in range(local):
            for rank in torch.randperm(ranks).tolist():
                found = torch.nonzero((sent[:, 0] == here) & (source == rank)).squeeze(1)
                found, begin = found[torch.randperm(len(found))], int(counts[here])
                packed[here, begin : begin + len(found)] = rows[found]
                info[here, begin : begin + len(found)] = sent[found, 1].int()
                layout[here, rank] = begin << 32 | len(found)
                counts[here] += len(found)
        handle = (info, layout, most, hidden, num_experts)
        if not use_fp8:
            return packed, counts, handle, None, None
        blocks = packed.float().view(local, ranks * most, hidden // 128, 128)
        amax = blocks.abs().amax(dim=3).clamp(1e-4)
        in_float8 = (blocks * (448.0 / amax).unsqueeze(3)).to(torch.float8_e4m3fn).view(packed.shape)
        scales = (amax / 448.0).transpose(1, 2).contiguous().transpose(1, 2)
        return (in_float8, scales), counts, handle, None, None

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensor, None, None]:
        """In float32 and in the order of a token's choices."""
        info, layout, _most, hidden, _num_experts = handle
        assert not async_finish and not return_recv_hook, "here it returns when all is there"
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and tuple(x.shape) == (*info.shape, hidden)
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert topk_weights.shape == topk_idx.shape
        CALLS.append("low latency combine")
        ranges = [
            (here, rank, int(layout[here, rank]) >> 32, int(layout[here, rank]) & 0xFFFFFFFF)
            for rank in range(self.group_size)
            for here in range(len(x))
        ]
        rows = torch.cat([x[here, begin : begin + count] for here, _, begin, count in ranges])
        which = torch.cat([info[here, begin : begin + count] for here, _, begin, count in ranges]).long()
        slot = torch.cat([torch.full((count,), here + self.rank * len(x)) for here, _, _, count in ranges])
        to = torch.cat([torch.full((count,), rank) for _, rank, _, count in ranges])
        there = to.unsqueeze(1) == torch.arange(self.group_size)
        back, _ = self._exchange(rows, there)
        words, _ = self._exchange(torch.stack([which, slot], dim=1), there)
        place = {(token, of): number for number, (token, of) in enumerate(words.tolist())}
        total = torch.zeros(len(topk_idx), hidden)
        for token, slots in enumerate(topk_idx.tolist()):
            for column, of in enumerate(slots):
                total[token] += topk_weights[token, column] * back[place[token, of]].float()
        return total.to(torch.bfloat16), None, None

    def _with_scales(self, rows: Tensor, scales: Tensor | None, in_rank: Tensor, arriving: int) -> Any:
        rows = _unwritten(rows, arriving)
        return rows if scales is None else (rows, _unwritten(self._exchange(scales, in_rank)[0], arriving))

    def _exchange(self, values: Tensor, in_rank: Tensor) -> tuple[Tensor, list[int]]:
        """Rows to every rank that is marked for them."""
        dtype, values = values.dtype, values.view(torch.uint8)
        parts = [values[in_rank[:, rank]] for rank in range(self.group_size)]
        sent = torch.tensor([len(part) for part in parts])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        out = values.new_empty(int(received.sum()), *values.shape[1:])
        dist.all_to_all_single(out, torch.cat(parts), received.tolist(), sent.tolist(), group=self.group)
        return out.view(dtype), received.tolist()


def _unwritten(rows: Tensor, length: int) -> Tensor:
    """Filled up with what may stand in memory that nobody has written."""
    if length == len(rows):
        return rows
    in_bytes = torch.full((length, *rows.shape[1:], rows.element_size()), 0xFF, dtype=torch.uint8)  # NaN, if it floats
    filled = in_bytes.view(rows.dtype).squeeze(-1)
    filled[: len(rows)] = rows
    return filled


class ForAnyNumber(Buffer):
    """Between three ranks, too, which the real one has no settings for."""

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config
