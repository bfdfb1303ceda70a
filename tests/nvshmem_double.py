"""Does between processes of one machine what NVSHMEM does between GPUs: a heap that others write into, by files that
all map. A stream is the order of calls. The calls are those of nvshmem4py that the transport makes. For tests on a CPU.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from eplb_runtime.migration.transports.nvshmem_heap import Library


class Double:
    """One process's NVSHMEM.

    Args:
        folder: where the heaps lie.

    Attributes:
        calls: names, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.calls: list[str] = []
        self._folder = folder
        self._heaps: dict[int, np.ndarray] = {}
        self._base = self._nbytes = 0
        self._name = ""

    def library(self) -> Library:
        return Library(self, self, lambda index: SimpleNamespace(set_current=lambda: None))

    # -- nvshmem.core --------------------------------------------------------------------------------------------------

    def get_unique_id(self, empty: bool = False) -> Any:
        return SimpleNamespace(_data=np.zeros(8, np.int64) if empty else np.full(8, 77, np.int64))

    def init(self, device: Any, uid: Any, rank: int, nranks: int, initializer_method: str) -> None:
        assert initializer_method == "uid" and (uid._data == 77).all() and not self._name
        self.rank, self._name = rank, "heap"

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        assert dtype == torch.uint8 and not self._nbytes
        (self._nbytes,) = shape
        mine = self._heap(self.rank)
        self._base = mine.ctypes.data
        return torch.from_numpy(mine)

    # -- nvshmem.bindings.nvshmem --------------------------------------------------------------------------------------

    def putmem_on_stream(self, dest: int, source: int, bytes: int, pe: int, cstrm: int) -> None:
        begin = dest - self._base
        assert begin >= 0 and begin + bytes <= self._nbytes, "the destination is in the heap"
        assert source - self._base >= 0 and source - self._base + bytes <= self._nbytes, "and so is the source"
        assert pe != self.rank
        self.calls.append("put")
        ctypes.memmove(self._heap(pe).ctypes.data + begin, source, bytes)

    def quiet_on_stream(self, cstrm: int) -> None:
        self.calls.append("quiet")

    def _heap(self, pe: int) -> np.ndarray:
        if pe not in self._heaps:
            with open(self._folder / f"heap{pe}", "a+b") as file:
                file.truncate(self._nbytes)
                self._heaps[pe] = np.frombuffer(mmap.mmap(file.fileno(), self._nbytes), dtype=np.uint8)
        return self._heaps[pe]
