"""The double of torch's symmetric memory goes by the signatures of the torch that is installed."""

from __future__ import annotations

import inspect

import pytest
import symmetric_memory_double as double
import torch
from torch.distributed import _symmetric_memory


@pytest.mark.parametrize("name", ["empty", "rendezvous", "get_backend", "get_signal_pad_size"])
def test_the_double_has_the_functions_of_torch(name: str) -> None:
    theirs, ours = (inspect.signature(getattr(module, name)).parameters for module in (_symmetric_memory, double))
    assert list(theirs) == list(ours)
    assert [p.kind for p in theirs.values()] == [p.kind for p in ours.values()]


@pytest.mark.parametrize("name", ["get_buffer", "get_remote_tensor", "put_signal", "wait_signal"])
def test_the_double_has_the_methods_of_torchs_handle(name: str) -> None:
    """Those of torch are bound to C++, and their signatures stand in the docstrings."""
    theirs = getattr(torch._C._distributed_c10d._SymmetricMemory, name).__doc__
    parameters = [one.split(":")[0].strip() for one in theirs[theirs.index("(") + 1 : theirs.index(" ->")].split(", ")]
    ours = list(inspect.signature(getattr(double.SymmetricMemory, name)).parameters)
    assert [one for one in parameters if one in ours] == ours, theirs


def test_torch_has_what_else_is_used_of_it() -> None:
    for name in ("_register_process_group", "_resolve_process_group"):
        assert callable(getattr(torch._C._distributed_c10d, name))
    for name in ("rank", "world_size", "signal_pad_size", "buffer_size"):
        assert hasattr(torch._C._distributed_c10d._SymmetricMemory, name)
