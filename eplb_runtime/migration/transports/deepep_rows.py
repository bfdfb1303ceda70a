"""Bytes of messages as rows that DeepEP carries. A row says which one it is by its router weight, which DeepEP carries
along: so nothing depends on the order in which rows arrive, and a row that is lost or was given up is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .ledger import Stream

ROW_BYTES = 14336
"""A multiple of 32 that one call takes, and the width that DeepEP's own tables are for."""


@dataclass(frozen=True)
class Part:
    """Rows of a stream that go in one call.

    Args:
        begin, end: of the source's rows in the whole exchange.
    """

    stream: Stream
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return (self.end - self.begin) * ROW_BYTES

    def overlaps(self, nbytes_of: Callable[[tuple[int, int]], int]) -> Iterator[tuple[tuple[int, int], slice, slice]]:
        """Contents that it has bytes of: which, which bytes of the part, and which bytes of the content.

        Args:
            nbytes_of: a content's size.
        """
        first = (self.begin - self.stream.first_row) * ROW_BYTES
        for content, begin in self.stream.contents.items():
            low, high = max(first, begin), min(first + self.nbytes, begin + nbytes_of(content))
            if low < high:
                yield content, slice(low - first, high - first), slice(low - begin, high - begin)


def parts_of(streams: Sequence[Stream], first: int, rows: int) -> list[Part]:
    """What of a rank's streams lies in its rows ``first`` to ``first + rows``."""
    bounds = ((s, max(first, s.first_row), min(first + rows, s.first_row + s.rows)) for s in streams)
    return [Part(stream, begin, end) for stream, begin, end in bounds if begin < end]


def rows_to_send(
    parts: Sequence[Part],
    content_of: Callable[[tuple[int, int]], Tensor | None],
    base: int,
    first: int,
    width: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one call takes: rows bfloat16 ``[N, C]``, ranks that they are for, int64 ``[N, K]`` (-1: none), and their
    numbers from 1, float32 ``[N, K]``. N is at least 1: where nothing goes, a row for nobody.

    Args:
        content_of: bytes; None: given up, its rows are numbered 0.
        base: what a number has besides the row's place in the call.
        first: the first row of the call.
        width: K.
    """
    count = max(1, sum(part.end - part.begin for part in parts))
    flat = torch.empty(count * ROW_BYTES, dtype=torch.uint8, device=device)
    to_NK = torch.full((count, width), -1, dtype=torch.int64)
    numbers_N = torch.zeros(count, dtype=torch.float32)
    row = 0
    for part in parts:
        rows = slice(row, row + part.end - part.begin)
        to_NK[rows, : len(part.stream.peers)] = torch.tensor(part.stream.peers)
        numbers_N[rows] = torch.arange(base + part.begin - first + 1, base + part.end - first + 1, dtype=torch.float32)
        there = {content: content_of(content) for content in part.stream.contents}
        sizes = {content: 0 if data is None else data.numel() for content, data in there.items()}
        for content, inside, outside in part.overlaps(sizes.__getitem__):
            data = there[content]
            assert data is not None
            flat[row * ROW_BYTES :][inside].copy_(data[outside], non_blocking=True)
        if any(data is None for data in there.values()):
            numbers_N[rows] = 0
        row = rows.stop
    numbers_NK = numbers_N.unsqueeze(1).expand(count, width).contiguous()
    rows_NC = flat.view(torch.bfloat16).view(count, -1)
    return rows_NC, to_NK.to(device, non_blocking=True), numbers_NK.to(device, non_blocking=True)


def expected_numbers(parts: Sequence[tuple[int, Part]]) -> Tensor:
    """float32 ``[M]``, ascending: the numbers of rows that arrive.

    Args:
        parts: in the order of their sources, with what their numbers have besides the row's.
    """
    numbers = [torch.arange(base + part.begin + 1, base + part.end + 1) for base, part in parts]
    return torch.cat([torch.empty(0), *(one.float() for one in numbers)])
