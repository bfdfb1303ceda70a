"""Compiled copies and hashes of host memory against NumPy's copy and torch's block hashes, wherever memory begins."""

from __future__ import annotations

import numba
import pytest
import torch
from torch import Tensor

from eplb_runtime.utils.checksums import HASH_BLOCK_BYTES, block_hashes, checksum, host_array
from eplb_runtime.utils.checksums_numba import copy, copy_and_hash, fast_host_hashes

PLACES = (0, 1, 8, 64, 72)
"""Bytes past a multiple of 64."""


def somewhere(place: int, nbytes: int) -> Tensor:
    memory = torch.randint(256, (nbytes + 256,), dtype=torch.uint8)
    first = -memory.data_ptr() % 64 + place
    return memory[first : first + nbytes]


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)


@pytest.mark.parametrize("nbytes", [0, 5, 4096, (1 << 20) + 3, (1 << 20) + 4096])
@pytest.mark.parametrize("from_", PLACES)
@pytest.mark.parametrize("to", PLACES)
def test_every_byte_arrives_and_none_beside(nbytes: int, from_: int, to: int) -> None:
    source, around = somewhere(from_, nbytes), somewhere(to, nbytes + 64)
    before, into = around.clone(), around[32 : 32 + nbytes]
    copy(into, source)
    assert torch.equal(into, source)
    assert torch.equal(around[:32], before[:32])
    assert torch.equal(around[32 + nbytes :], before[32 + nbytes :])


@pytest.mark.parametrize("blocks", [0, 1, 700])
@pytest.mark.parametrize("from_", PLACES)
@pytest.mark.parametrize("to", PLACES)
def test_what_is_copied_is_hashed_as_torch_hashes_it(blocks: int, from_: int, to: int) -> None:
    nbytes = blocks * HASH_BLOCK_BYTES + 17
    source, around = somewhere(from_, nbytes), somewhere(to, nbytes + 64)
    before, into, hashes = around.clone(), around[:nbytes], torch.empty(blocks, dtype=torch.int64)
    copy_and_hash(into, source, hashes)
    expected = block_hashes(source[: blocks * HASH_BLOCK_BYTES].clone())
    assert torch.equal(into, source)
    assert torch.equal(around[nbytes:], before[nbytes:])
    assert torch.equal(hashes, expected)
    assert torch.equal(fast_host_hashes(source[: blocks * HASH_BLOCK_BYTES]), expected)


def test_one_bit_more_changes_the_hash_of_its_block_only() -> None:
    source = somewhere(0, 8 * HASH_BLOCK_BYTES)
    before = fast_host_hashes(source)
    source[3 * HASH_BLOCK_BYTES + 77] ^= 4
    assert (fast_host_hashes(source) != before).nonzero().flatten().tolist() == [3]


def test_memory_that_was_copied_and_hashed_stays_resizable() -> None:
    source, into = (torch.zeros(1 << 21, dtype=torch.uint8) for _ in range(2))
    copy(into, source)
    fast_host_hashes(source)
    checksum([source])
    assert source.untyped_storage().resizable() and into.untyped_storage().resizable()
    assert host_array(source[3:5]).tolist() == [0, 0] and host_array(source[:0]).size == 0
    host_array(source)[3] = 7
    assert source[3] == 7, "it is the same memory"
    view = source[3:5]
    source.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed"):
        host_array(view)
    source = torch.zeros(8, dtype=torch.uint8)
    source.numpy()
    assert not source.untyped_storage().resizable(), "control: torch marks what NumPy was given"
