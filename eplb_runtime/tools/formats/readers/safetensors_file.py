"""Safetensors files: arrays by name, read when they are asked for, and what is written about them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....utils.files import MIB, require_readable
from ..arrays import require_few
from ..errors import FormatError, first_line

MOST_BYTES = 4096 * MIB
INTEGERS_AND_FLOATS = {"I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "F16", "F32", "F64"}
NUMPY_LACKS = {"BF16", "F8_E4M3", "F8_E5M2"}
"""Read by torch."""


class SafetensorsArrays(Mapping[str, Any]):
    """The arrays of a file by name: of numpy, or of torch where numpy lacks the dtype."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._path = path
        require_readable(path, MOST_BYTES)
        try:
            with safe_open(path, framework="numpy") as file:
                self._names: tuple[str, ...] = tuple(file.keys())
                self.metadata: dict[str, str] = dict(file.metadata() or {})
        except SafetensorError as error:
            raise FormatError(f"not a safetensors file ({first_line(error)})") from None

    def __getitem__(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self._names:
            raise KeyError(name)
        try:
            with safe_open(self._path, framework="numpy") as file:
                entry = file.get_slice(name)
                dtype = entry.get_dtype()
                require_few(math.prod(entry.get_shape()), name)
                if dtype in INTEGERS_AND_FLOATS:
                    return file.get_tensor(name)
            if dtype not in NUMPY_LACKS:
                raise FormatError(f"{name} holds {dtype}; it must hold integers or floats")
            with safe_open(self._path, framework="pt") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise FormatError(f"not a safetensors file ({first_line(error)})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read(path: Path) -> SafetensorsArrays:
    """The file's arrays by name, and its ``metadata``, the texts in its header.

    Raises:
        FileError: not such a file, or too large; when an array is asked for: of a dtype that is no number.
    """
    return SafetensorsArrays(path)
