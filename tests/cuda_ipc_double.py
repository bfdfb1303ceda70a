"""Does between processes of one machine what CUDA IPC does between GPUs: memory that others open, and a stream on which
a copy is done some time after it was begun. For tests on a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from eplb_runtime.migration.transports.cuda_memory import DeviceMemory
from eplb_runtime.migration.transports.segments import Segment, open_segment
from eplb_runtime.migration.transports.side_stream import SideStream

LOOKS = 3
"""A copy is done when somebody has looked so often whether it is."""


class _Place:
    """Bytes that nobody keeps for whoever is copying them, as on a GPU."""

    def __init__(self, data: Tensor) -> None:
        self._address, self.nbytes = data.data_ptr(), data.nbytes
        self._storage = StorageWeakRef(data.untyped_storage())

    def address(self) -> int:
        assert not self._storage.expired(), "memory is kept until it is copied"
        return self._address


class LateStream(SideStream):
    """Copies that are not done when they are begun.

    Attributes:
        before_done: called before a copy is done, by who looks whether it is.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.before_done: Callable[[], None] = lambda: None
        self._waiting: list[tuple[_Place, _Place]] = []
        self._begun = self._done = 0

    def copy(self, into: Tensor, source: Tensor) -> None:
        self._waiting.append((_Place(into), _Place(source)))
        self._begun += 1

    @contextlib.contextmanager
    def __call__(self) -> Iterator[int]:
        yield 0

    def mark(self) -> Callable[[], bool]:
        upto, looks = self._begun, 0

        def done() -> bool:
            nonlocal looks
            looks += 1
            if looks >= LOOKS:
                while self._done < upto:
                    self.before_done()
                    into, source = self._waiting.pop(0)
                    ctypes.memmove(into.address(), source.address(), source.nbytes)
                    self._done += 1
            return self._done >= upto

        return done


class Double(DeviceMemory):
    """Shared memory of this machine. Only what ``empty`` has given can be exported.

    Attributes:
        copies: bytes of each copy that was begun, and whether it reads another process.
        exports: how many words were made.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.late = LateStream()
        self.copies: list[tuple[int, bool]] = []
        self.exports = 0
        self._segments: list[Segment] = []
        self._opened: list[tuple[int, int]] = []

    def stream(self) -> SideStream:
        return self.late

    def empty(self, nbytes: int) -> Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        self._segments = [segment for segment in self._segments if segment.alive]
        self._segments.append(Segment(nbytes))
        return self._segments[-1].hand_out()

    def copy(self, into: Tensor, source: Tensor) -> None:
        begin = source.data_ptr()
        foreign = any(first <= begin < first + nbytes for first, nbytes in self._opened)
        self.copies.append((source.nbytes, foreign))
        self.late.copy(into, source)

    def export(self, region: Tensor) -> bytes:
        for segment in self._segments:
            if segment.holds(region.data_ptr(), region.nbytes):
                self.exports += 1
                return json.dumps([os.getpid(), segment.descriptor, segment.identity, segment.nbytes]).encode()
        raise RuntimeError("this memory cannot be shared")

    def open(self, word: bytes) -> Tensor:
        opened = open_segment(*json.loads(word))
        self._opened.append((opened.data_ptr(), opened.nbytes))
        return opened
