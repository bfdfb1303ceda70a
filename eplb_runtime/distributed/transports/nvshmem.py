"""NVSHMEM (extras ``nvshmem-cu12``, ``nvshmem-cu13``): writes on a stream into the memory of other GPUs, over NVLink or
RDMA, without the host or NCCL in between (`windows.py`, `nvshmem_heap.py`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .base import TransportError
from .nvshmem_heap import Library, why_not, window_of
from .windows import Window, Windows


class Nvshmem(Windows):
    """Writes into the windows of other ranks; ``library``: nvshmem4py."""

    by = "NVSHMEM"

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        device: torch.device,
        timeout_seconds: float,
        library: Library | None = None,
    ) -> None:
        if library is None and device.type != "cuda":
            raise TransportError(f"transport 'nvshmem': {why_not(device)}")
        super().__init__(group, backend, device, timeout_seconds)
        self._library = library

    def _open(self, deadline: float) -> Window:
        return window_of(self._group, self._group_device, self._stream, deadline, self._library)
