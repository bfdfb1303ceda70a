"""Does over gloo what `nccl.ep` does between GPUs by its kernels for high throughput, with its names, orders and
demands. For tests on a CPU.

Rows of one slot arrive by expert, then by source rank and position; others by source rank and position, with their
experts in ascending order. Combine adds up in float32: what one rank has of a row, rounded, then by rank, rounded.
What the library asserts, this asserts; what it leaves uninitialised is not a number here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

CALLS: list[str] = []
"""Of all handles of this process, in order."""
DTYPES: list[torch.dtype] = []
"""Of what was sent, beside `CALLS`."""
MADE: list[Any] = []
"""Communicators, groups and handles that were made and not destroyed."""
ORDER = SimpleNamespace(ranks_backwards=False)
"""A fault to be noticed: rows of a slot arrive with the last source rank first."""
NONE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Algorithm(IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(IntEnum):
    FWD = 0
    BWD = 1


class ExpertIdKind(IntEnum):
    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class DispatchQuantizationRecipe(IntEnum):
    NONE = 0
    FWD = 1
    DS_FP8E3M4 = 2


class Tensor:
    def __init__(self, buffer: torch.Tensor) -> None:
        assert buffer.is_contiguous() and buffer.dim() > 0
        self.buffer = buffer


@dataclass(kw_only=True)
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    max_num_sms: int = 0
    num_topk: int = 0


@dataclass(kw_only=True)
class LayoutInfo:
    expert_counters: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass(kw_only=True)
class DispatchConfig:
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: DispatchQuantizationRecipe = DispatchQuantizationRecipe.NONE


@dataclass(kw_only=True)
class DispatchInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class DispatchOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None
    topk_idx: Tensor | None = None


@dataclass(kw_only=True)
class CombineInputs:
    tokens: Tensor | None = None


@dataclass(kw_only=True)
class CombineOutputs:
    tokens: Tensor | None = None


class Made:
    """What somebody has to destroy."""

    def __init__(self) -> None:
        self.alive = True
        MADE.append(self)

    def destroy(self) -> None:
        assert self.alive, "destroyed once"
        self.alive = False
        MADE.remove(self)


class Communicator(Made):
    def __init__(self, group: Any) -> None:
        super().__init__()
        members = dist.get_process_group_ranks(group)
        self.group = dist.new_group(members, backend="gloo", use_local_synchronization=True)

    def destroy(self) -> None:
        dist.barrier(group=self.group)  # it waits for all ranks of the node
        super().destroy()


def get_nccl_comm_from_group(group: Any = None) -> Communicator:
    return Communicator(group)


interop = SimpleNamespace(torch=SimpleNamespace(get_nccl_comm_from_group=get_nccl_comm_from_group))


class Group(Made):
    def __init__(self, comm: Communicator, config: GroupConfig) -> None:
        super().__init__()
        self.comm, self.config = comm, config
        self.ranks, self.rank = comm.group.size(), comm.group.rank()
        self.local = config.num_experts // self.ranks

    @classmethod
    def create(cls, comm: Communicator, config: GroupConfig) -> Group:
        assert comm.alive and config.algorithm == Algorithm.HIGH_THROUGHPUT and config.max_recv_tokens_per_rank == 0
        assert config.num_experts > 0 and config.num_experts % comm.group.size() == 0 and config.max_num_sms > 0
        assert config.max_dispatch_tokens_per_rank > 0 and config.max_dispatch_tokens_per_rank % 4 == 0
        assert config.max_token_bytes > 0 and config.max_token_bytes % 16 == 0
        every: list[Any] = [None] * comm.group.size()
        dist.all_gather_object(every, str(config), group=comm.group)
        assert set(every) == {str(config)}, "equal on all ranks"
        group = cls(comm, config)
        assert group.local % 4 == 0, "16 bytes of weights"
        assert group.local <= (256 if config.num_topk else 1024)
        return group

    def create_handle(
        self,
        layout: Layout,
        topk_idx: Tensor,
        *,
        layout_info: LayoutInfo | None = None,
        config: Any = None,
        stream: int,
    ) -> Handle:
        assert self.alive and layout in (Layout.FLAT, Layout.EXPERT_MAJOR)
        choices = topk_idx.buffer.shape[1]
        assert self.config.num_topk >= choices if layout == Layout.EXPERT_MAJOR else self.config.num_topk == 0
        handle = Handle(self, layout, choices)
        handle.update(topk_idx, layout_info=layout_info, stream=stream)
        return handle

    def exchange(self, values: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
        """The rows of all ranks, of which each has as many as said."""
        most = torch.zeros(max(rows), *values.shape[1:], dtype=values.dtype)
        most[: len(values)] = values
        every = [torch.empty_like(most) for _ in rows]
        dist.all_gather(every, most, group=self.comm.group)
        return [one[:count] for one, count in zip(every, rows, strict=True)]

    def destroy(self) -> None:
        assert self.comm.alive
        dist.barrier(group=self.comm.group)
        super().destroy()


@dataclass
class Way:
    """Of one rank: rows that come to it, by source and token, the experts that each is for, and where they lie."""

    source_U: list[int] = field(default_factory=list)
    token_U: list[int] = field(default_factory=list)
    experts_U: list[list[int]] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    """Of each row of the output which of U, and for which local expert (-1: for all of them)."""


class Handle(Made):
    def __init__(self, group: Group, layout: Layout, choices: int) -> None:
        super().__init__()
        self.group, self.layout, self.choices = group, layout, choices

    def update(self, topk_idx: Tensor, *, layout_info: LayoutInfo | None = None, stream: int) -> None:
        idx, group = topk_idx.buffer, self.group
        assert self.alive and group.alive and idx.dtype == torch.int64 and idx.shape[1] == self.choices
        assert len(idx) <= group.config.max_dispatch_tokens_per_rank and isinstance(stream, int)
        CALLS.append("handle")
        self._mine = idx.clone()
        self.tokens: list[int] = [0] * group.ranks
        dist.all_gather_object(self.tokens, len(idx), group=group.comm.group)
        every = group.exchange(idx, self.tokens)
        self.ways = [self._way(every, rank) for rank in range(group.ranks)]
        mine = self.ways[group.rank]
        if layout_info is not None:
            counts = layout_info.expert_counters.buffer
            assert counts.dtype == layout_info.recv_total_counter.buffer.dtype == torch.int32
            counts.zero_()
            for experts in mine.experts_U:
                counts[experts] += 1
            layout_info.recv_total_counter.buffer.fill_(len(mine.rows))

    def _way(self, every: list[torch.Tensor], rank: int) -> Way:
        way, local = Way(), self.group.local
        for source, idx in enumerate(every):
            for token, chosen in enumerate(idx.tolist()):
                assert all(0 <= one < self.group.config.num_experts for one in chosen)
                here = sorted({one - rank * local for one in chosen if one // local == rank})
                if here:
                    way.source_U.append(source)
                    way.token_U.append(token)
                    way.experts_U.append(here)
        place = range(len(way.source_U))
        if self.layout == Layout.FLAT:
            way.rows = [(one, -1) for one in place]
        else:
            sign = -1 if ORDER.ranks_backwards else 1
            in_order = sorted(place, key=lambda one: (sign * way.source_U[one], way.token_U[one]))
            way.rows = [(one, expert) for expert in range(local) for one in in_order if expert in way.experts_U[one]]
        return way

    def dispatch(
        self,
        inputs: DispatchInputs,
        outputs: DispatchOutputs,
        *,
        layout_info: LayoutInfo | None = None,
        config: DispatchConfig | None = None,
        stream: int,
    ) -> None:
        group, config = self.group, config or DispatchConfig()
        assert self.alive and group.alive
        x, into = inputs.tokens.buffer, outputs.tokens.buffer
        mine = self.ways[group.rank]
        forward = config.pass_direction == PassDir.FWD
        CALLS.append("dispatch" if forward else "again")
        DTYPES.append(x.dtype)
        row_bytes = x.shape[1] * x.element_size()
        assert x.dim() == 2 and len(x) == self.tokens[group.rank] and row_bytes % 16 == 0
        assert into.dtype == x.dtype and into.shape[1] == x.shape[1] and len(into) >= len(mine.rows)
        if config.quantization_recipe == DispatchQuantizationRecipe.NONE:
            assert x.dtype in NONE_DTYPES and inputs.scales is None and outputs.scales is None
        else:
            scales, into_scales = inputs.scales.buffer, outputs.scales.buffer
            scale_bytes = scales.shape[1] * scales.element_size()
            assert scales.dim() == 2 and len(scales) == len(x) and scale_bytes and scale_bytes % 16 == 0
            assert into_scales.dtype == scales.dtype and into_scales.shape == (len(into), scales.shape[1])
            row_bytes += scale_bytes
            self._send(scales, into_scales)
        assert row_bytes <= group.config.max_token_bytes
        self._send(x, into)
        if not forward:
            assert inputs.topk_weights is None and outputs.topk_weights is None and outputs.topk_idx is None
            return
        weights, into_weights = inputs.topk_weights.buffer, outputs.topk_weights.buffer
        assert weights.dtype == into_weights.dtype == torch.float32 and weights.shape == (len(x), self.choices)
        self._send_weights(weights, into_weights, outputs.topk_idx)

    def _send(self, values: torch.Tensor, into: torch.Tensor) -> None:
        every = self.group.exchange(values.view(torch.uint8), self.tokens)
        mine = self.ways[self.group.rank]
        into.view(torch.uint8).fill_(0xFF)
        for row, (one, _) in enumerate(mine.rows):
            into.view(torch.uint8)[row] = every[mine.source_U[one]][mine.token_U[one]]

    def _send_weights(self, weights: torch.Tensor, into: torch.Tensor, into_idx: Tensor | None) -> None:
        group, mine = self.group, self.ways[self.group.rank]
        every, chosen = group.exchange(weights, self.tokens), group.exchange(self._mine, self.tokens)
        by_expert = [
            dict(zip(chosen[source][token].tolist(), every[source][token].tolist(), strict=True))
            for source, token in zip(mine.source_U, mine.token_U, strict=True)
        ]
        first = group.rank * group.local
        if self.layout == Layout.EXPERT_MAJOR:
            assert into_idx is None and into.dim() == 1
            for row, (one, expert) in enumerate(mine.rows):
                into[row] = by_expert[one][first + expert]
            return
        idx = into_idx.buffer
        assert idx.dtype == torch.int64 and idx.shape == into.shape and idx.shape[1] == self.choices
        idx.fill_(-1)
        into.zero_()
        for row, (one, _) in enumerate(mine.rows):
            for place, expert in enumerate(mine.experts_U[one]):
                idx[row, place], into[row, place] = expert, by_expert[one][first + expert]

    def combine(
        self,
        inputs: CombineInputs,
        outputs: CombineOutputs,
        *,
        config: Any = None,
        stream: int,
    ) -> None:
        group = self.group
        assert self.alive and group.alive
        x, out = inputs.tokens.buffer, outputs.tokens.buffer
        mine = self.ways[group.rank]
        row_bytes = x.shape[1] * x.element_size()
        assert x.dtype == out.dtype and x.dtype in NONE_DTYPES and row_bytes % 16 == 0
        assert row_bytes <= group.config.max_token_bytes
        assert len(x) == len(mine.rows) and tuple(out.shape) == (self.tokens[group.rank], x.shape[1])
        CALLS.append("combine")
        DTYPES.append(x.dtype)
        here = torch.zeros(len(mine.source_U), x.shape[1])
        for row, (one, _) in enumerate(mine.rows):
            here[one] += x[row].float()
        every = group.exchange(here.to(x.dtype), [len(way.source_U) for way in self.ways])
        total = torch.zeros(out.shape)
        for way, rows in zip(self.ways, every, strict=True):
            for row, (source, token) in enumerate(zip(way.source_U, way.token_U, strict=True)):
                if source == group.rank:
                    total[token] += rows[row].float()
        out.copy_(total)
