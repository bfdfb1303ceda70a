"""``torch.save`` files of tensors and plain values, opened with ``weights_only``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ....utils.files import MIB, FileError
from ..errors import FormatError, first_line
from .zip_archive import BROKEN, open_archive

MOST_STRUCTURE_BYTES = 64 * MIB
"""Of what stands beside the tensors' own bytes: lists, names, numbers."""


def read(path: Path) -> dict[str, Any]:
    """The file's content, which must be a dict; refuses every object that is no tensor and no plain value.

    Tensors may still claim any size (one number seen many times): count before unpacking, as ``arrays.py`` does.

    Raises:
        FileError: not such a file, or too large.
    """
    try:
        with open_archive(path) as archive:
            structure = [entry.file_size for entry in archive.infolist() if entry.filename.endswith("data.pkl")]
    except FileError:
        raise
    except BROKEN as error:
        raise _not_torch(error) from None
    if sum(structure) > MOST_STRUCTURE_BYTES:
        raise FormatError(f"a torch file with more than {MOST_STRUCTURE_BYTES // MIB} MiB beside its tensors")
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a refusal is one line
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, KeyError, ... for bad files
        raise _not_torch(error) from None
    if not isinstance(content, dict):
        raise FormatError(f"holds a {type(content).__name__}; a dump holds a dict")
    return content


def _not_torch(error: BaseException) -> FormatError:
    return FormatError(f"not a torch file of tensors and plain values ({first_line(error)})")
