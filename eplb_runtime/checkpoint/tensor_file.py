"""A safetensors file that is written a piece at a time.

The library's writer wants every tensor of a file in memory at once. The format does not: a header says where each
tensor's bytes stand, so they can be written in any order, and a rank needs the memory of one piece.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checksum import as_bytes

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSpec:
    """What a file's header says of a tensor before there are any bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFile:
    """One file under a temporary name; `publish` gives it its own.

    Args:
        path: what it will be called.
        tensors: everything that will be in it, in the order in which it stands there (wider dtypes first).
        metadata: of the header.

    Raises:
        ValueError: the format has no name for a dtype.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        self._specs = dict(tensors)
        self._missing = sum(spec.nbytes for spec in tensors.values())
        header, self._offsets = _header(tensors, metadata)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.fdopen(os.open(self._partial, flags, 0o666), "wb", buffering=0)
        self._write_at(0, memoryview(header))

    def write(self, name: str, value: Tensor, row: int | None = None) -> None:
        """Put a tensor's values into their place, on any device; each byte of a file is written once.

        Args:
            value: the whole tensor, or rows of it.
            row: the row of dimension 0 that ``value`` begins with; None: it is the whole tensor.
        """
        spec = self._specs[name]
        wanted = spec.shape if row is None else (value.shape[0], *spec.shape[1:])
        if tuple(value.shape) != wanted or value.dtype != spec.dtype:
            raise ValueError(f"{name}: got {tuple(value.shape)} {value.dtype} for {spec.shape} {spec.dtype}")
        offset = self._offsets[name]
        if row is not None:
            offset += row * torch.Size(spec.shape[1:]).numel() * spec.dtype.itemsize
        self._write_at(offset, as_bytes(value.detach().contiguous()).cpu().numpy().data)
        self._missing -= value.numel() * spec.dtype.itemsize

    def finish(self) -> None:
        """Bring everything to the disk.

        Raises:
            ValueError: something was never written.
        """
        if self._missing:
            raise ValueError(f"{self._path.name}: {self._missing} bytes were not written")
        os.fsync(self._file.fileno())
        self._file.close()

    def publish(self) -> None:
        """Give the finished file its name, in one step, in the place of what was there."""
        os.replace(self._partial, self._path)

    def discard(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _write_at(self, offset: int, data: memoryview) -> None:
        self._file.seek(offset)
        while data.nbytes:
            data = data[self._file.write(data) :]


def _header(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header's bytes, and where each tensor begins in the file."""
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    # Wide dtypes first: every tensor begins at a multiple of its element size, so readers can map it.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    begins, end = {}, 0
    for name, spec in ordered:
        if spec.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{name}: safetensors has no {spec.dtype}")
        begins[name], end = end, end + spec.nbytes
        described[name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}
