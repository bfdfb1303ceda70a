"""NVSHMEM (extras ``nvshmem-cu12``, ``nvshmem-cu13``): writes on a stream into windows (`windows.py`) in the memory of
other GPUs, over NVLink or RDMA, without the host or NCCL in between.

NVSHMEM is started once a process; allocating or freeing waits for all ranks without a deadline, with Python's
interpreter locked (`malloc` in nvshmem4py's nvshmem.pyx has no ``nogil``). So windows are equally large everywhere and
stay: one for each transport in use at once, lent again to the next; and all of this runs where training waits on every
rank (`ControlChannel.reconnect`): no thread of a rank that waits here is needed by one that has yet to come. Only
writes on a stream and `quiet` are used: signals, teams and collectives end the process where ranks share a GPU.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.text import one_line
from ..consensus import failing_together, gather_bytes
from .base import TransportError
from .windows import HasLeft, Windows

INSTALL = "pip install 'eplb-runtime[nvshmem-cu12]', or nvshmem-cu13 for CUDA 13"
_world: list[tuple[str, tuple[int, ...]]] = []
"""Who has started NVSHMEM in this process, and between which ranks: there is one world and never a second."""
_windows: list[Tensor] = []
_lent: set[int] = set()
"""Windows on the heap of this process, and the numbers of those that a transport uses."""


def load() -> Any:
    """Return nvshmem4py's ``core`` and ``bindings`` and CUDA's class ``device_of``. TransportError: no import."""
    try:
        core, bindings = import_module("nvshmem.core"), import_module("nvshmem.bindings.nvshmem")
        return SimpleNamespace(core=core, bindings=bindings, device_of=import_module("cuda.core").Device)
    except (ImportError, OSError, RuntimeError) as error:
        raise TransportError(f"transport 'nvshmem' needs nvshmem4py ({one_line(error)}): {INSTALL}") from error


def claim(by: str, group: dist.ProcessGroup, *, again: bool = False) -> str:
    """Note that the user ``by`` starts NVSHMEM between these ranks, and return "". If NVSHMEM is claimed already,
    change nothing and return why this user cannot have it; ``again``: the same user and ranks may."""
    user = by, tuple(dist.get_process_group_ranks(group))
    if _world and not (again and _world[0] == user):
        first, ranks = _world[0]
        return f"{first} has started NVSHMEM between ranks {list(ranks)}, and a process starts it once"
    _world[:] = [user]
    return ""


class Nvshmem(Windows):
    """Writes into the windows of other ranks."""

    def _open(self, nbytes: int, deadline: float) -> Tensor:
        """Return a window of this transport alone, until it is released."""
        if self._package is None and self.device.type != "cuda":
            raise TransportError(f"transport 'nvshmem' carries between GPUs, not on {self.device.type}")
        with failing_together(self._group, self._group_device, deadline):
            library = self._package or load()
            if problem := claim("transport='nvshmem'", self._group, again=True):
                raise TransportError(problem)
        said = self._gather([n for n in range(len(_windows)) if n not in _lent], deadline)
        if not _windows:
            self._start(library, deadline)
        self._library = library
        self._number = min(set.intersection(*map(set, said)), default=len(_windows))
        if self._number == len(_windows):
            _windows.append(library.core.tensor((nbytes,), dtype=torch.uint8).zero_())
        _lent.add(self._number)
        return _windows[self._number]

    def _put(self, place: Tensor, source: Tensor, peer: int, after: HasLeft | None = None) -> HasLeft:
        on = self._stream.pointer
        if after is not None:
            self._library.bindings.quiet_on_stream(on)
        self._library.bindings.putmem_on_stream(place.data_ptr(), source.data_ptr(), source.nbytes, peer, on)
        return self._stream.mark()

    def _release(self) -> None:
        _lent.discard(self._number)

    def _start(self, library: Any, deadline: float) -> None:
        identity = library.core.get_unique_id(empty=self._rank > 0)
        raw = identity._data.view(np.uint8)
        of_first = gather_bytes(raw.tobytes(), self._group, self._group_device, deadline)[0]
        raw[:] = np.frombuffer(of_first, dtype=np.uint8)
        on = library.device_of(torch.cuda.current_device() if torch.cuda.is_available() else 0)
        on.set_current()
        library.core.init(device=on, uid=identity, rank=self._rank, nranks=self._num_ranks, initializer_method="uid")
