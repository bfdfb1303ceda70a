"""Bytes of messages as rows that DeepEP carries. A row says which one it is by its router weight, which DeepEP carries
along: so nothing depends on the order in which rows arrive, and a row that is lost or was given up is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

ROW_BYTES = 14336
"""A multiple of 32 that one call takes, and the width that DeepEP's own tables are for."""


@dataclass(frozen=True)
class RowStream:
    """Messages from one rank to another, one behind the other, in whole rows."""

    peer: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class RowSpan:
    """Rows of a stream that go in one call."""

    stream: RowStream
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return (self.end - self.begin) * ROW_BYTES

    @property
    def first_byte(self) -> int:
        """Of the stream."""
        return (self.begin - self.stream.first_row) * ROW_BYTES


def streams_of(sent_R: Sequence[int]) -> list[RowStream]:
    """Return what one source sends, from the bytes that it sends to each rank."""
    rows = [-(-nbytes // ROW_BYTES) for nbytes in sent_R]
    firsts = accumulate(rows, initial=0)
    return [
        RowStream(peer, first, count) for peer, (first, count) in enumerate(zip(firsts, rows, strict=False)) if count
    ]


def spans_of(streams: Sequence[RowStream], first: int, rows: int) -> list[RowSpan]:
    """What of a rank's streams lies in its rows ``first`` to ``first + rows``."""
    bounds = ((s, max(first, s.first_row), min(first + rows, s.first_row + s.rows)) for s in streams)
    return [RowSpan(stream, begin, end) for stream, begin, end in bounds if begin < end]


def addresses(parts: Sequence[RowSpan], base: int, first: int) -> tuple[Tensor, Tensor]:
    """Return the rank that each row of a call is for, int64 ``[N, 1]`` (-1: none), and their numbers from 1, float32
    ``[N, 1]``. N is at least 1: where nothing goes, a row for nobody, of number 0."""
    count = max(1, sum(part.end - part.begin for part in parts))
    to_N1 = torch.full((count, 1), -1, dtype=torch.int64)
    numbers_N1 = torch.zeros(count, 1, dtype=torch.float32)
    for part, rows in zip(parts, rows_of(parts), strict=True):
        to_N1[rows] = part.stream.peer
        numbers_N1[rows, 0] = torch.arange(base + part.begin - first + 1, base + part.end - first + 1).float()
    return to_N1, numbers_N1


def rows_of(parts: Sequence[RowSpan]) -> list[slice]:
    """Where each lies among the rows of a call."""
    ends = list(accumulate((part.end - part.begin for part in parts), initial=0))
    return [slice(*bounds) for bounds in pairwise(ends)]


def as_rows(flat: Tensor) -> Tensor:
    """Bytes as bfloat16 ``[N, C]``."""
    return flat.view(torch.bfloat16).view(len(flat) // ROW_BYTES, -1)


def call(
    buffer: Any, config: Any, num_ranks: int, rows_NC: Tensor, to_N1: Tensor, numbers_N1: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Dispatch rows to ranks, each one of DeepEP's experts; returns what arrives in the order of its numbers: these,
    float32 ``[M]``, and all bytes, one row behind the other. Collective."""
    to_ranks, to_nodes, to_experts, in_rank, _ = buffer.get_dispatch_layout(to_N1, num_ranks)
    # Who knows how many rows come need not wait for DeepEP's word on the host, which is waited for with Python
    # locked; DeepEP takes that inside a node only, and waits with it unlocked between nodes.
    known = {"num_worst_tokens": max(1, count)} if to_nodes is None else {}
    arrived_MC, _, weights_M1, *_ = buffer.dispatch(
        rows_NC,
        num_tokens_per_rank=to_ranks,
        num_tokens_per_rdma_rank=to_nodes,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=to_experts,
        topk_idx=to_N1,
        topk_weights=numbers_N1,
        config=config,
        **known,
    )
    numbers_M = weights_M1[:count, 0]
    numbers_M, order_M = numbers_M.sort()
    return numbers_M, arrived_MC.index_select(0, order_M).view(torch.uint8).view(-1)


def expected_numbers(parts: Sequence[tuple[int, RowSpan]]) -> Tensor:
    """Return float32 ``[M]``, ascending: the numbers of rows that arrive."""
    numbers = [torch.arange(base + part.begin + 1, base + part.end + 1) for base, part in parts]
    return torch.cat([torch.empty(0), *(one.float() for one in numbers)])
