"""Memory as an array, and hashes of its blocks, which notice what a wire, or a row never written, can do to them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_runtime.utils.checksums import block_hashes, checksum, hashed_blocks, host_array

BLOCKS = 4


def data(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (BLOCKS * 1024,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, BLOCKS * 1024 - 1), st.integers(0, 7))
def test_one_flipped_bit_changes_the_hash_of_its_block_and_of_no_other(byte: int, bit: int) -> None:
    row = data()
    before = block_hashes(row)
    row[byte] ^= 1 << bit
    changed = (block_hashes(row) != before).nonzero().flatten().tolist()
    assert changed == [byte // 1024]


@given(st.integers(1, BLOCKS * 1024), st.data())
def test_a_flipped_bit_blocks_that_change_places_and_another_end_change_a_devices_checksum(
    nbytes: int, chosen: st.DataObject
) -> None:
    row = data()[:nbytes].clone()
    before = hashed_blocks([row])
    assert torch.equal(hashed_blocks([torch.cat([data(1)[:3], row])[3:]]), before), "wherever it lies"
    row[chosen.draw(st.integers(0, nbytes - 1))] ^= 1 << chosen.draw(st.integers(0, 7))
    assert not torch.equal(hashed_blocks([row]), before)
    whole, cut = data(), chosen.draw(st.integers(1, 4095))
    parts = hashed_blocks([whole[:cut], whole[cut:]])
    assert not torch.equal(hashed_blocks([whole]), parts) and not torch.equal(hashed_blocks([whole.roll(1024)]), parts)
    assert not torch.equal(hashed_blocks([torch.zeros(cut, dtype=torch.uint8)]), hashed_blocks([whole[:0]]))


def test_memory_that_was_hashed_stays_resizable() -> None:
    source = torch.zeros(1 << 21, dtype=torch.uint8)
    checksum([source])
    assert source.untyped_storage().resizable()
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
