"""A report is one file with all in it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from observed import job, records

from eplb_runtime.cli import main
from eplb_runtime.observe.events_file import NAME, LineFile
from eplb_runtime.observe.page import report_of, view_of
from eplb_runtime.observe.run_folder import state_of_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    writer = LineFile(folder / NAME, job())
    for record in records()[1:]:
        writer.write(record)
    writer.close()
    return folder


class Links(HTMLParser):
    """What a page would fetch, and what it says in its data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.data = ""
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.links += [str(found[name]) for name in ("src", "href") if name in found]
        self._inside = tag == "script" and found.get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        self.data += data if self._inside else ""


def test_a_report_holds_the_whole_view_and_fetches_nothing(run: Path) -> None:
    page = Links(report_of(run).html)
    told = json.loads(page.data)
    assert told["view"] == json.loads(json.dumps(view_of(state_of_run(run))))
    assert told["view"]["totals"]["rebalances"] == 2
    assert set(page.links) == {"#main", "data:,"}


def test_what_events_say_cannot_end_the_data(run: Path) -> None:
    writer = LineFile(run / NAME, job())
    writer.write({"event": "GuardFinding", "step": 1, "time": 1.0, "finding": "</script><script>alert(1)</script>"})
    writer.close()
    page = report_of(run).html
    assert "alert(1)</script>" not in page
    assert json.loads(Links(page).data)["view"]["troubles"][-1]["text"].startswith("</script>")


def test_the_command_writes_it_and_says_what_the_run_came_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run.parent / "report.html"
    assert main(["report", str(run), "-o", str(output)]) == 0
    assert "2 rebalances" in capsys.readouterr().out and output.stat().st_size > 10_000
    assert main(["report", str(run), "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["rebalances"] == 2
    LineFile(run / NAME, job()).close()  # it starts again, and has measured nothing yet
    assert main(["report", str(run), "-o", str(output)]) == 0
    assert " with moves\n" in capsys.readouterr().out
