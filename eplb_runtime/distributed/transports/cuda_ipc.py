"""Between the GPUs of one node: plain copies, by the copy engines, into memory that its ranks open to each other
(`windows.py`, `node_memory.py`)."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ..node_memory import NodeMemory
from .base import TransportError
from .progress import SideStream
from .windows import StreamWindow, Window, Windows, piece_bytes_for


class CudaIpc(Windows):
    """Writes into the windows of other ranks of the node."""

    by = "CUDA IPC"

    def _open(self, deadline: float) -> Window:
        seconds, ranks = max(1.0, deadline - time.monotonic()), self._group.size()
        memory = NodeMemory(self._group, self.device, seconds, self._package, self._group_device)
        piece_bytes = piece_bytes_for(ranks)
        try:
            memory.meet(deadline)
            own = memory.zeros((StreamWindow.nbytes(ranks, piece_bytes),), torch.uint8, self.device)
            memory.open()
        except RuntimeError as error:
            raise TransportError(f"memory of this node's GPUs cannot be opened: {error}") from error
        return _NodeWindow(memory, own, piece_bytes, self._stream)


class _NodeWindow(StreamWindow):
    """A window in memory of the node."""

    def __init__(self, memory: NodeMemory, own: Tensor, piece_bytes: int, stream: SideStream) -> None:
        super().__init__(own, memory.rank, memory.size, piece_bytes, stream)
        self._node = memory

    def _put(self, place: Tensor, source: Tensor, peer: int) -> None:
        self._node.of_peer(peer, place).copy_(source, non_blocking=True)
