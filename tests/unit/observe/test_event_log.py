"""The log of events survives what befalls a run, and reads back as it was heard."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed import CONFIG, RANKS, TOPOLOGY, job, records, start, troubles

from eplb_runtime.events import EventLog
from eplb_runtime.load.clock import Progress
from eplb_runtime.observe import start as observer_module
from eplb_runtime.observe.events_file import NAME, LineFile, holds_events, read_events, to_json
from eplb_runtime.observe.records import Record
from eplb_runtime.observe.start import Shown
from eplb_runtime.utils.files import FileError


def written(run: Path, *found: Record) -> LineFile:
    writer = LineFile(run / NAME, job())
    for record in found:
        writer.write(record)
    return writer


def same(first: Record, second: Record) -> bool:
    """After a way through JSON, where tuples are lists."""
    return json.dumps(to_json(first)) == json.dumps(to_json(second))


def names(found: list[Record]) -> list[str]:
    return [record["event"] for record in found]


def test_what_is_heard_is_read_back(tmp_path: Path) -> None:
    heard = records()
    written(tmp_path, *heard[1:]).close()
    found = read_events(tmp_path)
    assert names(found) == names(heard) and len(heard) > 8
    assert all(same(*pair) for pair in zip(found[1:], heard[1:], strict=True))
    assert not same(found[1], heard[2])


@given(cut=st.integers(1, 3000))
def test_a_crash_costs_the_last_line_at_most(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path_factory.mktemp("run")
    written(run, *records()[1:]).close()
    whole = (run / NAME).read_bytes()
    (run / NAME).write_bytes(whole[:-cut])
    lines = whole[:-cut].count(b"\n")
    lines += whole[-cut:].startswith(b"\n")  # of a line that lacks its end alone nothing is lost
    assert len(read_events(run)) == lines
    written(run).close()
    assert names(read_events(run))[-1] == "JobAttached" and len(read_events(run)) == lines + 1


def test_a_log_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no folder of a run"):
        read_events(tmp_path)
    assert not holds_events(tmp_path)
    (tmp_path / NAME).write_text('{"event": "JobAttached", "format": "eplb-runtime-events", "version": 2}\n')
    with pytest.raises(FileError, match="version 2"):
        read_events(tmp_path)


def test_a_full_disk_costs_events_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that was half written is no danger for those that come when there is room again."""
    heard, real = records()[1:5], os.write
    writer = written(tmp_path, heard[0])
    room = [10]

    def write(descriptor: int, data: memoryview) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= len(data)
        return real(descriptor, data[:10])

    monkeypatch.setattr(os, "write", write)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            writer.write(heard[1])
    monkeypatch.setattr(os, "write", real)
    writer.write(heard[2])
    writer.close()
    told = [record for record in read_events(tmp_path) if record["event"] != "JobAttached"]
    assert names(told) == names([heard[0], heard[2]])


def test_of_two_jobs_in_one_folder_the_older_stops(tmp_path: Path) -> None:
    first, heard = written(tmp_path, records()[1]), records()[2]
    second = written(tmp_path, heard)
    for _ in range(2):
        with pytest.raises(FileError, match="another job writes to"):
            first.write(heard)
    second.write(heard)
    first.close()
    second.close()
    assert names(read_events(tmp_path)) == ["JobAttached", records()[1]["event"], "JobAttached", *[heard["event"]] * 2]


def test_who_shows_a_job_never_holds_it_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that hangs costs events, one that fails is told of once, and the others get all."""
    monkeypatch.setattr(observer_module, "MOST_WAITING", 4)
    observer = Shown(CONFIG, TOPOLOGY, start(), RANKS, lambda: Progress(17, 0.25, 1.0))
    log, go_on = EventLog(), threading.Event()
    got: list[Record] = []

    def fails(record: Record) -> None:
        raise OSError("no room")

    def hangs(record: Record) -> None:
        begun.set()
        go_on.wait(30)

    begun = threading.Event()
    observer.sinks |= {"the one that fails": fails, "the one that hangs": hangs, "the one that works": got.append}
    log.called_at_once.append(observer.hear)
    log.emit(troubles(1)[0])
    assert begun.wait(30)
    for step in range(10):
        log.emit(troubles(step)[1])
    assert observer.left_out > 0 and not go_on.is_set()
    go_on.set()
    observer.close()
    assert len(got) + observer.left_out == 11
    assert caplog.text.count("the one that fails") == 1
    log.emit(troubles(1)[0])  # after the end nobody hears
