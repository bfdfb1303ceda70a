"""Memory that ranks of one machine share without a name: a descriptor that others open through its owner's process.

Nothing is left behind, however a process ends: the kernel frees a segment with the last process that has it open.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor


class Segment:
    """Shared memory of this process. It lives as long as a tensor that was made of it, or this object.

    Args:
        gone: called with the identity when the memory is freed, on any thread.

    Attributes:
        identity: of the memory, unlike any other's on this machine while it lives.
        descriptor: by which other processes open it.
    """

    def __init__(self, nbytes: int, gone: Callable[[int], None] = lambda identity: None) -> None:
        self.descriptor = os.memfd_create("eplb_runtime", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, nbytes)
            memory = mmap.mmap(self.descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.identity = os.fstat(self.descriptor).st_ino
        self.nbytes = nbytes
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = tensor.data_ptr()
        self._memory = weakref.ref(memory)
        self._freed = weakref.finalize(memory, _free, self.descriptor, self.identity, gone)
        self._freed.atexit = False
        self._tensor: Tensor | None = tensor

    def hand_out(self) -> Tensor:
        """The memory, uint8 ``[nbytes]``; from now on it lives as long as this tensor and its views."""
        assert self._tensor is not None
        tensor, self._tensor = self._tensor, None
        return tensor

    @property
    def tensor(self) -> Tensor:
        """The memory of a segment that was not handed out."""
        assert self._tensor is not None
        return self._tensor

    @property
    def alive(self) -> bool:
        return self._freed.alive

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are part of it."""
        return self.alive and self.address <= address and address + nbytes <= self.address + self.nbytes

    def part_from_others(self) -> None:
        """Put other memory with the same contents where this one was: what other processes still write does not come
        here any more.

        Raises:
            OSError: there is no memory for it.
        """
        memory = self._memory()  # keep it while we work on it
        if memory is None:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        own = os.memfd_create("eplb_runtime", os.MFD_CLOEXEC)
        try:
            with memoryview(memory) as contents:
                written = 0
                while written < self.nbytes:
                    written += os.write(own, contents[written:])
            protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
            if libc.mmap(self.address, self.nbytes, protection, flags, own, 0) != self.address:
                raise OSError(ctypes.get_errno(), "shared memory could not be replaced")
        finally:
            os.close(own)


_MAP_FIXED = 0x10


def _free(descriptor: int, identity: int, gone: Callable[[int], None]) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)
    gone(identity)


def open_segment(process: int, descriptor: int, identity: int, nbytes: int) -> Tensor:
    """Another process's segment, uint8 ``[nbytes]``, mapped here as long as the tensor lives.

    Raises:
        OSError: that process is gone, has freed it, or is not ours to look into.
    """
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(opened)
        if found.st_ino != identity or found.st_size < nbytes:
            raise OSError(f"descriptor {descriptor} of process {process} is something else by now")
        memory = mmap.mmap(opened, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(opened)
    return torch.frombuffer(memory, dtype=torch.uint8)
