"""Read a trace event by event, however long it is: JSON in the Trace Event Format, as torch.profiler writes it, plain
or gzipped. Nothing is kept but what the caller keeps, and whatever a file holds ends in events or in one `TraceError`.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ...utils.files import MIB, FileError, require_readable

MOST_BYTES = 64 * 1024 * MIB
"""Of a file, and of what it unpacks to."""
LONGEST_VALUE = 16 * MIB
"""Characters of one event, or of one other value of a trace."""
_CHUNK = 4 * MIB
_MOST_US = 2.0**62
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


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


def read_events(path: Path, head: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace, in the order of the file.

    Args:
        path: ``{"traceEvents": [...], ...}`` or a plain list of events; gzipped if its first bytes say so.
        head: takes up what else the object holds, which may come before the events or after them.

    Raises:
        TraceError: it is not such a file, is broken off, or is larger than `MOST_BYTES`.
        OSError: it cannot be read.
    """
    try:
        require_readable(path, MOST_BYTES)
    except FileError as error:
        raise TraceError(f"{path}: {error}") from None
    with open(path, "rb") as file:
        text = _Text(path, file)
        try:
            yield from _events(text, {} if head is None else head)
        except RecursionError:
            raise TraceError(f"{path}: values inside values, too deep for a trace") from None
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise TraceError(f"{path}: the gzipped file is broken off or damaged: write it anew") from None
        except UnicodeDecodeError:
            raise TraceError(f"{path}: not text: give what torch.profiler exports (.json, .json.gz)") from None


def _events(text: _Text, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if text.peek() == "[":
        yield from _list(text)
        return
    text.expect("{")
    found = False
    while text.peek() != "}":
        key = text.value()
        text.expect(":")
        if key == "traceEvents":
            found = True
            yield from _list(text)
        elif isinstance(key, str):
            head[key] = text.value()
        else:
            raise text.broken()
        text.next_item("}")
    if not found:
        raise TraceError(f'{text.path}: it has no "traceEvents": give a trace as torch.profiler exports it')


def _list(text: _Text) -> Iterator[dict[str, Any]]:
    text.expect("[")
    while text.peek() != "]":
        event = text.value()
        if not isinstance(event, dict):
            raise TraceError(f"{text.path}: an event is {_short(event)}, not an object")
        yield event
        text.next_item("]")
    text.expect("]")


class _Text:
    """A file's text, a piece at a time."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file: Any = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file  # type: ignore[attr-defined]
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._unpacked = self._at = 0
        self._buffer = ""
        self._ended = False

    def peek(self) -> str:
        """Return the next character that is not white space."""
        while True:
            space = _SPACE.match(self._buffer, self._at)
            self._at = space.end() if space is not None else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                raise TraceError(f"{self.path}: the trace is broken off at its end: write it again")

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise self.broken()
        self._at += 1

    def next_item(self, end: str) -> None:
        """Go on to the next item of a list or object, or to its end."""
        if self.peek() != end:
            self.expect(",")

    def value(self) -> Any:
        """Return the JSON value that begins here."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError:
                end = -1
            except ValueError:  # a whole number of more digits than Python reads
                raise self.broken() from None
            # A number at the very end may go on in the next piece.
            if 0 <= end < len(self._buffer) or (end >= 0 and self._ended):
                self._at = end
                return value
            if len(self._buffer) - self._at > LONGEST_VALUE or not self._more():
                raise self.broken()

    def broken(self) -> TraceError:
        around = self._buffer[self._at : self._at + 30]
        return TraceError(f"{self.path}: not a JSON trace, or one that is broken off, at {_short(around)}")

    def _more(self) -> bool:
        """Read on; False at the end."""
        if self._ended:
            return False
        chunk = self._file.read(_CHUNK)
        self._unpacked += len(chunk)
        if self._unpacked > MOST_BYTES:
            raise TraceError(f"{self.path}: it unpacks to more than {MOST_BYTES // MIB:,} MiB")
        self._ended = not chunk
        self._buffer = self._buffer[self._at :] + self._decoder.decode(chunk, final=self._ended)
        self._at = 0
        return True


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


def rank_of(head: dict[str, Any]) -> int | None:
    """Return the rank that a trace names; None: it names none."""
    info = head.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**20 else None


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
