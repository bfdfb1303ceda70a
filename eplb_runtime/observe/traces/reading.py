"""Read a trace: JSON in the Trace Event Format, as torch.profiler writes it, plain or gzipped. Whatever a file holds
ends in spans or in one `TraceError`.
"""

from __future__ import annotations

import gzip
import json
import re
import reprlib
import zlib
from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from ...utils.files import MIB, FileError, require_readable
from ...utils.text import one_line

MOST_BYTES = 64 * 1024 * MIB
_MOST_US = 2.0**62

Place = tuple[str, str]
"""Process and thread; of a GPU, device and stream."""


class TraceError(FileError):
    """A file that is no trace, or none that can be used; one line that says why."""


class Span(NamedTuple):
    """A span of a thread or a stream. Times are microseconds since the first event of the file."""

    name: str
    category: Any
    place: Place
    begin: float
    end: float
    link: Any  # what ties a kernel to its launch; None: nothing


class Trace(NamedTuple):
    """Spans of a trace in the order of the file, and the rank that it names; None: none."""

    spans: list[Span]
    rank: int | None


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


def read_trace(path: Path) -> Trace:
    """Read ``{"traceEvents": [...], ...}`` or a plain list of events, gzipped if its first bytes say so.

    Raises:
        TraceError: it is not such a file, is broken off, or an event in it makes no sense.
        OSError: it cannot be read.
    """
    events, head = _events(path)
    info = head.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    found = Trace([], rank if type(rank) is int and 0 <= rank < 2**20 else None)
    origin = None
    for event in events:
        if not isinstance(event, dict):
            raise TraceError(f"{path}: an event is a {type(event).__name__}, not an object")
        place = str(event.get("pid", ""))[:80], str(event.get("tid", ""))[:80]
        name, arguments = event.get("name"), event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        if event.get("ph") == "X":
            begin, duration = _microseconds(path, event, "ts", "missing"), _microseconds(path, event, "dur", 0.0)
            if duration < 0:
                raise TraceError(f"{path}: an event lasts {duration:g} us: times run forwards")
            begin -= (origin := begin if origin is None else origin)
            link = arguments.get("correlation")
            link = link if isinstance(link, int) else None
            plain = name if isinstance(name, str) else ""
            found.spans.append(Span(plain, event.get("cat"), place, begin, begin + duration, link))
    return found


def _events(path: Path) -> tuple[list[Any], Mapping[str, Any]]:
    """Return the events of a trace, and what else it holds."""
    try:
        require_readable(path, MOST_BYTES)
        content = path.read_bytes()
        trace = json.loads(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
    except FileError as error:
        raise TraceError(f"{path}: {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TraceError(f"{path}: the gzipped file is broken off or damaged: write it again") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not a JSON trace, or one that is broken off: {one_line(error)}") from None
    head = trace if isinstance(trace, dict) else {"traceEvents": trace}
    if not isinstance(events := head.get("traceEvents"), list):
        raise TraceError(f'{path}: it has no "traceEvents": give a trace as torch.profiler exports it')
    return events, head


def _microseconds(path: Path, event: Mapping[str, Any], key: str, default: Any) -> float:
    value = event.get(key, default)
    try:
        number = float(value)  # some writers quote them
    except (TypeError, ValueError, OverflowError):
        number = nan
    if not abs(number) < _MOST_US:
        raise TraceError(f"{path}: an event's {key} is {reprlib.repr(value)}, not a number of microseconds")
    return number
