"""A report is one file with all in it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from observed import decisions, job, records, start

from eplb_runtime.cli import main
from eplb_runtime.events import Event, LoadMeasured, RebalancePlanned, Suspended, SuspensionEnded
from eplb_runtime.load.clock import Progress
from eplb_runtime.observe.events_file import NAME, LineFile
from eplb_runtime.observe.metrics import scalars_of
from eplb_runtime.observe.page import report_of, view_of
from eplb_runtime.observe.records import Record, record_of
from eplb_runtime.observe.run_folder import state_of_run
from eplb_runtime.observe.run_state import state_of
from eplb_runtime.observe.summary import summary_of, summary_text


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
    assert len(lines) == 3 and lines[1].endswith("judged 40 times in all lives"), "some at the first decision"
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
