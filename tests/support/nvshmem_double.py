"""Does between processes of one machine what NVSHMEM does between GPUs: a heap that others write into, by files that
all map. A stream is the order of calls. The calls are those of nvshmem4py that the transport makes. For tests on a CPU.
"""

import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class Double:
    """One process's NVSHMEM, its heaps in a folder; ``calls``: names, in order."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[str] = []
        self._folder = folder
        self._heaps: dict[tuple[int, int], np.ndarray] = {}
        self._begins: list[tuple[int, int]] = []
        self._name = ""

    def library(self) -> Any:
        return SimpleNamespace(core=self, bindings=self, device_of=lambda i: SimpleNamespace(set_current=lambda: None))

    # -- nvshmem.core --------------------------------------------------------------------------------------------------

    def get_unique_id(self, empty: bool = False) -> Any:
        return SimpleNamespace(_data=np.zeros(8, np.int64) if empty else np.full(8, 77, np.int64))

    def init(self, device: Any, uid: Any, rank: int, nranks: int, initializer_method: str) -> None:
        assert initializer_method == "uid" and (uid._data == 77).all() and not self._name
        self.rank, self._name = rank, "heap"

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        assert dtype == torch.uint8
        number, (nbytes,) = len(self._begins), shape
        mine = self._part(number, self.rank, nbytes)
        self._begins.append((mine.ctypes.data, nbytes))
        return torch.from_numpy(mine)

    # -- nvshmem.bindings.nvshmem --------------------------------------------------------------------------------------

    def putmem_on_stream(self, dest: int, source: int, bytes: int, pe: int, cstrm: int) -> None:
        number, at = self._place(dest, bytes)
        self._place(source, bytes)
        assert pe != self.rank
        self.calls.append("put")
        ctypes.memmove(self._part(number, pe, self._begins[number][1]).ctypes.data + at, source, bytes)

    def quiet_on_stream(self, cstrm: int) -> None:
        self.calls.append("quiet")

    def _place(self, address: int, nbytes: int) -> tuple[int, int]:
        """Which allocation of the heap, and where in it."""
        for number, (begin, size) in enumerate(self._begins):
            if begin <= address and address + nbytes <= begin + size:
                return number, address - begin
        raise AssertionError("source and destination are in the heap")

    def _part(self, number: int, pe: int, nbytes: int) -> np.ndarray:
        if (number, pe) not in self._heaps:
            with open(self._folder / f"heap {number} of {pe}", "a+b") as file:
                file.truncate(nbytes)
                self._heaps[number, pe] = np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=np.uint8)
        return self._heaps[number, pe]
