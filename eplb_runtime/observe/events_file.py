"""The events of a run on disk: ``events.jsonl`` in its folder, one JSON object a line, of which a crash costs the last.

A start of the job, and a file that has grown large, sets the file before aside under a number
(``events-000001.jsonl``); the oldest go when there are too many. Every file begins with the job's record and where its
experts stand by then, so each can be read alone. Records are made in `records.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..load.series import decode, encode
from ..utils.files import FileError
from .records import FORMAT, JOB, Record, RecordError

NAME = "events.jsonl"
FILE_BYTES = 16 << 20
"""A file that has grown beyond is set aside."""
MOST_FILES = 64
"""Beside the one that is written; the oldest is removed."""
MOST_LINE_BYTES = 64 << 20
"""A longer line is no event of ours."""
ARRAYS = ("load", "rank_load", "start", "placement", "transfers")
"""Fields that are int64 arrays with three axes: ``[1, L, E]`` tokens; ``[2, L, R]`` tokens, measured and with the
initial placement; ``[1, L, P]`` experts, -1: none, twice; ``[1, M, 4]`` layer, expert, source and destination rank."""
MOST_ELEMENTS = 1 << 26
"""Of an array that is read back: more than any job has."""


class EventWriter:
    """Appends to the log of a run. Where another process begins to write to the same folder, the older one stops: two
    jobs would read as one.

    Args:
        run: folder of the run; made if it is not there.
        job: the record that every file begins with.
        file_bytes, most_files: when a file is set aside, and how many are kept.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, run: Path, job: Record, *, file_bytes: int = FILE_BYTES, most_files: int = MOST_FILES) -> None:
        self._run = run
        self._job = dict(job)
        self._descriptor = -1
        self._written = 0
        self._followed = False
        self._file_bytes, self._most_files = file_bytes, most_files
        run.mkdir(parents=True, exist_ok=True)
        self._next()

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a record; it is with the operating system when this returns, whatever becomes of the process.

        Raises:
            OSError: it cannot be written (a full disk); what is half written is taken back.
            FileError: another process has begun to write to this folder.
        """
        self._require_ours()
        if self._descriptor < 0 or self._written > self._file_bytes:
            self._next()
        self._append(record)
        if "placement" in record:
            self._job.update(placement=record["placement"], epoch=record["epoch"])

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _next(self) -> None:
        self.close()
        path = self._run / NAME
        aside = files_aside(self._run)
        if path.exists():
            number = int(aside[-1].stem.rpartition("-")[2]) + 1 if aside else 1
            aside.append(self._run / f"events-{number:06}.jsonl")
            path.rename(aside[-1])
        for old in aside[: max(0, len(aside) - self._most_files)]:
            old.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._written = 0
        try:
            self._append(self._job)
        except OSError:  # setting files without a record aside, again and again, would push out those that have some
            self.close()
            path.unlink(missing_ok=True)
            raise

    def _append(self, record: Mapping[str, Any]) -> None:
        data = memoryview(json.dumps(to_json(record)).encode() + b"\n")
        whole = self._written
        try:
            while data:
                written = os.write(self._descriptor, data)
                self._written += written
                data = data[written:]
        except OSError:
            try:
                os.ftruncate(self._descriptor, whole)  # perhaps half a line
                self._written = whole
            except OSError:
                self.close()  # the next record begins a new file
            raise

    def _require_ours(self) -> None:
        """Raises `FileError` from when another process has set our file aside."""
        if self._descriptor >= 0 and not self._followed:
            try:
                newest = os.stat(self._run / NAME).st_ino
            except FileNotFoundError:
                return  # somebody tidies up
            self._followed = newest != os.fstat(self._descriptor).st_ino
        if self._followed:
            raise FileError(f"another job writes to {self._run} now: events of this one are not written any more")


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
    seen: set[int] = set()
    for path in [*files_aside(run), run / NAME]:
        with suppress(FileNotFoundError), open(path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode in seen:
                continue  # set aside while we were reading
            seen.add(inode)
            while (line := _next_line(file)) is not None:
                try:
                    fields = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(fields, dict) and fields.get("event") == JOB:
                    kind, version = fields.get("format"), fields.get("version")
                    if (kind, version) != (FORMAT, 1):
                        raise FileError(f"events of format {kind!r}, version {version!r}: not ours, or newer")
                with suppress(RecordError):
                    found.append(from_json(fields))
    return found


def _next_line(file: BinaryIO) -> bytes | None:
    """Return the next whole line, empty where it is longer than any of ours; None: there is none yet."""
    line = part = file.readline(MOST_LINE_BYTES)
    while len(part) == MOST_LINE_BYTES and not part.endswith(b"\n"):
        line, part = b"", file.readline(MOST_LINE_BYTES)
    return line if part.endswith(b"\n") else None


def holds_events(run: Path) -> bool:
    """Return whether a job has written its events to this folder."""
    return (run / NAME).is_file() or bool(files_aside(run))


def files_aside(run: Path) -> list[Path]:
    """Return the files before the one that is written, oldest first."""
    numbers = {path: path.stem.removeprefix("events-") for path in run.glob("events-*.jsonl")}
    return sorted((path for path, number in numbers.items() if number.isdigit()), key=lambda path: int(numbers[path]))


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
        if min(count, rows, columns) < 0 or count * rows * columns > MOST_ELEMENTS:
            raise ValueError(f"shape {saved['shape']}")
        return decode(saved, rows, columns, count)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{name} cannot be read: {error}") from None
