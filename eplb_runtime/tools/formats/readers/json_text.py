"""JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....utils.files import MIB, require_readable
from ..errors import FormatError, first_line

MOST_BYTES = 128 * MIB
"""Read up to this; its objects take some twenty times that at worst."""


def read(path: Path) -> Any:
    """A JSON file's content.

    Raises:
        FileError: not JSON, or too large.
    """
    require_readable(path, MOST_BYTES)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON ({first_line(error)})") from None
