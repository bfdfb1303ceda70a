"""NVSHMEM (extras ``nvshmem-cu12``, ``nvshmem-cu13``): writes on a stream into windows (`windows.py`) in the memory of
other GPUs, over NVLink or RDMA, without the host or NCCL in between.

NVSHMEM is started once a process, and allocating or freeing waits for all ranks without a deadline; its binding starts
with Python's interpreter unlocked, and allocates with it locked (`malloc` in nvshmem4py's nvshmem.pyx has no
``nogil``). So windows are equally large everywhere and stay: one for each transport in use at once, lent again to the
next; and all of this runs where training waits on every rank (`control_channel.Reconnection`): no thread of a
rank that waits here is needed by one that has yet to come. Only writes on a stream and `quiet` are used: signals, teams
and collectives end the process where several ranks share a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.text import one_line
from ..consensus import gather_bytes
from .base import SideStream, TransportError
from .windows import StreamWindow, Window, Windows, piece_bytes_for

INSTALL = "pip install 'eplb-runtime[nvshmem-cu12]', or nvshmem-cu13 for CUDA 13"


@dataclass(frozen=True)
class Library:
    """What is used of nvshmem4py: ``get_unique_id``, ``init`` and ``tensor`` of ``nvshmem.core``, and
    ``putmem_on_stream`` and ``quiet_on_stream`` of its bindings."""

    core: Any
    bindings: Any
    device_of: Callable[[int], Any]


def load() -> Library:
    """Return the package, or raise TransportError."""
    try:
        return Library(
            import_module("nvshmem.core"), import_module("nvshmem.bindings.nvshmem"), import_module("cuda.core").Device
        )
    except (ImportError, OSError, RuntimeError) as error:
        reason = one_line(error)
        raise TransportError(f"transport 'nvshmem' needs nvshmem4py ({reason}): {INSTALL}") from error


class HeapWindow(StreamWindow):
    """This rank's part of the heap, which begins at an address that means the same place on all ranks."""

    def __init__(self, memory: Tensor, library: Library, rank: int, num_ranks: int, piece_bytes: int, on: SideStream):
        super().__init__(memory, rank, num_ranks, piece_bytes, on, self._put_on_heap)
        self.memory, self._library = memory, library

    def write(self, peer: int, half: int, data: Tensor) -> None:
        staged = self.outbox_B[: data.numel()]  # networks read only from the heap
        staged.copy_(data, non_blocking=True)
        super().write(peer, half, staged)
        self.settle()

    def settle(self) -> None:
        self._library.bindings.quiet_on_stream(self._stream.pointer)

    def _put_on_heap(self, place: Tensor, source: Tensor, peer: int) -> None:
        on = self._stream.pointer
        self._library.bindings.putmem_on_stream(place.data_ptr(), source.data_ptr(), source.nbytes, peer, on)


_world: list[tuple[str, tuple[int, ...]]] = []
"""Who has started NVSHMEM in this process, and between which ranks: there is one world and never a second."""


def claim(by: str, group: dist.ProcessGroup, *, again: bool = False) -> str:
    """Return why NVSHMEM cannot be started for a user between these ranks, or "" and note that it is. Asked by all who
    start it, DeepEP's buffers among them; ``again``: this user may share its world."""
    user = by, tuple(dist.get_process_group_ranks(group))
    if _world and not (again and _world[0] == user):
        first, ranks = _world[0]
        return f"{first} has started NVSHMEM between ranks {list(ranks)}, and a process starts it once"
    _world[:] = [user]
    return ""


_running: list[Library] = []
_windows: list[HeapWindow] = []
"""On the heap of this process, by who uses each now or did last."""


class Nvshmem(Windows):
    """Writes into the windows of other ranks."""

    by = "NVSHMEM"

    def _open(self, deadline: float) -> Window:
        """Return a window of this transport alone, until it is released."""
        if self._package is None and self.device.type != "cuda":
            raise TransportError(f"transport 'nvshmem' carries between GPUs, not on {self.device.type}")
        library, problem = self._package, ""
        try:
            library = library or load()
            problem = claim("transport='nvshmem'", self._group, again=True)
        except TransportError as error:
            problem = str(error)
        said = self._gather([problem, [n for n, window in enumerate(_windows) if window.released]], deadline)
        for rank, (text, _) in enumerate(said):
            if text:
                raise TransportError(f"EP rank {rank}: {text}")
        if not _running:
            self._start(library, deadline)
        ranks = self._num_ranks
        piece_bytes = piece_bytes_for(ranks)
        number = min(set.intersection(*(set(free) for _, free in said)), default=len(_windows))
        if number < len(_windows):
            memory = _windows[number].memory
        else:
            memory = library.core.tensor((StreamWindow.nbytes(ranks, piece_bytes),), dtype=torch.uint8).zero_()
        _windows[number : number + 1] = [HeapWindow(memory, library, self._rank, ranks, piece_bytes, self._stream)]
        return _windows[number]

    def _start(self, library: Library, deadline: float) -> None:
        first = self._rank == 0
        identity = library.core.get_unique_id(empty=not first)
        raw = identity._data.view(np.uint8)
        words = gather_bytes(raw.tobytes() if first else b"", self._group, self._group_device, deadline)
        raw[:] = np.frombuffer(words[0], dtype=np.uint8)
        on = library.device_of(torch.cuda.current_device() if torch.cuda.is_available() else 0)
        on.set_current()
        library.core.init(device=on, uid=identity, rank=self._rank, nranks=self._num_ranks, initializer_method="uid")
        _running.append(library)
