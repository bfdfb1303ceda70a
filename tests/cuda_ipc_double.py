"""Does between processes of one machine what CUDA IPC does between GPUs: memory that others open, and a stream on which
a copy is done some time after it was begun. For tests on a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from eplb_runtime.distributed.transports.cuda_memory import DeviceMemory
from eplb_runtime.distributed.transports.segments import Segment, open_segment
from eplb_runtime.distributed.transports.side_stream import SideStream

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
        move: copies bytes from one address to another.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.before_done: Callable[[], None] = lambda: None
        self.move: Callable[[int, int, int], object] = ctypes.memmove
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
                    self.move(into.address(), source.address(), source.nbytes)
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


class OfAnyMemory(Double):
    """As on a GPU, all memory can be exported. What others open is a place that they can copy from and not look into:
    bytes are read where they are, when the copy is done.

    Attributes:
        read_bytes: of other processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0
        self.late.move = self._move
        self._places: list[tuple[int, int, int, int]] = []
        self._kernel = ctypes.CDLL(None, use_errno=True)
        self._kernel.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def export(self, region: Tensor) -> bytes:
        self.exports += 1
        storage = region.untyped_storage()
        return json.dumps([os.getpid(), storage.data_ptr(), storage.nbytes()]).encode()

    def open(self, word: bytes) -> Tensor:
        process, begin, nbytes = json.loads(word)
        opened = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        place = opened.data_ptr()
        self._places = [(place, nbytes, process, begin), *(other for other in self._places if other[0] != place)]
        return opened

    def _move(self, into: int, source: int, nbytes: int) -> None:
        for place, size, process, begin in self._places:
            if place <= source < place + size:
                here, there = (_Range * 1)((into, nbytes)), (_Range * 1)((begin + source - place, nbytes))
                read = self._kernel.process_vm_readv(process, here, 1, there, 1, 0)
                if read != nbytes:
                    raise RuntimeError(f"memory of process {process} cannot be read: {os.strerror(ctypes.get_errno())}")
                self.read_bytes += nbytes
                return
        ctypes.memmove(into, source, nbytes)


class _Range(ctypes.Structure):
    """The kernel's `struct iovec`."""

    _fields_ = (("begin", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_PR_SET_PTRACER = 0x59616D61
