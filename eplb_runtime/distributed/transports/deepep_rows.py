"""Bytes of messages as rows that DeepEP carries. A row says which one it is by its router weight, which DeepEP carries
along: so nothing depends on the order in which rows arrive, and a row that is lost or was given up is noticed. Bytes
that one rank sends to several at once are a stream of their own that each of them gets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

ROW_BYTES = 14336
"""A multiple of 32 that one call takes, and the width that DeepEP's own tables are for."""


@dataclass
class RowStream:
    """Contents one behind another, in whole rows, from one rank to the same ranks.

    Args:
        peers: who gets it, in ascending order.
        first_row: of the source's rows in this exchange.
        rows: how many.
        contents: which ones, and the byte where each begins in the stream.
    """

    peers: tuple[int, ...]
    first_row: int = 0
    rows: int = 0
    contents: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True)
class RowSpan:
    """Rows of a stream that go in one call.

    Args:
        begin, end: of the source's rows in the whole exchange.
    """

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

    def overlaps(self, nbytes_of: Callable[[tuple[int, int]], int]) -> Iterator[tuple[tuple[int, int], slice, slice]]:
        """Contents that it has bytes of: which, which bytes of the part, and which bytes of the content.

        Args:
            nbytes_of: a content's size.
        """
        first = self.first_byte
        for content, begin in self.stream.contents.items():
            low, high = max(first, begin), min(first + self.nbytes, begin + nbytes_of(content))
            if low < high:
                yield content, slice(low - first, high - first), slice(low - begin, high - begin)


def streams_of(
    contents: Mapping[tuple[int, int], tuple[int, Iterable[int]]], row_bytes: int
) -> tuple[tuple[RowStream, ...], int]:
    """What one source sends, and the rows of all of it.

    Args:
        contents: of each its bytes and who gets it.
        row_bytes: of a row in which bytes travel.
    """
    streams: dict[tuple[int, ...], RowStream] = {}
    ends: dict[tuple[int, ...], int] = defaultdict(int)
    for content, (nbytes, to) in sorted(contents.items()):
        peers = tuple(sorted(to))
        streams.setdefault(peers, RowStream(peers)).contents[content] = ends[peers]
        ends[peers] += nbytes
    row = 0
    for peers, stream in streams.items():
        stream.first_row, stream.rows = row, -(-ends[peers] // row_bytes)
        row += stream.rows
    return tuple(streams.values()), row


def spans_of(streams: Sequence[RowStream], first: int, rows: int) -> list[RowSpan]:
    """What of a rank's streams lies in its rows ``first`` to ``first + rows``."""
    bounds = ((s, max(first, s.first_row), min(first + rows, s.first_row + s.rows)) for s in streams)
    return [RowSpan(stream, begin, end) for stream, begin, end in bounds if begin < end]


def addresses(parts: Sequence[RowSpan], base: int, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Of the rows of one call the ranks that they are for, int64 ``[N, K]`` (-1: none), and their numbers from 1,
    float32 ``[N]``. N is at least 1: where nothing goes, a row for nobody, of number 0.

    Args:
        base: what a number has besides the row's place in the call.
        first: the first row of the call.
        width: K.
    """
    count = max(1, sum(part.end - part.begin for part in parts))
    to_NK = torch.full((count, width), -1, dtype=torch.int64)
    numbers_N = torch.zeros(count, dtype=torch.float32)
    for part, rows in zip(parts, rows_of(parts), strict=True):
        to_NK[rows, : len(part.stream.peers)] = torch.tensor(part.stream.peers)
        numbers_N[rows] = torch.arange(base + part.begin - first + 1, base + part.end - first + 1, dtype=torch.float32)
    return to_NK, numbers_N


def rows_of(parts: Sequence[RowSpan]) -> list[slice]:
    """Where each lies among the rows of a call."""
    ends = list(accumulate((part.end - part.begin for part in parts), initial=0))
    return [slice(*bounds) for bounds in pairwise(ends)]


def as_rows(flat: Tensor) -> Tensor:
    """Bytes as bfloat16 ``[N, C]``."""
    return flat.view(torch.bfloat16).view(len(flat) // ROW_BYTES, -1)


def repeated(numbers_N: Tensor, width: int) -> Tensor:
    """float32 ``[N, K]``."""
    return numbers_N.unsqueeze(1).expand(len(numbers_N), width).contiguous()


def call(
    buffer: Any, config: Any, num_ranks: int, rows_NC: Tensor, to_NK: Tensor, numbers_NK: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Dispatch rows to ranks, each one of DeepEP's experts. What arrives, in the order of its numbers: the numbers,
    float32 ``[M]``, and all bytes, one row behind the other. Collective.

    Args:
        buffer: `deep_ep.Buffer`.
        config: of `deepep_package.settings`, there.
        count: so many rows come.
    """
    to_ranks, to_nodes, to_experts, in_rank, _ = buffer.get_dispatch_layout(to_NK, num_ranks)
    # Who knows how many rows come need not wait for DeepEP's word on the host, which is waited for with Python
    # locked; DeepEP takes that inside a node only, and waits with it unlocked between nodes.
    known = {"num_worst_tokens": max(1, count)} if to_nodes is None else {}
    arrived_MC, _, weights_MK, *_ = buffer.dispatch(
        rows_NC,
        num_tokens_per_rank=to_ranks,
        num_tokens_per_rdma_rank=to_nodes,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=to_experts,
        topk_idx=to_NK,
        topk_weights=numbers_NK,
        config=config,
        **known,
    )
    numbers_M = weights_MK[:count].amax(dim=1) if count else weights_MK[:0, 0]
    numbers_M, order_M = numbers_M.sort()
    return numbers_M, arrived_MC.index_select(0, order_M).view(torch.uint8).view(-1)


def expected_numbers(parts: Sequence[tuple[int, RowSpan]]) -> Tensor:
    """float32 ``[M]``, ascending: the numbers of rows that arrive.

    Args:
        parts: in the order of their sources, with what their numbers have besides the row's.
    """
    numbers = [torch.arange(base + part.begin + 1, base + part.end + 1) for base, part in parts]
    return torch.cat([torch.empty(0), *(one.float() for one in numbers)])
