"""Files that only grow, of which a crash costs the last line; and the events of a run, ``events.jsonl`` in its folder.

Each start of the job begins with its record and where its experts are by then. Records are made in `records.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load.series import decode, encode, lines_of
from ..utils.files import FileError
from .records import FORMAT, JOB, Record, RecordError

NAME = "events.jsonl"
ARRAYS = ("load", "rank_load", "start", "placement", "transfers")
"""Fields that are int64 arrays with three axes: ``[1, L, E]`` tokens; ``[2, L, R]`` tokens, measured and with the
initial placement; ``[1, L, P]`` experts, -1: none, twice; ``[1, M, 4]`` layer, expert, source and destination rank."""


class LineFile:
    """A file of JSON objects, one a line. Where another process begins to write to it, the older one stops: two jobs
    would read as one.

    Args:
        path: the file; made with its folder if it is not there.
        first: the line of this start of the job.

    Raises:
        OSError: it cannot be written to.
    """

    def __init__(self, path: Path, first: Mapping[str, Any]) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._size = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            if self._size and os.pread(self._descriptor, 1, self._size - 1) != b"\n":
                self._append(b"\n")  # after half a line that a crash has left
            self.write(first)
        except OSError:
            self.close()
            raise

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line, arrays in it as `to_json` has them; it is with the operating system when this returns, whatever
        becomes of the process.

        Raises:
            OSError: it cannot be written (a full disk); what is half written is taken back.
            FileError: another process has begun to write to this file.
        """
        if os.fstat(self._descriptor).st_size != self._size:
            raise FileError(f"another job writes to {self._path} now")
        self._append(json.dumps(to_json(line)).encode() + b"\n")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: bytes) -> None:
        data = memoryview(line)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # perhaps half a line
            raise
        self._size += len(line)


def read_events(run: Path) -> list[Record]:
    """Return all records of a run that are left, oldest first, also while it is written.

    Lines that a crash cut off or that are no record of ours are left out.

    Raises:
        FileError: there is no log, or one of another kind or a later version.
        OSError: it cannot be read.
    """
    if not holds_events(run):
        raise FileError(f"{run} is no folder of a run: it has no {NAME} (BalancerConfig(run=...) writes one)")
    found: list[Record] = []
    for _, fields in lines_of(run / NAME):
        if isinstance(fields, dict) and fields.get("event") == JOB:
            kind, version = fields.get("format"), fields.get("version")
            if (kind, version) != (FORMAT, 1):
                raise FileError(f"events of format {kind!r}, version {version!r}: not ours, or newer")
        with suppress(RecordError):
            found.append(from_json(fields))
    return found


def holds_events(run: Path) -> bool:
    """Return whether a job has written its events to this folder."""
    return (run / NAME).exists()


def to_json(record: Mapping[str, Any]) -> Record:
    """Return a record without arrays in it, as a line of the log holds it."""
    return {name: encode(value, level=1) if isinstance(value, np.ndarray) else value for name, value in record.items()}


def from_json(line: Any) -> Record:
    """Return what `to_json` made.

    Raises:
        RecordError: it is something else.
    """
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        raise RecordError("not an event")
    for name in ("time", "step"):
        if isinstance(line.get(name), bool) or not isinstance(line.get(name), int | float):
            raise RecordError(f"an event without its {name}")
    return {name: _array(name, value) if name in ARRAYS else value for name, value in line.items()}


def _array(name: str, saved: Any) -> NDArray[np.int64]:
    try:
        count, rows, columns = (int(length) for length in saved["shape"])
        return decode(saved, rows, columns, count)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{name} cannot be read: {error}") from None
