"""A file or folder as its reader found it, before any engine is asked whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from errno import ENOENT
from os import strerror
from pathlib import Path
from typing import Any

from .errors import FormatError
from .readers import SafetensorsArrays, read_json, read_npz, read_pt, read_yaml

KINDS = {
    ".npz": "npz",
    ".safetensors": "safetensors",
    ".json": "json",
    ".pt": "pt",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".jsonl": "jsonl",
}
"""The kind of a file by its ending."""


@dataclass(frozen=True)
class Content:
    """What stands in a file.

    Args:
        path: the file or folder.
        kind: a value of ``KINDS``, or ``"directory"``.
        value: what the reader found: for ``npz`` and ``safetensors`` arrays by name, each read when it is asked for,
            for a directory and for lines of JSON nothing.
        metadata: the texts in a safetensors file's header.
    """

    path: Path
    kind: str
    value: Any = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def holds(self, *names: str) -> bool:
        """Whether it is a mapping with all these names."""
        return isinstance(self.value, Mapping) and all(name in self.value for name in names)


def open_content(path: Path) -> Content:
    """Read a file, or note that it is a directory.

    Raises:
        FileError: an unknown ending, not what the ending says, or too large to be read.
        OSError: it cannot be read.
    """
    if path.is_dir():
        return Content(path, "directory")
    if not path.exists():
        raise FileNotFoundError(ENOENT, strerror(ENOENT), str(path))
    kind = KINDS.get(path.suffix)
    if kind is None:
        raise FormatError(f"cannot tell what kind of file this is by its ending; give {', '.join(KINDS)}")
    if kind == "jsonl":
        return Content(path, kind)
    if kind == "safetensors":
        arrays = SafetensorsArrays(path)
        return Content(path, kind, arrays, arrays.metadata)
    return Content(path, kind, {"npz": read_npz, "json": read_json, "pt": read_pt, "yaml": read_yaml}[kind](path))
