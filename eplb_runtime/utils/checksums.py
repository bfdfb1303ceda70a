"""Checksums of tensors' bytes: 16 bytes each, made on the tensors' device. No torch.distributed here."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

CHECKSUM_BYTES = 16
HASH_BLOCK_BYTES = 1024  # hashed to one number
HASH_CHUNK_BYTES = 16 << 20  # hashed at once, which takes as much device memory again
_EVEN = 4354685564936845354  # times a place, and one more: odd, and far from that of the place before


def as_bytes(row: Tensor) -> Tensor:
    """Return a flat uint8 view of a contiguous tensor's memory, detached from autograd."""
    return row.detach().reshape(-1).view(torch.uint8)


def host_array(data: Tensor) -> NDArray[np.uint8]:
    """Return an array over the memory of a flat contiguous uint8 tensor in host memory. Nothing is copied.

    The array is valid only while the tensor lives. ``numpy()`` would keep the tensor's storage from ever being resized
    again; this leaves it resizable, for jobs that free weights between phases by ``resize_(0)``.

    Raises:
        ValueError: the tensor's memory is freed.
    """
    if data.untyped_storage().nbytes() < data.storage_offset() + data.numel():
        raise ValueError("the memory of a tensor is freed, as jobs do between phases: load it first")
    return np.ctypeslib.as_array((ctypes.c_uint8 * data.numel()).from_address(data.data_ptr()))


def checksum(rows: Sequence[Tensor]) -> bytes:
    """Return 16 bytes, the checksum of flat uint8 tensors in their order. On a GPU this waits for the device, and the
    same bytes have another checksum than on the CPU."""
    return bytes(checksum_of(rows).cpu().numpy())


def checksum_of(rows: Sequence[Tensor]) -> Tensor:
    """Return the checksum of flat uint8 tensors as uint8 ``[16]`` on their device. On a GPU the host does not wait."""
    if rows and rows[0].device.type != "cpu":
        return hashed_blocks(rows)
    hasher = xxhash.xxh3_128()
    for row in rows:
        hasher.update(host_array(row).data)
    return torch.frombuffer(bytearray(hasher.digest()), dtype=torch.uint8)


def hashed_blocks(rows: Sequence[Tensor]) -> Tensor:
    """Return uint8 ``[16]``, a checksum of flat uint8 tensors on their device: two int64 sums over the hashes of all
    blocks of 1 KiB, each times an odd number that depends on the block's place. Each tensor's length counts, too."""
    sums, place = torch.zeros(2, dtype=torch.int64, device=rows[0].device), 0
    for row in rows:
        sums += row.shape[0] * (2 * place + 1)
        for first in range(0, row.shape[0], HASH_CHUNK_BYTES):
            chunk = row[first : first + HASH_CHUNK_BYTES]
            if left_over := -chunk.shape[0] % HASH_BLOCK_BYTES:
                chunk = torch.nn.functional.pad(chunk, (0, left_over))
            hashes_B = block_hashes(chunk)
            odd_B = torch.arange(place, place + len(hashes_B), device=row.device) * _EVEN + 1
            sums += torch.stack([(hashes_B * odd_B).sum(), (_folded(hashes_B) * odd_B * odd_B).sum()])
            place += len(hashes_B)
    return sums.view(torch.uint8)


def block_hashes(data: Tensor) -> Tensor:
    """Return int64 ``[B]``, the hash of each block of 1 KiB of uint8 ``[B * 1024]``: the sum of the block's 128 words,
    each folded and multiplied by an odd number of its own. An odd factor loses nothing modulo 2^64, so a block with one
    word changed never keeps its hash. The factors differ, so words that change places do not cancel out."""
    aligned = data if data.storage_offset() % 8 == 0 else data.clone()
    words_BW = aligned.view(torch.int64).view(-1, HASH_BLOCK_BYTES // 8)
    return (_folded(words_BW) * (torch.arange(words_BW.shape[1], device=data.device) * _EVEN + 1)).sum(dim=1)


def _folded(words: Tensor) -> Tensor:
    """Their upper halves in their lower ones, too: the highest bits of two words would cancel out in a sum."""
    return words ^ ((words >> 32) & 0xFFFFFFFF)
