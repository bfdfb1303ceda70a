"""Copies and block hashes of host memory by compiled loops that read every byte once.

What is written goes past the caches: experts on their way are larger than those, and a cache line that is only written
need not be read first. Where numba compiles nothing or is not done yet, or memory begins at an odd place, NumPy and
torch do the same.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from .checksums import HASH_BLOCK_BYTES, block_hashes, hash_factors, host_array
from .jit import is_ready, jit

_LINE_BYTES = 64
_LINE = _LINE_BYTES // 8
_BLOCK = HASH_BLOCK_BYTES // 8
_PAST_CACHES_BYTES = 1 << 20
"""Less than this is copied through the caches."""
_PIECE_BYTES = 1 << 18
"""What is hashed right after it was copied, where one loop cannot do both."""

Words = NDArray[np.uint64]


def copy(into: Tensor, source: Tensor) -> None:
    """Copy flat uint8 tensors of the same size in host memory."""
    nbytes = source.numel()
    first = -into.data_ptr() % _LINE_BYTES
    if nbytes < _PAST_CACHES_BYTES or not _fits(source[first:]):
        np.copyto(host_array(into), host_array(source))
        return
    end = first + (nbytes - first) // _LINE_BYTES * _LINE_BYTES
    to, from_ = host_array(into), host_array(source)
    _copy_lines(from_[first:end].view(np.uint64), to[first:end].view(np.uint64))
    to[:first], to[end:] = from_[:first], from_[end:]


def fast_host_hashes(data: Tensor) -> Tensor:
    """`utils.checksums.block_hashes` of host memory: int64 ``[B]`` for uint8 ``[B * 1024]``."""
    if not _fits(data):
        return block_hashes(data)
    hashes = torch.empty(data.numel() // HASH_BLOCK_BYTES, dtype=torch.int64)
    _hash_blocks(host_array(data).view(np.uint64), _factors(), hashes.numpy().view(np.uint64))
    return hashes


def copy_and_hash(into: Tensor, source: Tensor, hashes: Tensor) -> None:
    """Copy, and hash what is read.

    Args:
        into, source: flat uint8 of the same size.
        hashes: int64 ``[B]``, of the whole blocks of ``source``.
    """
    end = hashes.numel() * HASH_BLOCK_BYTES
    if _fits(source[:end]) and into.data_ptr() % _LINE_BYTES == 0:
        from_, to = host_array(source[:end]).view(np.uint64), host_array(into[:end]).view(np.uint64)
        _copy_and_hash_blocks(from_, to, _factors(), hashes.numpy().view(np.uint64))
    else:
        for first in range(0, end, _PIECE_BYTES):
            piece = slice(first, min(first + _PIECE_BYTES, end))
            into[piece].copy_(source[piece])
            blocks = slice(piece.start // HASH_BLOCK_BYTES, piece.stop // HASH_BLOCK_BYTES)
            hashes[blocks] = fast_host_hashes(source[piece])
    into[end:].copy_(source[end:])


def warm_up() -> None:
    """Compile all of it, `_hash_blocks` last: others ask for that one alone."""
    source = torch.zeros(2 * _PAST_CACHES_BYTES, dtype=torch.uint8)
    into, hashes = torch.empty_like(source), torch.empty(source.numel() // HASH_BLOCK_BYTES, dtype=torch.int64)
    copy(into, source)
    copy_and_hash(into, source, hashes)
    fast_host_hashes(source)


def _fits(data: Tensor) -> bool:
    return data.data_ptr() % 8 == 0 and not getattr(numba.config, "DISABLE_JIT", 0) and is_ready(_hash_blocks)


def _factors() -> Words:
    factors: Words = hash_factors(torch.device("cpu")).numpy().view(np.uint64)
    return factors


def _line_writer(typing: Any, source: Any, into: Any, word: Any) -> Any:
    """64 bytes from one array to the same place of another, which is a multiple of 64, past the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(64), _LINE)
        from_, to = (
            builder.bitcast(
                builder.gep(context.make_array(kind)(context, builder, array).data, [arguments[2]]), vector.as_pointer()
            )
            for kind, array in zip(signature.args[:2], arguments[:2], strict=True)
        )
        read = builder.load(from_, align=8)
        written = builder.store(read, to, align=_LINE_BYTES)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(source, into, word), generate


def _fence(typing: Any) -> Any:
    """What went past the caches is there for everybody from here on; other processes are told of it next."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_write_line: Any = intrinsic(_line_writer)
_all_written: Any = intrinsic(_fence)


@jit
def _copy_lines(source: Words, into: Words) -> None:
    for word in range(0, source.shape[0], _LINE):
        _write_line(source, into, word)
    _all_written()


@jit
def _hash_blocks(source: Words, factors: Words, hashes: Words) -> None:
    for block in range(hashes.shape[0]):
        first, sum_ = block * _BLOCK, np.uint64(0)
        for word in range(_BLOCK):
            sum_ += source[first + word] * factors[word]
        hashes[block] = sum_


@jit
def _copy_and_hash_blocks(source: Words, into: Words, factors: Words, hashes: Words) -> None:
    for block in range(hashes.shape[0]):
        first, sum_ = block * _BLOCK, np.uint64(0)
        for word in range(_BLOCK):
            sum_ += source[first + word] * factors[word]
        hashes[block] = sum_
        for word in range(0, _BLOCK, _LINE):
            _write_line(source, into, first + word)
    _all_written()
