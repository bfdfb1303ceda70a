"""Weights of copies by DeepEP: each layer's experts go from their homes to all their copies in one dispatch.

A home's rows are DeepEP's tokens, and the ranks of its copies their experts: so DeepEP sends them to each node once
(RDMA) and hands them on there (NVLink), and nobody waits for copies that hang on copies. Every rank of the EP group
takes part in every layer that has copies, in the order of the program, in which its calls with tokens come, too.

Gradients do not come home this way. DeepEP's combine sums in bfloat16; and rows that came one for each copy would all
come to the home, where trees add them up on their way, in float32 and in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed.transports.deepep_package import refuse_filled_memory
from ..distributed.transports.deepep_rows import (
    ROW_BYTES,
    RowSpan,
    RowStream,
    addresses,
    as_rows,
    call,
    expected_numbers,
    repeated,
    rows_of,
    spans_of,
    streams_of,
)
from ..distributed.transports.side_stream import SideStream
from .row_transport import ReplicatedExpert, RowChannel, RowTransport, TransferStage, Waiting

CALL_ROWS = (64 << 20) // ROW_BYTES
"""A rank sends so many rows in one call."""
MOST_RANKS = 32
"""Choices of a token that DeepEP's kernels take: a row for more ranks is sent again."""


class Multicast(RowTransport):
    """Weights by DeepEP, gradients by another transport.

    Args:
        buffer: `deep_ep.Buffer` of the EP group, the one that tokens go by if they do.
        config: of `deepep_package.settings`, there.
        rank, num_ranks: of the EP group.
        device: the model's.
        gradients: carries them along trees.
    """

    spreads = True

    def __init__(
        self,
        buffer: Any,
        config: Any,
        rank: int,
        num_ranks: int,
        device: torch.device,
        gradients: RowTransport,
    ) -> None:
        self.buffer, self.config = buffer, config
        self.rank, self.num_ranks = rank, num_ranks
        self.device = device
        self.stream = SideStream(device)
        self._gradients = gradients

    def channel(self, layer: int, down: bool) -> RowChannel:
        return self._gradients.channel(layer, down)

    def spread(self, experts: Sequence[ReplicatedExpert], nbytes: Sequence[int]) -> TransferStage:
        sources: list[dict[tuple[int, int], tuple[int, tuple[int, ...]]]] = [{} for _ in range(self.num_ranks)]
        here: dict[tuple[int, int], Tensor] = {}
        for expert in experts:
            for first in range(0, len(expert.ranks), MOST_RANKS):
                ranks = expert.ranks[first : first + MOST_RANKS]
                for tensor, size in enumerate(nbytes):
                    content = expert.home, tensor + len(nbytes) * (first // MOST_RANKS)
                    sources[expert.source][content] = size, ranks
                    if expert.local and (expert.source == self.rank or self.rank in ranks):
                        # Homes may lie in one piece with copies, and what is written here is no change of theirs.
                        here[content] = expert.local[tensor].data.reshape(-1).view(torch.uint8)
        streams, rows = zip(*(streams_of(contents, ROW_BYTES) for contents in sources), strict=True)
        calls = [_call(self, streams, here, first) for first in range(0, max(rows), CALL_ROWS)]
        return _Dispatches(self, calls, len(here))


@dataclass(frozen=True)
class _Call:
    """One dispatch, put down once for each placement.

    Args:
        leaving, arriving: bytes of a tensor's row on this rank, and where they are among those of the call.
        to_NK, numbers_NK: as `deepep_rows.call` takes them.
        expected_M: numbers of what arrives.
    """

    leaving: list[tuple[Tensor, slice]]
    arriving: list[tuple[Tensor, slice]]
    to_NK: Tensor
    numbers_NK: Tensor
    expected_M: Tensor

    @torch.no_grad()
    def run(self, by: Multicast) -> None:
        flat = torch.empty(len(self.to_NK) * ROW_BYTES, dtype=torch.uint8, device=by.device)
        for row, place in self.leaving:
            flat[place].copy_(row, non_blocking=True)
        numbers_M, bytes_M = call(
            by.buffer, by.config, by.num_ranks, as_rows(flat), self.to_NK, self.numbers_NK, len(self.expected_M)
        )
        torch._assert_async((numbers_M == self.expected_M).all(), "rows of copies did not arrive as they were sent")
        for row, place in self.arriving:
            row.copy_(bytes_M[place], non_blocking=True)


def _call(
    by: Multicast, streams: Sequence[Sequence[RowStream]], here: dict[tuple[int, int], Tensor], first: int
) -> _Call:
    """Rows ``first`` to ``first + CALL_ROWS`` of every rank."""
    mine = spans_of(streams[by.rank], first, CALL_ROWS)
    width = max(len(stream.peers) for of_rank in streams for stream in of_rank)
    to_NK, numbers_N = addresses(mine, by.rank * CALL_ROWS, first, width)
    coming = [
        (source, part)
        for source, of_rank in enumerate(streams)
        for part in spans_of(of_rank, first, CALL_ROWS)
        if by.rank in part.stream.peers
    ]
    expected_M = expected_numbers([(source * CALL_ROWS - first, part) for source, part in coming])
    return _Call(
        _places(mine, here),
        _places([part for _, part in coming], here),
        to_NK.to(by.device),
        repeated(numbers_N, width).to(by.device),
        expected_M.to(by.device),
    )


def _places(parts: Sequence[RowSpan], here: dict[tuple[int, int], Tensor]) -> list[tuple[Tensor, slice]]:
    places = []
    for part, rows in zip(parts, rows_of(parts), strict=True):
        begin = rows.start * ROW_BYTES
        for content, inside, outside in part.overlaps(lambda content: here[content].numel()):
            places.append((here[content][outside], slice(begin + inside.start, begin + inside.stop)))
    return places


@dataclass(frozen=True)
class _Arrived:
    wait: Callable[[], object]


@dataclass(frozen=True)
class _Dispatches(TransferStage):
    by: Multicast
    calls: list[_Call]
    rows: int

    def post(self) -> Sequence[Waiting]:
        refuse_filled_memory()
        stream = self.by.stream
        stream.after_current()
        with stream():
            for one in self.calls:
                one.run(self.by)
        return [_Arrived(stream.end())]

    def __len__(self) -> int:
        return self.rows
