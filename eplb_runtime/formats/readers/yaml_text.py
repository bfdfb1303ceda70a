"""YAML, for which PyYAML must be installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import FormatError, first_line


def read(path: Path) -> Any:
    """A YAML file's content, plain values only.

    Raises:
        FormatError: not YAML, or PyYAML is missing.
    """
    try:
        import yaml
    except ImportError:
        raise FormatError("reading YAML needs PyYAML: pip install 'eplb-runtime[convert]'") from None
    try:
        return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FormatError(f"not YAML ({first_line(error)})") from None
