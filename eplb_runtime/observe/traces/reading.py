"""Read a trace: JSON in the Trace Event Format, as torch.profiler writes it, plain or gzipped. Whatever a file holds
ends in events or in one `TraceError`.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...utils.errors import one_line
from ...utils.files import MIB, FileError, require_readable

MOST_BYTES = 64 * 1024 * MIB
_MOST_US = 2.0**62


class TraceError(FileError):
    """A file that is no trace, or none that can be used; one line that says why."""


def traces_in(path: Path) -> list[Path]:
    """Return a file, or the traces in a folder in the order of their names, numbers by their value.

    Raises:
        TraceError: a folder without traces.
        OSError: there is no such file or folder.
    """
    path.stat()
    if not path.is_dir():
        return [path]
    found = [entry for entry in path.iterdir() if entry.name.endswith((".json", ".json.gz")) and entry.is_file()]
    if not found:
        raise TraceError(f"{path}: no traces in this folder (*.json, *.json.gz)")
    return sorted(found, key=lambda entry: [(len(part), part) for part in re.findall(r"\d+|\D+", entry.name)])


def read_trace(path: Path) -> tuple[list[Any], Mapping[str, Any]]:
    """Return the events of a trace, in the order of the file, and what else it holds.

    Args:
        path: ``{"traceEvents": [...], ...}`` or a plain list of events; gzipped if its first bytes say so.

    Raises:
        TraceError: it is not such a file, or is broken off.
        OSError: it cannot be read.
    """
    try:
        require_readable(path, MOST_BYTES)
        content = path.read_bytes()
        trace = json.loads(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
    except FileError as error:
        raise TraceError(f"{path}: {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TraceError(f"{path}: the gzipped file is broken off or damaged: write it anew") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not a JSON trace, or one that is broken off: {one_line(error)}") from None
    head = trace if isinstance(trace, dict) else {"traceEvents": trace}
    if not isinstance(events := head.get("traceEvents"), list):
        raise TraceError(f'{path}: it has no "traceEvents": give a trace as torch.profiler exports it')
    return events, head


# -- parts of an event -----------------------------------------------------------------------------------------------


def number(path: Path, event: dict[str, Any], key: str) -> float:
    """Return a time of an event, in microseconds, or raise `TraceError`: it is missing or no finite number."""
    value = event.get(key)
    if type(value) is float and -_MOST_US < value < _MOST_US:
        return value
    if isinstance(value, str):  # some writers quote them
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST_US:
        said = _short(event.get(key, "missing"))
        raise TraceError(f"{path}: an event's {key} is {said}, not a number of microseconds")
    return float(value)


def duration_of(path: Path, event: dict[str, Any]) -> float:
    """Return the duration of an event in microseconds, or raise `TraceError`: it is negative or no finite number."""
    duration = number(path, event, "dur") if "dur" in event else 0.0
    if duration < 0:
        raise TraceError(f"{path}: an event lasts {duration:g} us: times run forwards")
    return duration


def name_of(event: dict[str, Any]) -> str:
    name = event.get("name")
    return name if isinstance(name, str) else ""


def thread_name_of(event: dict[str, Any]) -> str:
    """Return the name that an event gives to its thread or stream; "": it gives none."""
    arguments = event.get("args")
    if event.get("ph") != "M" or event.get("name") != "thread_name" or not isinstance(arguments, dict):
        return ""
    name = arguments.get("name")
    return name.strip()[:200] if isinstance(name, str) else ""


def place_of(event: dict[str, Any]) -> tuple[str, str]:
    """Return process and thread of an event; of a GPU, device and stream."""
    return str(event.get("pid", ""))[:80], str(event.get("tid", ""))[:80]


def rank_of(head: Mapping[str, Any]) -> int | None:
    """Return the rank that a trace names; None: it names none."""
    info = head.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**20 else None


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
