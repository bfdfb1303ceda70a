"""Memory that CUDA IPC packs messages in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_ipc_double import Double
from torch import Tensor

from eplb_runtime.distributed.transports.cuda_ipc import CudaIpc
from eplb_runtime.distributed.transports.side_stream import SideStream


class Memory(Double):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def export(self, region: Tensor) -> bytes:
        self.said.append("exported")
        return super().export(region)


def test_freed_while_it_is_yet_to_be_written_it_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that gives up frees it at once. torch takes no record of a stream for memory that was exported before."""
    said: list[str] = []
    will_use: Callable[[SideStream, Tensor], None] = lambda stream, memory: said.append("will be used")  # noqa: E731
    monkeypatch.setattr(SideStream, "will_use", will_use)
    transport = CudaIpc.__new__(CudaIpc)
    transport._spare, transport._memory = [], Memory(said)
    transport._stream = SideStream(torch.device("cpu"))
    transport._take_spare(100)
    assert said == ["will be used", "exported"]
