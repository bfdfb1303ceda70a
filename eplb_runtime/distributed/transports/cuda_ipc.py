"""Between the GPUs of one node: plain copies, by the copy engines, into memory that its ranks open to each other
(`windows.py`, `node_memory.py`)."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..consensus import ConsensusError
from ..node_memory import NodeMemory
from ..node_memory import why_not as why_no_memory
from .base import TransportError
from .side_stream import SideStream
from .windows import StreamWindow, Window, Windows, piece_bytes_for


def why_not(device: torch.device) -> str:
    """Return what this process lacks to open memory of other ranks' GPUs; empty: nothing that can be seen before
    meeting."""
    return f"it carries between GPUs, not on {device.type}" if device.type != "cuda" else why_no_memory(device)


class CudaIpc(Windows):
    """Writes into the windows of other ranks of the node; ``package``: in the place of torch's."""

    by = "CUDA IPC"

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        device: torch.device,
        timeout_seconds: float,
        package: Any = None,
    ) -> None:
        if package is None and why_not(device):
            raise TransportError(f"transport 'cuda_ipc': {why_not(device)}")
        super().__init__(group, backend, device, timeout_seconds)
        self._package = package

    def _open(self, deadline: float) -> Window:
        seconds, ranks = max(1.0, deadline - time.monotonic()), self._group.size()
        memory = NodeMemory(self._group, self.device, seconds, self._package, self._group_device)
        piece_bytes = piece_bytes_for(ranks)
        try:
            memory.meet(deadline)
            own = memory.zeros((StreamWindow.nbytes(ranks, piece_bytes),), torch.uint8, self.device)
            memory.open()
        except (RuntimeError, ConsensusError) as error:
            raise TransportError(f"memory of this node's GPUs cannot be opened: {error}") from error
        return _NodeWindow(memory, own, piece_bytes, self._stream)


class _NodeWindow(StreamWindow):
    """A window in memory of the node."""

    def __init__(self, memory: NodeMemory, own: Tensor, piece_bytes: int, stream: SideStream) -> None:
        super().__init__(own, memory.rank, memory.size, piece_bytes, stream)
        self._node = memory

    def _put(self, place: Tensor, source: Tensor, peer: int) -> None:
        self._node.of_peer(peer, place).copy_(source, non_blocking=True)
