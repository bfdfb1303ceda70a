"""Safetensors files: arrays by name, and what is written about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import FormatError, first_line


def read(path: Path) -> dict[str, NDArray[Any]]:
    """The file's arrays by name.

    Raises:
        FormatError: not such a file, or of a dtype that numpy lacks.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path.open("rb").close()  # for a system message: safetensors has none for a file that cannot be opened
    try:
        return dict(load_file(path))
    except (SafetensorError, KeyError, TypeError) as error:
        raise FormatError(f"not a safetensors file of plain numbers ({first_line(error)})") from None


def metadata(path: Path) -> dict[str, str]:
    """The texts in the file's header.

    Raises:
        FormatError: not such a file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except SafetensorError:
        raise FormatError("not a safetensors file") from None
