"""``numpy.savez`` files, opened without pickles; an array is read when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ....utils.files import FileError
from ..arrays import require_few
from ..errors import FormatError, first_line
from .zip_archive import BROKEN, open_archive

READ_HEADER = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class NpzArrays(Mapping[str, NDArray[Any]]):
    """The arrays of a file by name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_archive(path) as archive:
            self._entries = {name.removesuffix(".npy"): name for name in archive.namelist()}

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self._entries[name]
        try:
            with open_archive(self._path) as archive, archive.open(entry) as file:
                return _read_array(file, name, archive.getinfo(entry).file_size)
        except FileError:
            raise
        except BROKEN as error:
            raise _not_npz(error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def read(path: Path) -> NpzArrays:
    """The file's arrays by name.

    Raises:
        FileError: no such file, or too large; when an array is asked for: too large, broken, or of objects.
    """
    try:
        return NpzArrays(path)
    except FileError:
        raise
    except BROKEN as error:
        with path.open("rb") as file:
            if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
                raise FormatError("one bare array; save it with numpy.savez(file, load=counts)") from None
        raise _not_npz(error) from None


def _read_array(file: IO[bytes], name: str, size: int) -> NDArray[Any]:
    """One ``.npy``; its shape is held against the bytes that are there before there is memory for it."""
    version = npy.read_magic(file)
    if version not in READ_HEADER:
        raise FormatError(f"{name} is kept in a version of numpy's format that is not read")
    shape, by_columns, dtype = READ_HEADER[version](file)
    if dtype.kind not in "iuf":
        raise FormatError(f"not an .npz of plain numbers: {name} holds {dtype}")
    count = math.prod(shape)
    require_few(count, name)
    if count * dtype.itemsize > size:
        raise FormatError(f"not an .npz of plain numbers: {name} is cut off")
    data = file.read(count * dtype.itemsize + 1)
    if len(data) != count * dtype.itemsize:
        raise FormatError(f"not an .npz of plain numbers: {name} is not as long as it says")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if by_columns else "C")


def _not_npz(error: BaseException) -> FormatError:
    return FormatError(f"not an .npz of plain numbers ({first_line(error)})")
