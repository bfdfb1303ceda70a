"""Read a trace event by event, however long it is: JSON in the Trace Event Format, as torch.profiler writes it, plain
or gzipped. Nothing is kept but what the caller keeps, and whatever a file holds ends in events or in one `TraceError`.
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ...utils.files import MIB, FileError, require_readable

MOST_BYTES = 64 * 1024 * MIB
"""Of a file, and of what it unpacks to."""
LONGEST_VALUE = 16 * MIB
"""Characters of one event, or of one other value of a trace."""
_CHUNK = 4 * MIB
_MOST_US = 2.0**62
_SPACE = " \t\r\n"
_COMMA = re.compile(r"[ \t\r\n]*,[ \t\r\n]*")
_DECODER = json.JSONDecoder()

OnProgress = Callable[[int], None]
"""Called with the bytes of the file that were read since the last call."""


class TraceError(FileError):
    """A file that is no trace, or none that can be used; one line that says why."""


def read_events(
    path: Path, head: dict[str, Any] | None = None, on_progress: OnProgress = lambda count: None
) -> Iterator[dict[str, Any]]:
    """The events of a trace, in the order of the file.

    Args:
        path: ``{"traceEvents": [...], ...}`` or a plain list of events; gzipped if its first bytes say so.
        head: takes up what else the object holds, which may come before the events or after them.

    Raises:
        TraceError: it is not such a file, is broken off, or is larger than `MOST_BYTES`.
        OSError: it cannot be read.
    """
    try:
        require_readable(path, MOST_BYTES)
    except TraceError:
        raise
    except FileError as error:
        raise TraceError(f"{path}: {error}") from None
    with open(path, "rb") as file:
        text = _Text(path, file, on_progress)
        try:
            yield from _events(text, {} if head is None else head)
        except RecursionError:
            raise TraceError(f"{path}: values inside values, too deep for a trace") from None
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise TraceError(f"{path}: the gzipped file is broken off or damaged: write it anew") from None
        except UnicodeDecodeError:
            raise TraceError(
                f"{path}: not text: give a trace as torch.profiler exports it (.json or .json.gz)"
            ) from None


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
        if text.peek() == ",":
            text.expect(",")
        elif text.peek() != "}":
            raise text.broken()
    if not found:
        raise TraceError(f'{text.path}: it has no "traceEvents": give a trace as torch.profiler exports it')


def _list(text: _Text) -> Iterator[dict[str, Any]]:
    text.expect("[")
    while text.peek() != "]":
        yield from text.whole_objects()
        event = text.value()
        if not isinstance(event, dict):
            raise TraceError(f"{text.path}: an event is {_short(event)}, not an object")
        yield event
        if text.peek() == ",":
            text.expect(",")
        elif text.peek() != "]":
            raise text.broken()
    text.expect("]")


class _Text:
    """A file's text, a piece at a time."""

    def __init__(self, path: Path, file: BinaryIO, on_progress: OnProgress) -> None:
        self.path = path
        self._raw = file
        self._file: Any = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file  # type: ignore[attr-defined]
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._on_progress = on_progress
        self._reported = 0
        self._unpacked = 0
        self._buffer = ""
        self._at = 0
        self._ended = False

    def peek(self) -> str:
        """The next character that is not white space."""
        while True:
            while self._at < len(self._buffer):
                character = self._buffer[self._at]
                if character not in _SPACE:
                    return character
                self._at += 1
            if not self._more():
                raise TraceError(f"{self.path}: the trace is broken off at its end: write it anew")

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise self.broken()
        self._at += 1

    def value(self) -> Any:
        """The JSON value that begins here."""
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

    def whole_objects(self) -> Iterator[dict[str, Any]]:
        """The objects of a list that begin here, one after the other, as far as this piece goes and all is as usual.

        What it stops at is left to the slower way, which reads on and says what is wrong. Empty where it is not at an
        object.
        """
        buffer, at = self._buffer, self._at
        while buffer.startswith("{", at):
            try:
                value, end = _DECODER.raw_decode(buffer, at)
            except ValueError:  # broken off here, or broken
                return
            comma = _COMMA.match(buffer, end)
            if comma is None or comma.end() == len(buffer):
                return
            self._at = at = comma.end()
            yield value

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
        here = self._raw.tell()
        self._on_progress(here - self._reported)
        self._reported = here
        return True


# -- what stands in an event -----------------------------------------------------------------------------------------


def number(path: Path, event: dict[str, Any], key: str) -> float:
    """A time of an event, in microseconds.

    Raises:
        TraceError: it is missing or no finite number.
    """
    value = event.get(key)
    if type(value) is float and -_MOST_US < value < _MOST_US:
        return value
    if isinstance(value, str):  # some writers quote them
        try:
            value = float(value)
        except ValueError:
            value = None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or abs(value) > _MOST_US
        or not math.isfinite(value)
    ):
        raise TraceError(
            f"{path}: an event's {key} is {_short(event.get(key, 'missing'))}, not a number of microseconds"
        )
    return float(value)


def duration_of(path: Path, event: dict[str, Any]) -> float:
    """Return the duration of an event in microseconds.

    Raises:
        TraceError: it is negative or no finite number.
    """
    duration = number(path, event, "dur") if "dur" in event else 0.0
    if duration < 0:
        raise TraceError(f"{path}: an event lasts {duration:g} us: times run forwards")
    return duration


def name_of(event: dict[str, Any]) -> str:
    name = event.get("name")
    return name if isinstance(name, str) else ""


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
