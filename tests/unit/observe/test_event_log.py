"""The log of events survives what befalls a run, and reads back as it was heard."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed import LAYERS, RANKS, decisions, job, records, start, troubles

from eplb_runtime.events import EventLog, LoadMeasured, RebalanceCommitted
from eplb_runtime.observe import start as observer_module
from eplb_runtime.observe.events_file import (
    NAME,
    EventWriter,
    files_aside,
    from_json,
    holds_events,
    read_events,
    to_json,
)
from eplb_runtime.observe.records import Record, RecordError
from eplb_runtime.observe.start import Observer
from eplb_runtime.planner.evaluate import predicted_imbalance
from eplb_runtime.utils.files import FileError


def written(run: Path, *found: Record, **limits: int) -> EventWriter:
    writer = EventWriter(run, job(), **limits)
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


def test_records_hold_what_listeners_need(tmp_path: Path) -> None:
    """Rank loads add up to the tokens, their imbalance is the measured one, and placements are the committed ones."""
    heard = [event for events in decisions(rounds=3) for event in events]
    found = records(with_troubles=False)[1:]
    for event, record in zip(heard, found, strict=True):
        if isinstance(event, LoadMeasured):
            assert np.array_equal(record["load"][0], event.load.sum(axis=0))
            assert np.allclose(record["rank_load"].sum(axis=2), event.load.sum(axis=(0, 2)), atol=4)
            loads = event.load.astype(np.float64)
            assert np.allclose(record["imbalance"], predicted_imbalance(loads, event.placements[0][1]), atol=1e-6)
            assert np.allclose(record["imbalance_start"], predicted_imbalance(loads, start()), atol=1e-6)
            unbalanced = record["rank_load"][1]
            assert np.array_equal(unbalanced, event.load.sum(axis=0).reshape(LAYERS, RANKS, -1).sum(axis=2))
        if isinstance(event, RebalanceCommitted):
            assert np.array_equal(record["placement"][0], event.placement.physical_to_logical)
            moved = record["transfers"][0]
            assert (moved[:, 2] != moved[:, 3]).sum() == event.moved_experts > 0


def test_a_start_of_the_job_and_a_large_file_begin_another_one(tmp_path: Path) -> None:
    heard = records()[1:]
    written(tmp_path, *heard).close()
    written(tmp_path, *heard, file_bytes=2000).close()
    assert len(files_aside(tmp_path)) > 3
    told = [record for record in read_events(tmp_path) if record["event"] != "JobAttached"]
    assert names(told) == 2 * names(heard)


def test_every_file_says_where_experts_stand(tmp_path: Path) -> None:
    written(tmp_path, *records()[1:], file_bytes=1).close()
    stands = start().physical_to_logical
    for path in [*files_aside(tmp_path), tmp_path / NAME]:
        lines = [from_json(json.loads(line)) for line in path.read_text().splitlines()]
        assert lines[0]["event"] == "JobAttached" and np.array_equal(lines[0]["placement"][0], stands)
        for record in lines[1:]:
            stands = record["placement"][0] if "placement" in record else stands


def test_the_oldest_files_go(tmp_path: Path) -> None:
    for _ in range(9):
        written(tmp_path, *records()[1:3], most_files=4).close()
    assert [path.name for path in files_aside(tmp_path)] == [f"events-{n:06}.jsonl" for n in (5, 6, 7, 8)]


@given(cut=st.integers(1, 3000))
def test_a_crash_costs_the_last_line_at_most(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path_factory.mktemp("run")
    written(run, *records()[1:]).close()
    whole = (run / NAME).read_bytes()
    (run / NAME).write_bytes(whole[:-cut])
    lines = whole[:-cut].count(b"\n")
    assert len(read_events(run)) == lines
    written(run).close()
    assert names(read_events(run))[-1] == "JobAttached" and len(read_events(run)) == lines + 1


def test_lines_of_others_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, *records()[1:3]).close()
    with open(tmp_path / NAME, "ab") as file:
        file.write(b'nonsense\n\n[1]\n{"event": "LoadMeasured"}\n' + b"[" * 5000 + b"\n\xff\xfe\n")
        file.write(b'{"event": "LoadMeasured", "time": 1, "step": 2, "load": {"shape": [1, 9e9, 9], "data": ""}}\n')
    assert len(read_events(tmp_path)) == 3


def test_a_log_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no folder of a run"):
        read_events(tmp_path)
    assert not holds_events(tmp_path)
    (tmp_path / NAME).write_text('{"event": "JobAttached", "format": "eplb-runtime-events", "version": 2}\n')
    with pytest.raises(FileError, match="version 2"):
        read_events(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
near_misses = st.fixed_dictionaries(
    {"event": st.sampled_from(["LoadMeasured", "JobAttached"]), "time": st.integers(), "step": st.integers()},
    optional={"load": json_values | st.fixed_dictionaries({"shape": json_values, "data": json_values})},
)


@given(value=json_values | near_misses)
def test_what_is_no_record_raises_nothing_else(value: object) -> None:
    with contextlib.suppress(RecordError):
        from_json(value)


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


def test_a_disk_that_stays_full_costs_nothing_that_was_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try that sets a file aside would push an older one out."""
    heard, real = records()[1:5], os.write
    written(tmp_path, *heard[:2]).close()
    writer = written(tmp_path, heard[2], most_files=3, file_bytes=1)

    def write(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    for _ in range(9):
        with pytest.raises(OSError, match="No space"):
            writer.write(heard[3])
    monkeypatch.setattr(os, "write", real)
    writer.write(heard[3])
    writer.close()
    assert names([record for record in read_events(tmp_path) if record["event"] != "JobAttached"]) == names(heard)


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


def test_a_line_beyond_all_bounds_hides_none_that_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_runtime.observe.events_file.MOST_LINE_BYTES", 1 << 14)
    heard = records()[1:3]
    writer = written(tmp_path, heard[0])
    with open(tmp_path / NAME, "ab") as file:
        file.write(b"x" * 40_000 + b"\n")
    writer.write(heard[1])
    writer.close()
    assert names(read_events(tmp_path)) == ["JobAttached", *names(heard)]


def test_who_shows_a_job_never_holds_it_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that hangs costs events, one that fails is told of once, and the others get all."""
    monkeypatch.setattr(observer_module, "MOST_WAITING", 4)
    observer, log, go_on = Observer(start()), EventLog(), threading.Event()
    got: list[Record] = []

    def fails(record: Record) -> None:
        raise OSError("no room")

    def hangs(record: Record) -> None:
        begun.set()
        go_on.wait(30)

    begun = threading.Event()
    observer.add("the one that fails", fails, close=lambda: fails({}))
    observer.add("the one that hangs", hangs)
    observer.add("the one that works", got.append)
    log.subscribe(observer.hear)
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


def test_the_log_of_a_job_keeps_no_arrays() -> None:
    log, heard = EventLog(), []
    log.subscribe(heard.append)
    for events in decisions(rounds=1):
        for event in events:
            log.emit(event)
    for kept, event in zip(log, heard, strict=True):
        assert kept == event and "for_listeners" not in str(kept.to_dict())
    assert heard[0].load is not None and log.of_type(LoadMeasured)[0].load is None
    assert heard[-1].placement is not None and log.of_type(RebalanceCommitted)[0].placement is None
