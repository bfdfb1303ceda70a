"""The block hashes of checksums in one pass over the bytes; plain torch writes and reads a product as large as those.

The same numbers as `utils.checksums.block_hashes`, which is the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checksums import block_words, hash_factors
from .triton import jit, tl

_BLOCKS = 16
"""Of a program."""


def launch(data: Tensor) -> Tensor:
    """As `utils.checksums.block_hashes`: int64 ``[B]`` of uint8 ``[B * 1024]``."""
    words = block_words(data)
    blocks = words.shape[0]
    hashes = torch.empty(blocks, dtype=torch.int64, device=data.device)
    if blocks:
        programs = -(-blocks // _BLOCKS)
        _hash[(programs,)](words, hash_factors(data.device), hashes, blocks, WORDS=words.shape[1], BLOCKS=_BLOCKS)
    return hashes


@jit(do_not_specialize=["blocks"])
def _hash(words, factors, hashes, blocks, WORDS: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    word = tl.arange(0, WORDS)
    there = block < blocks
    read = tl.load(words + block[:, None] * WORDS + word[None, :], mask=there[:, None], other=0)
    tl.store(hashes + block, tl.sum(read * tl.load(factors + word)[None, :], axis=1), mask=there)
