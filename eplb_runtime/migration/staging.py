"""Preallocated memory for experts in flight, the messages of a record, and moves within a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..moe.experts.record import RecordFormat, RowField

DIRECT_BYTES = 1 << 20
"""Rows of this many bytes or more are sent from their place; smaller ones are packed (measured on gloo: packing loses
from 1 MiB on)."""

Run = tuple[int, int, RowField | None]
"""One message of a record: first byte, end, and the field of a row that is sent from its place (None: packed)."""


class Arena:
    """One growing uint8 buffer, cut into pieces anew for each round."""

    def __init__(self, empty: Callable[[int], Tensor], nbytes: int) -> None:
        self._empty = empty
        self.memory = empty(nbytes)
        self._used = 0

    def reserve(self, nbytes: int) -> None:
        """Make room for a round of so many bytes; allocates only if the buffer is too small."""
        if nbytes > self.memory.shape[0]:
            self.memory = self.memory[:0]  # not the old and the new at once
            self.memory = self._empty(nbytes)

    def forget(self) -> None:
        """Free the memory."""
        self.memory = self._empty(0)

    def restart(self) -> None:
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        piece = self.memory[self._used : self._used + nbytes]
        if piece.shape[0] != nbytes:
            raise RuntimeError(f"the staging buffer of {self.memory.shape[0]} bytes is too small for this round")
        self._used += nbytes
        return piece


def runs_of(record_format: RecordFormat, device: torch.device) -> list[Run]:
    """Messages of one record, in the order of its bytes."""
    runs: list[Run] = []
    packed_from = None
    for field in record_format.fields:
        if field.nbytes >= DIRECT_BYTES and _can_send_rows(field, device):
            if packed_from is not None:
                runs.append((packed_from, field.offset, None))
                packed_from = None
            runs.append((field.offset, field.offset + field.nbytes, field))
        elif packed_from is None:
            packed_from = field.offset
    if packed_from is not None:
        runs.append((packed_from, record_format.nbytes, None))
    return runs


def _can_send_rows(field: RowField, device: torch.device) -> bool:
    """Return whether each of its rows is contiguous and on the device of the messages, on every rank."""
    if field.source.varies_in_device:  # ranks must agree on the messages of a record
        return False
    rows = field.source.memory if isinstance(field.source.tensor, tuple) else (field.source.tensor[:1],)
    return all(row.device == device and row.is_contiguous() for row in rows)


def packed_bytes(runs: Sequence[Run]) -> int:
    """Bytes of a record that are copied before they are sent."""
    return sum(end - first for first, end, field in runs if field is None)


def chains_of(moves: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return moves ``(from, to)`` between slots of one rank as chains that overwrite nothing before it is read. A chain
    whose last move ends where its first began is a ring: that slot's content is saved before, and is what the last move
    writes."""
    source_of = {to: source for source, to in moves}
    read = {source for source, _ in moves}
    chains = []
    for start in (*(to for _, to in moves if to not in read), *(to for _, to in moves if to in read)):
        chain, slot = [], start
        while slot in source_of:
            chain.append((source_of.pop(slot), slot))
            slot = chain[-1][0]
        if chain:
            chains.append(chain)
    return chains
