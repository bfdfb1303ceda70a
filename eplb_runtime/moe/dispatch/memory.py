"""Where rows lie while they travel: on a CPU in buffers that are kept, since fresh ones cost a page fault every 4 KiB.

A device's allocator keeps its memory by itself. Nothing is ever taken from somebody who still needs it: a buffer is
handed out again only when no tensor - and so no graph - holds its storage any more.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

_SMALLEST_POOLED = 1 << 16
"""Bytes. The allocator of the C library gives back smaller ones fast enough."""
_SPARE_EIGHTHS = 1
"""A new buffer is so much larger than was asked for: the number of rows changes from batch to batch."""


class RowMemory:
    """Uninitialised tensors of ``[rows, width]``."""

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._lock = Lock()

    def like(self, example: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        """``[rows, D]`` beside ``example`` ``[..., D]``, in its dtype unless another is named."""
        dtype = dtype or example.dtype
        shape = (rows, example.shape[1])
        size = rows * example.shape[1] * dtype.itemsize
        if example.device.type != "cpu" or size < _SMALLEST_POOLED or _holders is None:
            return torch.empty(shape, dtype=dtype, device=example.device)
        with self._lock:
            return torch.empty(0, dtype=dtype).set_(self._storage(size), 0, shape)  # type: ignore[call-overload]

    def _storage(self, size: int) -> torch.UntypedStorage:
        """The smallest that is free and large enough; else a new one, in the place of a free one that was too small."""
        free = [storage for storage in self._storages if _is_free(storage)]
        fits = [storage for storage in free if storage.nbytes() >= size]
        if fits:
            return min(fits, key=lambda storage: storage.nbytes())
        if free:
            outgrown = max(free, key=lambda storage: storage.nbytes())
            self._storages = [storage for storage in self._storages if storage is not outgrown]
        self._storages.append(torch.UntypedStorage(size + size * _SPARE_EIGHTHS // 8))
        return self._storages[-1]


# How many hold a storage. Without it (it is not public) nothing is kept.
_holders = getattr(torch._C, "_storage_Use_Count", None)


def _is_free(storage: torch.UntypedStorage) -> bool:
    """Whether the one that keeps it is the only one that holds it."""
    return _holders is not None and bool(_holders(storage._cdata) == 1)
