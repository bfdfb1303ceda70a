"""Checksums of tensors' bytes: 16 bytes that tell whether what arrived, or what another rank has, is the same.

On a GPU the blocks are hashed there and only their hashes come to the host. No torch.distributed here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

CHECKSUM_BYTES = 16
HASH_BLOCK_BYTES = 1024
"""Hashed to one number. Functions of @jit have it compiled in."""
HASH_CHUNK_BYTES = 16 << 20
"""Hashed at once, which takes as much device memory again."""


def as_bytes(row: Tensor) -> Tensor:
    """A contiguous tensor's memory as flat uint8."""
    return row.detach().reshape(-1).view(torch.uint8)


class _HostMemory:
    """A tensor's memory in NumPy's array interface; keeps the tensor, and so the memory, as long as the array."""

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (data.numel(),),
            "data": (data.data_ptr(), False),
        }


def host_array(data: Tensor) -> NDArray[np.uint8]:
    """A flat contiguous uint8 tensor in host memory as an array over the same memory.

    For live memory, in the place of ``numpy()``: torch lets no storage of which that was taken be resized any more, for
    good, and jobs free weights between phases by ``resize_(0)``. Let go of the array before that.

    Raises:
        ValueError: the memory is freed.
    """
    if data.untyped_storage().nbytes() < data.storage_offset() + data.numel():
        raise ValueError("the memory of a tensor is freed, as jobs do between phases: load it first")
    return np.asarray(_HostMemory(data)) if data.numel() else np.empty(0, np.uint8)


def checksum(rows: Sequence[Tensor]) -> bytes:
    """Return 16 bytes over flat uint8 tensors; on a GPU the blocks are hashed there. CPU and GPU have different
    checksums."""
    hasher = xxhash.xxh3_128()
    for row in rows:
        rest = row
        if row.device.type != "cpu":
            whole = row.shape[0] // HASH_BLOCK_BYTES * HASH_BLOCK_BYTES
            for first in range(0, whole, HASH_CHUNK_BYTES):
                hashes = block_hashes(row[first : min(first + HASH_CHUNK_BYTES, whole)])
                hasher.update(hashes.view(torch.uint8).cpu().numpy().data)
            rest = row[whole:].cpu()
        hasher.update(host_array(rest).data)
    return hasher.digest()


def block_hashes(data: Tensor) -> Tensor:
    """int64 ``[B]``, one for each block of 1 KiB: the sum of its 128 words, each times an odd number of its own.

    An odd factor loses nothing modulo 2^64, so a block with one word changed never keeps its hash; the factors differ,
    so that words which change places, or all change alike, do not cancel out (as they would in an exclusive or).

    Args:
        data: uint8 ``[B * 1024]``.
    """
    return (block_words(data) * hash_factors(data.device)).sum(dim=1)


def block_words(data: Tensor) -> Tensor:
    """int64 ``[B, 128]``: uint8 ``[B * 1024]`` as the words of blocks; a copy if they begin at no multiple of 8."""
    aligned = data if data.storage_offset() % 8 == 0 else data.clone()
    return aligned.view(torch.int64).view(-1, HASH_BLOCK_BYTES // 8)


@functools.cache
def hash_factors(device: torch.device) -> Tensor:
    """int64 ``[128]``, odd: one for each word of a block."""
    generator = torch.Generator().manual_seed(0x45504C42)
    bounds = torch.iinfo(torch.int64)
    factors = torch.randint(bounds.min, bounds.max, (HASH_BLOCK_BYTES // 8,), generator=generator, dtype=torch.int64)
    return (factors | 1).to(device)
