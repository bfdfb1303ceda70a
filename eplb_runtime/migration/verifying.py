"""Checksums of experts on their way: 16 bytes over block hashes, which a carrier may have made while it read the bytes;
the same for rows on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash
from torch import Tensor

from ..utils.checksums import HASH_BLOCK_BYTES, HASH_CHUNK_BYTES, block_hashes
from ..utils.checksums_numba import fast_host_hashes

HashBlocks = Callable[[Tensor], Tensor]
"""As `utils.checksums.block_hashes`."""


def checksum_of(
    rows: Sequence[Tensor], hashes: Sequence[Tensor | None], hash_blocks: HashBlocks = block_hashes
) -> bytes:
    """16 bytes over flat uint8 rows.

    Args:
        hashes: of each row, the hashes of its whole blocks, on the host; None: they are computed here.
        hash_blocks: what computes them on a GPU.
    """
    hasher = xxhash.xxh3_128()
    for row, known in zip(rows, hashes, strict=True):
        whole = row.numel() // HASH_BLOCK_BYTES * HASH_BLOCK_BYTES
        hasher.update((_hashes(row[:whole], hash_blocks) if known is None else known).numpy().data)
        hasher.update(row[whole:].cpu().numpy().data)
    return hasher.digest()


def _hashes(blocks: Tensor, hash_blocks: HashBlocks) -> Tensor:
    return fast_host_hashes(blocks) if blocks.device.type == "cpu" else in_chunks(blocks, hash_blocks)


def in_chunks(blocks: Tensor, hash_blocks: HashBlocks) -> Tensor:
    """int64 ``[B]``, on the host, of uint8 ``[B * 1024]``: little memory is taken at once."""
    firsts = range(0, blocks.numel(), HASH_CHUNK_BYTES)
    return torch.cat(
        [torch.empty(0, dtype=torch.int64), *(hash_blocks(blocks[f : f + HASH_CHUNK_BYTES]).cpu() for f in firsts)]
    )
