"""JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import FormatError, first_line


def read(path: Path) -> Any:
    """A JSON file's content.

    Raises:
        FormatError: not JSON.
    """
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON ({first_line(error)})") from None
