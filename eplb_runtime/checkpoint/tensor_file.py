"""A safetensors file that is written a piece at a time.

The library's writer wants every tensor of a file in memory at once. The format does not: a header says where each
tensor's bytes stand, so they can be written in any order, and a rank needs the memory of one piece.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from ..utils.checksums import CHECKSUM_BYTES, as_bytes, checksum, host_array
from ..utils.files import replacing

DTYPE_NAMES = {
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
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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
        checksums: whether the header gets a checksum of each tensor; they must be written whole then.

    Raises:
        ValueError: the format has no name for a dtype.
        OSError: the file cannot be made.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str], *, checksums: bool = False
    ) -> None:
        self._path = path
        self._specs = dict(tensors)
        self._metadata = dict(metadata)
        # The header is written again when they are known; until then, what is as long.
        self._checksums = dict.fromkeys(tensors, "0" * 2 * CHECKSUM_BYTES) if checksums else {}
        self._missing = sum(spec.nbytes for spec in tensors.values())
        header, self._offsets = self._header()
        self._making = replacing(path)
        self._file = self._making.__enter__()
        self._open = True
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
        data = as_bytes(value.detach().contiguous()).cpu()
        if self._checksums:
            self._checksums[name] = checksum([data]).hex()
        self._write_at(offset, host_array(data).data)
        self._missing -= value.numel() * spec.dtype.itemsize

    def finish(self) -> bytes:
        """Bring everything to the disk.

        Returns:
            The checksum of the header, which has those of the tensors if it was asked to.

        Raises:
            ValueError: something was never written.
        """
        if self._missing:
            raise ValueError(f"{self._path.name}: {self._missing} bytes were not written")
        header, _ = self._header()
        self._write_at(0, memoryview(header))
        self._file.flush()
        os.fsync(self._file.fileno())
        return header_checksum(header)

    def publish(self) -> None:
        """Give the finished file its name, in one step, in the place of what was there."""
        self._open = False
        self._making.__exit__(None, None, None)

    def discard(self) -> None:
        """Leave nothing behind of a file that was not published."""
        if self._open:
            self._open = False
            self._making.__exit__(CancelledError, CancelledError(), None)

    def _write_at(self, offset: int, data: memoryview) -> None:
        self._file.seek(offset)
        self._file.write(data)

    def _header(self) -> tuple[bytes, dict[str, int]]:
        """The header's bytes, and where each tensor begins in the file."""
        metadata = dict(self._metadata)
        if self._checksums:
            metadata["checksums"] = json.dumps(self._checksums, separators=(",", ":"))
        described: dict[str, object] = {"__metadata__": metadata}
        # Wide dtypes first: every tensor begins at a multiple of its element size, so readers can map it.
        ordered = sorted(self._specs.items(), key=lambda item: -item[1].dtype.itemsize)
        begins, end = {}, 0
        for name, spec in ordered:
            if spec.dtype not in DTYPE_NAMES:
                raise ValueError(f"{name}: safetensors has no {spec.dtype}")
            begins[name], end = end, end + spec.nbytes
            described[name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [begins[name], end],
            }
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return header, {name: len(header) + begin for name, begin in begins.items()}


def header_checksum(header: bytes) -> bytes:
    return xxhash.xxh3_128(header).digest()
