"""Zip archives, which ``.npz`` and ``.pt`` files are: how large they unpack is known before anything is unpacked."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from pathlib import Path

from ....utils.files import MIB, require_readable
from ..errors import FormatError

MOST_BYTES = 4096 * MIB
"""Of the file, and of what is unpacked of it."""
MOST_CONTENTS_BYTES = 64 * MIB
"""Of the archive's table of contents."""

BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
    LookupError,
    OverflowError,
    RuntimeError,
    TypeError,
)
"""What zipfile and zlib raise for broken, encrypted or unknown archives."""


class _File(io.FileIO):
    """A file that refuses to hand out more than so many bytes at once: zipfile reads the whole table of contents."""

    most: int | None = MOST_CONTENTS_BYTES

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = max(0, os.fstat(self.fileno()).st_size - self.tell())
        if self.most is not None and size > self.most:
            raise FormatError("a zip archive whose table of contents is too large")
        return super().read(size) or b""


def open_archive(path: Path) -> zipfile.ZipFile:
    """The archive, its sizes checked; the caller closes it.

    Raises:
        FileError: too large, packed or unpacked, or packed by a method that neither numpy nor torch uses.
        one of BROKEN: no archive.
    """
    require_readable(path, MOST_BYTES)
    file = _File(path)
    try:
        archive = zipfile.ZipFile(file)
        file.most = None
        entries = archive.infolist()
        unpacked = sum(entry.file_size for entry in entries)
        if unpacked > MOST_BYTES:
            sizes = f"{unpacked / MIB:,.0f} MiB unpacked, but up to {MOST_BYTES / MIB:,.0f} MiB are read"
            raise FormatError(f"{sizes}: give a smaller file")
        if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
            raise FormatError("a zip archive packed by a method that is not read")
        return archive
    except BaseException:
        file.close()
        raise
