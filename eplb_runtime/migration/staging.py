"""Preallocated memory for experts on their way, and the checksums that prove they arrived as they left."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from ..experts.layout import RecordLayout, RowField
from .transports.base import Transport

CHECKSUM_BYTES = 16
DIRECT_BYTES = 1 << 20
"""A row of at least so many bytes is sent from where it lives; smaller ones are packed (measured on gloo: packing
loses from 1 MiB on)."""
_HASH_BLOCK_BYTES = 1024
_HASH_CHUNK_BYTES = 16 << 20
"""Hashed at once, which takes as much device memory again."""


class Arena:
    """One growing uint8 buffer on the transport's device, cut into pieces anew for each round."""

    def __init__(self, transport: Transport, nbytes: int) -> None:
        self._transport = transport
        self._memory = transport.empty(nbytes)
        self._used = 0

    @property
    def nbytes(self) -> int:
        return self._memory.shape[0]

    def reserve(self, nbytes: int) -> None:
        """Make sure that a round of so many bytes fits; allocates only when it does not fit yet."""
        if nbytes > self.nbytes:
            self._memory = self._transport.empty(nbytes)

    def restart(self) -> None:
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        piece = self._memory[self._used : self._used + nbytes]
        if piece.shape[0] != nbytes:
            raise RuntimeError(f"the staging buffer of {self.nbytes} bytes is too small for this round")
        self._used += nbytes
        return piece


def runs_of(layout: RecordLayout, device: torch.device) -> list[tuple[int, int, RowField | None]]:
    """The messages that carry one record: ``(first byte, end, field)``; ``field`` names a row sent from its place."""
    runs: list[tuple[int, int, RowField | None]] = []
    packed_from = None
    for field in layout.fields:
        tensor = field.source.tensor
        if field.nbytes >= DIRECT_BYTES and tensor.device == device and field.live_row(0).is_contiguous():
            if packed_from is not None:
                runs.append((packed_from, field.offset, None))
                packed_from = None
            runs.append((field.offset, field.offset + field.nbytes, field))
        elif packed_from is None:
            packed_from = field.offset
    if packed_from is not None:
        runs.append((packed_from, layout.nbytes, None))
    return runs


def as_bytes(row: Tensor) -> Tensor:
    """A contiguous tensor's memory as flat uint8."""
    return row.detach().reshape(-1).view(torch.uint8)


def checksum(rows: Sequence[Tensor]) -> bytes:
    """16 bytes over flat uint8 tensors; on a GPU the blocks are hashed there and only their hashes come to the host.

    Rows on the CPU and on a GPU have different checksums: compare those of one transport.
    """
    hasher = xxhash.xxh3_128()
    for row in rows:
        rest = row
        if row.device.type != "cpu":
            whole = row.shape[0] // _HASH_BLOCK_BYTES * _HASH_BLOCK_BYTES
            for first in range(0, whole, _HASH_CHUNK_BYTES):
                hashes = block_hashes(row[first : min(first + _HASH_CHUNK_BYTES, whole)])
                hasher.update(hashes.view(torch.uint8).cpu().numpy().data)
            rest = row[whole:].cpu()
        hasher.update(rest.numpy().data)
    return hasher.digest()


def block_hashes(data: Tensor) -> Tensor:
    """int64 ``[B]``, one for each block of 1 KiB: the sum of its 128 words, each times an odd number of its own.

    An odd factor loses nothing modulo 2^64, so a block with one word changed never keeps its hash; the factors differ,
    so that words which change places, or all change alike, do not cancel out (as they would in an exclusive or).

    Args:
        data: uint8 ``[B * 1024]``.
    """
    aligned = data if data.storage_offset() % 8 == 0 else data.clone()
    words = aligned.view(torch.int64).view(-1, _HASH_BLOCK_BYTES // 8)
    return (words * _hash_factors(data.device)).sum(dim=1)


@functools.cache
def _hash_factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0x45504C42)
    bounds = torch.iinfo(torch.int64)
    factors = torch.randint(bounds.min, bounds.max, (_HASH_BLOCK_BYTES // 8,), generator=generator, dtype=torch.int64)
    return (factors | 1).to(device)
