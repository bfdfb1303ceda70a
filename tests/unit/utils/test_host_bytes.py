"""Host memory as an array: the same memory, which stays resizable."""

from __future__ import annotations

import pytest
import torch

from eplb_runtime.utils.checksums import checksum, host_array


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
