"""``numpy.savez`` files, opened without pickles."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError, first_line


def read(path: Path) -> dict[str, Any]:
    """The file's arrays by name.

    Raises:
        FormatError: no such file, or arrays of objects.
    """
    try:
        arrays = np.load(path, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise FormatError("one bare array; save it with numpy.savez(file, load=counts)")
        with arrays:
            return dict(arrays)
    except FormatError:
        raise
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise FormatError(f"not an .npz of plain numbers ({first_line(error)})") from None
