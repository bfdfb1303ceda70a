"""Memory of a GPU that other processes of its node open, by torch's own handles for it (CUDA IPC). No messages here.

A handle stands for a storage. It travels as a word that any process of this node can turn into a tensor; memory that
was freed since is not to be read by it.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .neighbours import Kind, Notification
from .segments import Segment, open_segment
from .side_stream import SideStream

_LENGTH = struct.Struct("<I")


def why_not(device: torch.device) -> str:
    """What this process lacks to open memory of other ranks' GPUs; empty: nothing that can be seen before meeting."""
    if device.type != "cuda":
        return f"it carries between GPUs, not on {device.type}"
    try:
        Segment(mmap.PAGESIZE)
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return f"no notes can be handed to other processes here: {error}"
    if torch.cuda.is_available() and torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        return "memory of torch's allocator cudaMallocAsync cannot be shared"
    return ""


def identity_of(device: torch.device) -> str:
    """Name of a GPU that all processes of its node give it, whichever GPUs each of them sees: numbers differ, and are
    all 0 where a launcher shows each rank one GPU. Empty: the device is no GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


class IpcHandle(NamedTuple):
    """What torch gives for a storage, in its order and by its names (``torch.multiprocessing.reductions``)."""

    device: int
    handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class DeviceMemory:
    """Memory of this process and what others have given it.

    Args:
        device: of both.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> SideStream:
        """Where copies run."""
        return SideStream(self.device)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, into: Tensor, source: Tensor) -> None:
        """On the current stream, by the copy engine: both are contiguous bytes."""
        into.copy_(source, non_blocking=True)

    def export(self, region: Tensor) -> bytes:
        """The word for the whole storage of a tensor; it begins at ``region.untyped_storage().data_ptr()``.

        Raises:
            RuntimeError: this memory cannot be shared.
        """
        with torch.cuda.device(self.device):
            given = IpcHandle(*region.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]
        # torch would keep freed memory until others let go of it. Nobody reads what is not being sent, so it need not.
        torch.UntypedStorage._release_ipc_counter_cuda(given.ref_counter_handle, given.ref_counter_offset)
        # Notes say when it may be read, so no event of this process is waited for.
        word = given._replace(event_handle=b"", event_sync_required=False)
        return json.dumps([field.hex() if isinstance(field, bytes) else field for field in word]).encode()

    def open(self, word: bytes) -> Tensor:
        """Another process's storage, uint8, mapped for this rank's own GPU, whichever it lies on.

        Raises:
            RuntimeError: it cannot be opened, or not from this GPU.
        """
        given: list[Any] = [bytes.fromhex(field) if isinstance(field, str) else field for field in json.loads(word)]
        device = torch.cuda.current_device() if self.device.index is None else self.device.index
        storage = torch.UntypedStorage._new_shared_cuda(*IpcHandle(*given)._replace(device=device))
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)


@dataclass(frozen=True)
class Export:
    """A storage of this rank that others can open.

    Args:
        page: holds its word, for those who know where the page is.
        address, nbytes: of the storage.
        storage: leads to it while it is there.
    """

    page: Segment
    address: int
    nbytes: int
    storage: StorageWeakRef

    @classmethod
    def of(cls, region: Tensor, memory: DeviceMemory) -> Export:
        """Raises: RuntimeError: the memory cannot be shared."""
        word = memory.export(region)
        page = Segment(_LENGTH.size + len(word))
        page.tensor.copy_(torch.frombuffer(bytearray(_LENGTH.pack(len(word)) + word), dtype=torch.uint8))
        storage = region.untyped_storage()
        return cls(page, storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    @property
    def gone(self) -> bool:
        """Whether it was freed, or given other memory (``resize_``)."""
        now = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return now is None or (now.data_ptr(), now.nbytes()) != (self.address, self.nbytes)

    def holds(self, data: Tensor) -> bool:
        """Whether a tensor is part of it."""
        begin = data.data_ptr()
        return not self.gone and self.address <= begin and begin + data.nbytes <= self.address + self.nbytes

    def offer(self, rank: int, data: Tensor) -> Notification:
        """The note that lets another rank read ``data``, which is part of it."""
        page, offset = self.page, data.data_ptr() - self.address
        return Notification(Kind.OFFER, rank, page.identity, page.descriptor, page.nbytes, offset, data.nbytes)


def open_offered(process: int, note: Notification, memory: DeviceMemory) -> Tensor:
    """The whole storage that an offer is part of.

    Raises:
        OSError, RuntimeError: it cannot be opened.
    """
    page = open_segment(process, note.descriptor, note.identity, note.size).numpy().tobytes()
    (length,) = _LENGTH.unpack_from(page)
    return memory.open(page[_LENGTH.size : _LENGTH.size + length])
