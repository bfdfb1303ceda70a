"""Does between processes of one machine what torch's symmetric memory does between GPUs of a node, with its signatures
and demands: memory that others open, and signals that wait. For tests on a CPU.

A signal is a word of the receiver's pad: put waits until it is 0 and makes it 1, wait until it is 1 and makes it 0. One
rank puts it and one takes it, so plain reads and writes do for the atomic ones of a GPU.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PAD_BYTES = 2048
"""What torch had for long; newer ones have more."""
LOST: list[tuple[int, int]] = []
"""Signals ``(peer, channel)`` of this process that do not arrive."""
_segments: dict[int, tuple[int, Tensor]] = {}
"""Descriptor and memory of each piece, by its address."""


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def get_backend(device: Any) -> str | None:
    return "CUDA"


def get_signal_pad_size() -> int:
    return PAD_BYTES


def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """Filled with a pattern that is no weight."""
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    dtype = dtype or torch.get_default_dtype()
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    descriptor = os.memfd_create("eplb_runtime")
    os.ftruncate(descriptor, PAD_BYTES + max(16, nbytes))
    whole = _mapped(descriptor, PAD_BYTES + max(16, nbytes))
    data = whole[PAD_BYTES : PAD_BYTES + nbytes].fill_(0xAB)
    _segments[data.data_ptr()] = descriptor, whole
    return data.view(dtype).view(shape)


def rendezvous(tensor: Tensor, group: Any) -> SymmetricMemory:
    descriptor, whole = _segments[tensor.data_ptr()]
    assert torch._C._distributed_c10d._resolve_process_group(group.group_name) is not None, "torch must find it"
    words: list[Any] = [None] * group.size()
    dist.all_gather_object(words, (os.getpid(), descriptor, whole.nbytes), group=group)
    assert len({nbytes for *_, nbytes in words}) == 1, "pieces are the same on all ranks"
    memory = [whole if rank == group.rank() else _opened(*word) for rank, word in enumerate(words)]
    dist.barrier(group)  # before anybody's may go
    return SymmetricMemory(group.rank(), memory)


def _opened(process: int, descriptor: int, nbytes: int) -> Tensor:
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    try:
        return _mapped(opened, nbytes)
    finally:
        os.close(opened)


class SymmetricMemory:
    __module__ = "torch.distributed._symmetric_memory"  # whose place it takes, also for who asks what holds a tensor

    def __init__(self, rank: int, memory: list[Tensor]) -> None:
        self.rank, self.world_size = rank, len(memory)
        self.signal_pad_size, self.buffer_size = PAD_BYTES, memory[0].nbytes - PAD_BYTES
        self._pads = [one[:PAD_BYTES].view(torch.int32).numpy() for one in memory]
        self._data = [one[PAD_BYTES:] for one in memory]

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        begin, nbytes = storage_offset * dtype.itemsize, dtype.itemsize * torch.Size(sizes).numel()
        assert begin + nbytes <= self.buffer_size
        return self._data[rank][begin : begin + nbytes].view(dtype).view(tuple(sizes))

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.get_buffer(peer, sizes, dtype)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        if (dst_rank, channel) not in LOST:
            self._change(dst_rank, channel, self.rank, 0, 1, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self._change(self.rank, channel, src_rank, 1, 0, timeout_ms)

    def _change(self, at: int, channel: int, source: int, before: int, after: int, timeout_ms: int) -> None:
        assert channel >= 0 and 4 * (channel + 1) * self.world_size <= PAD_BYTES
        assert 0 <= at < self.world_size and 0 <= source < self.world_size
        pad, word = self._pads[at], self.world_size * channel + source
        end = time.monotonic() + timeout_ms / 1000
        while pad[word] != before:
            if timeout_ms and time.monotonic() > end:
                what = "put for" if after else "received from"
                raise RuntimeError(f"no signal {what} rank {at if after else source} on channel {channel}: trapped")
            time.sleep(0.00005)
        pad[word] = after
