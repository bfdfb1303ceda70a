"""The log of events survives what befalls a run, and reads back as it was heard."""

import errno
import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.observed import CONFIG, RANKS, TOPOLOGY, decisions, job, records, start, troubles

from eplb_runtime import events
from eplb_runtime.cli import main
from eplb_runtime.events import Event, EventLog, LoadMeasured, RebalancePlanned, Suspended, SuspensionEnded
from eplb_runtime.load.clock import Progress
from eplb_runtime.observe.events_file import NAME, LineFile, Record, read_events, record_of, to_json
from eplb_runtime.observe.metrics import scalars_of, summary_of, summary_text
from eplb_runtime.observe.page import report_of, view_of
from eplb_runtime.observe.run_state import state_of, state_of_run
from eplb_runtime.observe.start import Observers
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
    assert not (tmp_path / NAME).exists()
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
    monkeypatch.setattr(events, "MOST_WAITING", 4)
    observer = Observers(CONFIG, TOPOLOGY, start(), RANKS, lambda: Progress(17, 0.25, 1.0))
    log, go_on = EventLog(), threading.Event()
    got: list[Record] = []

    def fails(record: Record) -> None:
        raise OSError("no room")

    def hangs(record: Record) -> None:
        begun.set()
        go_on.wait(30)

    begun = threading.Event()
    observer.sinks |= {"the one that fails": fails, "the one that hangs": hangs, "the one that works": got.append}
    observer.listen_to(log)
    log.emit(troubles(1)[0])
    assert begun.wait(30)
    for step in range(10):
        log.emit(troubles(step)[1])
    assert log.left_out > 0 and not go_on.is_set()
    go_on.set()
    log.close()
    observer.close()
    assert len(got) + log.left_out == 11
    assert caplog.text.count("the one that fails") == 1
    log.emit(troubles(1)[0])  # after the end nobody hears


# -- A report is one file with all in it


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    writer = LineFile(folder / NAME, job())
    for record in records()[1:]:
        writer.write(record)
    writer.close()
    return folder


def data_of(page: str) -> Any:
    """What a page has in its data."""
    (found,) = re.findall(r'<script [^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def test_a_report_holds_the_whole_view_and_fetches_nothing(run: Path) -> None:
    page = report_of(run)[0]
    told = data_of(page)
    assert told["view"] == json.loads(json.dumps(view_of(state_of_run(run))))
    assert told["view"]["totals"]["rebalances"] == 2
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"#main", "data:,"}


def test_what_events_say_cannot_end_the_data(run: Path) -> None:
    writer = LineFile(run / NAME, job())
    writer.write({"event": "GuardFinding", "step": 1, "time": 1.0, "finding": "</script><script>alert(1)</script>"})
    writer.close()
    page = report_of(run)[0]
    assert "alert(1)</script>" not in page
    assert data_of(page)["view"]["troubles"][-1]["text"].startswith("</script>")


def test_the_command_writes_it_and_says_what_the_run_came_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run.parent / "report.html"
    assert main(["report", str(run), "-o", str(output)]) == 0
    assert "2 rebalances" in capsys.readouterr().out and output.stat().st_size > 10_000
    assert main(["report", str(run), "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["rebalances"] == 2
    LineFile(run / NAME, job()).close()  # it starts again, and has measured nothing yet
    assert main(["report", str(run), "-o", str(output)]) == 0
    assert " with moves\n" in capsys.readouterr().out


# -- A run says whether its plans keep what they predict, and how sure that is


SAID = "of 87 s that plans predicted, 5 s came true (17 plans judged at 40 decisions): raise interval or window"


def saying(kind: type[Event], **fields: Any) -> list[Record]:
    """Records of a job whose events of a kind say this."""
    events = [event for heard in decisions(2) for event in heard]
    told = [replace(event, **fields) if isinstance(event, kind) else event for event in events]
    return [job()] + [record_of(event, start(), 1001.0) for event in told]


def test_predictions_that_fail_are_called_so_in_summary_and_page() -> None:
    found = saying(RebalancePlanned, judged_plans=17, judged_decisions=40, predicted_seconds=87.0, true_seconds=5.0)
    state = state_of(found)
    lines = summary_text(summary_of(state), None).splitlines()
    assert len(lines) == 3 and lines[1].endswith(SAID)
    assert "in 10 measured steps; imbalance" in lines[0], "of this life"
    lines = summary_text(summary_of(state_of([*found, *saying(RebalancePlanned)])), None).splitlines()
    assert "in 20 measured steps in all lives; imbalance" in lines[0], "a report of both"
    assert view_of(state)["predictions"] == SAID


def shown(records: list[Record]) -> list[str]:
    """Summary and page."""
    state = state_of(records)
    return [summary_text(summary_of(state), None), view_of(state)["expert_work"]]


def test_the_share_of_a_step_in_expert_work_says_where_it_is_from() -> None:
    for said in shown(saying(LoadMeasured, moe_share=0.38, moe_share_source="measured")):
        assert "expert work 38 % of a step (measured)" in said
    for said in shown(records(2)):
        assert "expert work 50 % of a step (assumed)" in said, "control: until it is measured"


# -- Page, metrics and summary tell a rollout, in which the balancer is suspended, from training


def phases(count: int, *, ended: bool) -> list[Record]:
    events = [event for number in range(count) for event in (Suspended(number, 3 << 20), SuspensionEnded(number, 2.5))]
    return [job(), *(record_of(event, start(), 1001.0) for event in (events if ended else events[:-1]))]


def test_rollouts_are_counted_and_timed() -> None:
    view = view_of(state_of(phases(1, ended=False)))
    assert (view["standing"], view["cause"]) == ("suspended", "a rollout"), "no job without news"
    state = state_of(phases(3, ended=True))
    assert view_of(state)["standing"] == "balancing"
    assert summary_of(state)["rollouts"] == {"count": 3, "seconds": 7.5}
    totals = view_of(state)["totals"]
    assert (totals["rollouts"], totals["rollout_seconds"]) == (3, 7.5)
    values = scalars_of(state, Progress(0, 0.0, 0.0))
    assert (values["rollouts"], values["rollout_seconds"]) == (3.0, 7.5)
