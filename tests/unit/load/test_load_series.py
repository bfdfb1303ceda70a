"""A recorded series survives what befalls a run: crashes, restarts, other people's files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb_runtime.load.series import NAME, RecordedJob, read_series
from eplb_runtime.observe import recording as recorder_module
from eplb_runtime.observe.events_file import LineFile
from eplb_runtime.observe.recording import Recorder
from eplb_runtime.tools.formats.loads import read_load
from eplb_runtime.tools.formats.reading import FormatError
from eplb_runtime.utils.files import FileError

LAYERS, EXPERTS = 2, 3


def windows(first: int, count: int) -> NDArray[np.int64]:
    return first + np.arange(count * LAYERS * EXPERTS, dtype=np.int64).reshape(count, LAYERS, EXPERTS)


def written(run: Path, *parts: NDArray[np.int64], steps: int = 1) -> None:
    writer = Recorder(run, LAYERS, EXPERTS)
    for part in parts:
        writer.write(part, steps)
    writer.close()


def test_what_is_appended_is_read_in_its_order_over_restarts(tmp_path: Path) -> None:
    written(tmp_path, windows(0, 2), windows(100, 1), steps=5)
    written(tmp_path, windows(200, 3))
    load, steps, _ = read_series(tmp_path)
    assert np.array_equal(load, np.concatenate([windows(0, 2), windows(100, 1), windows(200, 3)]))
    assert steps == [5, 5, 5, 1, 1, 1]
    assert np.array_equal(read_load(tmp_path), load)


def test_a_bit_that_flips_is_noticed(tmp_path: Path) -> None:
    written(tmp_path, windows(0, 1), windows(100, 1))
    path = tmp_path / NAME
    lines = path.read_bytes().splitlines(keepends=True)
    line = json.loads(lines[1])
    line["data"] = line["data"][:20] + ("A" if line["data"][20] != "A" else "B") + line["data"][21:]
    path.write_bytes(lines[0] + json.dumps(line).encode() + b"\n" + lines[2])
    with pytest.raises(FormatError, match=r"load.jsonl, line 2: .*(cannot be read|another size)"):
        read_load(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"format": "something else"}', "line 1: no recorded load"),
        ('{"format": "eplb-runtime-load", "version": 1, "layers": 100000, "experts": 100000}', "no recorded load"),
        ("[" * 100_000, "no load has been recorded"),
        ("no JSON", "no load has been recorded"),
    ],
)
def test_other_files_are_refused_in_one_line(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(line[:4000] + "\n")
    with pytest.raises(FormatError, match=said):
        read_load(tmp_path)


def test_a_folder_of_an_earlier_release_says_how_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "load").mkdir()
    with pytest.raises(FormatError, match=r"awk 1 load/\*.jsonl > load.jsonl"):
        read_load(tmp_path)


def test_a_run_of_another_model_is_not_mixed_in(tmp_path: Path) -> None:
    written(tmp_path, windows(0, 1))
    with pytest.raises(FileError, match="holds the load of 2 layers of 3 experts, not 2 of 4; or name another folder"):
        Recorder(tmp_path, LAYERS, EXPERTS + 1)


def test_a_full_disk_ends_the_recording_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: LineFile, line: object) -> None:
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path, LAYERS, EXPERTS)
    monkeypatch.setattr(LineFile, "write", full)
    for number in range(5):
        recorder.write(windows(number, 1), 1)
    recorder.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: load is not recorded any more: [Errno 28] No space left on device"
    ]


def test_a_disk_that_hangs_makes_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import threading

    free = threading.Event()
    monkeypatch.setattr(recorder_module, "WRITING_SECONDS", 0.0)
    recorder = Recorder(tmp_path, LAYERS, EXPERTS)
    monkeypatch.setattr(LineFile, "write", lambda *_: free.wait())
    for number in range(recorder_module.MOST_WAITING + 3):
        recorder.write(windows(number, 1), 1)
    recorder.close()
    free.set()
    assert any("the disk is too slow" in record.getMessage() for record in caplog.records)


def test_what_is_known_of_the_job_grows_from_line_to_line(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, LAYERS, EXPERTS, RecordedJob(ranks=2, interval=5))
    for seconds, hidden_size in ((9.0, 0), (0.5, 64), (0.25, 64)):
        writer.write(windows(0, 1), 1, RecordedJob(step_seconds=seconds, hidden_size=hidden_size))
    writer.close()
    assert read_series(tmp_path)[2] == RecordedJob(ranks=2, interval=5, hidden_size=64, step_seconds=0.5)
    assert len(read_series(tmp_path)[0]) == 3


def test_the_newest_start_with_windows_says_what_the_job_is(tmp_path: Path) -> None:
    for ranks, count in ((2, 1), (4, 1), (8, 0)):
        writer = Recorder(tmp_path, LAYERS, EXPERTS, RecordedJob(ranks=ranks))
        if count:
            writer.write(windows(0, count), 1)
        writer.close()
    assert read_series(tmp_path)[2].ranks == 4
