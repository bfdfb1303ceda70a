"""``torch.save`` files of tensors and plain values, opened with ``weights_only``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import FormatError, first_line


def read(path: Path) -> dict[str, Any]:
    """The file's content, which must be a dict; refuses every object that is no tensor and no plain value.

    Raises:
        FormatError: not such a file.
    """
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, KeyError, ... for bad files
        raise FormatError(f"not a torch file of tensors and plain values ({first_line(error)})") from None
    if not isinstance(content, dict):
        raise FormatError(f"holds a {type(content).__name__}; a dump holds a dict")
    return content
