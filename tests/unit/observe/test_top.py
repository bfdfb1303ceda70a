"""`eplb-runtime top`: a run in the terminal, from its folder or from the page of the running job."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observed import job, records
from rich.console import Console

from eplb_runtime.cli import main
from eplb_runtime.observe.event_log import EventWriter
from eplb_runtime.observe.reading import ViewError, source_of, unpacked
from eplb_runtime.observe.server import Answer, PageServer
from eplb_runtime.observe.state import MOST_DECISIONS, state_of
from eplb_runtime.observe.terminal import screen, sparkline
from eplb_runtime.observe.view import as_json, view_of

TOKEN = "a-long-token-for-the-test"
VIEW: dict[str, Any] = json.loads(json.dumps(view_of(state_of(records())[0])))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    writer = EventWriter(tmp_path / "first", job())
    for record in records()[1:]:
        writer.write(record)
    writer.close()
    return tmp_path / "first"


@pytest.fixture
def page() -> Iterator[str]:
    progress = {"step": 12345, "step_seconds": 0.25, "idle_seconds": 1.0}

    def state(query: Any) -> Answer:
        told = None if query.get("after") == str(VIEW["version"]) else VIEW
        return Answer(as_json({"progress": progress, "view": told}), "application/json")

    server = PageServer("127.0.0.1", 0, TOKEN, {"/state": state, "/": lambda query: Answer(b"hello", "text/plain")})
    try:
        yield server.url.partition("?")[0].rstrip("/")
    finally:
        server.close()


def shown(view: dict[str, Any], width: int = 80, after: float = 61.0) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(view, view["time"] + after))
    return console.export_text()


def test_seconds_that_are_rounding_alone_are_none() -> None:
    for seconds, said in ((-4.87e-8, " 0 s saved"), (0.0, " 0 s saved"), (-0.0021, "-2.1 ms saved"), (-3.0, "-3.0 s")):
        assert said in shown(VIEW | {"totals": VIEW["totals"] | {"saved_seconds": seconds}}).replace("\n", " ")


def test_replicas_that_were_placed_are_shown() -> None:
    assert "6 replicas placed" in shown(VIEW | {"totals": VIEW["totals"] | {"placed_replicas": 6}}).replace("\n", " ")


def test_a_run_is_shown_in_eighty_columns(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(run), "--once"]) == 0
    said, told = capsys.readouterr().out, VIEW
    assert max(map(len, said.splitlines())) <= 80
    assert f"step {told['step']} " in said and f"epoch {told['epoch']} " in said
    assert f"{told['totals']['rebalances']} rebalances in {told['totals']['decisions']} decisions" in said
    measured = unpacked(told["measured"]["imbalance"])
    assert measured is not None and f"imbalance {measured.mean():.3f} mean, {measured.max():.3f} worst layer" in said


def test_a_job_that_says_nothing_for_long_is_not_called_balancing() -> None:
    alive = VIEW | {"standing": "balancing", "cause": "", "curve": VIEW["curve"] | {"step_seconds": [0.1]}}
    usual = 5 * VIEW["job"]["interval"] * 0.1
    assert "balancing" in shown(alive, after=5.0)
    silent = shown(alive, after=max(60.0, usual) + 13 * 60)
    assert "no news" in silent and "min ago" in silent and "balancing" not in silent
    slow = alive | {"curve": VIEW["curve"] | {"step_seconds": [600.0]}}
    assert "balancing" in shown(slow, after=13 * 60), "control: its next decision is hours away"
    ended = VIEW | {"standing": "ended", "cause": "closed"}
    assert "no news" not in shown(ended, after=1e6)


def test_without_an_interval_the_longest_gap_between_decisions_says_what_is_long() -> None:
    alone = VIEW | {
        "job": VIEW["job"] | {"interval": None, "horizon_steps": None},
        "standing": "balancing",
        "cause": "",
    }
    decided = VIEW["decisions"][-1]
    rounds = [
        decided | {"time": VIEW["time"] - seconds} for seconds in (2500.0, 700.0, 0.0)
    ]  # a rollout of half an hour
    lively = alone | {"decisions": rounds}
    assert "by rebalance() alone" in shown(lively) and "every" not in shown(lively).splitlines()[1]
    assert "balancing" in shown(lively, after=4.9 * 1800) and "no news" in shown(lively, after=5.1 * 1800)
    first = alone | {"decisions": rounds[-1:]}
    assert "balancing" in shown(first, after=1e5), "one decision says nothing of the next"


def test_a_picture_shows_what_the_terminal_shows_and_fetches_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(run), "-o", str(tmp_path / "top.svg")]) == 0
    drawn = (tmp_path / "top.svg").read_text()
    texts = html.unescape(re.sub(r"<[^>]*>", " ", drawn)).replace("\xa0", " ").split()
    assert set(capsys.readouterr().out.split()) <= set(texts)
    assert not re.search(r"url\((?!#)|href|@font-face|<script", drawn) and len(drawn) < 300_000
    assert main(["top", str(run), "-o", str(tmp_path / "top.txt")]) == 2


def test_the_ranks_shown_are_those_that_were_measured() -> None:
    told = VIEW
    load = unpacked(told["measured"]["rank_load"])
    assert load is not None
    now = load[0].sum(axis=0) / load[0].sum(axis=0).mean()
    lines = shown(told).splitlines()
    first = next(number for number, line in enumerate(lines) if "load / mean" in line)
    for rank, value in enumerate(now[:16]):
        assert lines[first + 1 + rank].split()[:2] == [str(rank), f"{value:.3f}"]


def test_the_page_of_a_running_job_is_asked(page: str) -> None:
    source = source_of(f"{page}/?token={TOKEN}")
    told = source.view()
    assert told["progress"]["step"] == 12345 and "step 12345 " in shown(told) and "250 ms a step" in shown(told)
    again = source_of(page, TOKEN)
    assert again.view() == again.view() == told  # the second time nothing is new


def test_what_cannot_be_shown_is_said_in_one_line(
    page: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for place, says in (
        (str(tmp_path / "none"), "no such folder"),
        (str(tmp_path / "empty"), "no folder of a run"),
        (page, "it wants a token"),
        ("http://127.0.0.1:1", "no answer"),
        ("file:///etc/passwd", "give an address as http"),
    ):
        assert main(["top", place, "--once"]) == 2
        said = capsys.readouterr()
        assert says in said.err and said.err.count("\n") == 1 and said.out == "", place


def test_a_page_of_another_server_is_refused() -> None:
    server = PageServer("127.0.0.1", 0, None, {"/state": lambda query: Answer(b'{"a": 1}', "application/json")})
    try:
        with pytest.raises(ViewError, match="not a page of ours"):
            source_of(server.url).view()
    finally:
        server.close()


ANYTHING = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=4) | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=3,
)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(VIEW)), ANYTHING)
def test_whatever_a_page_says_it_is_shown_or_refused(name: str, value: Any) -> None:
    try:
        shown({**VIEW, name: value} if name != "time" else VIEW)
    except ViewError as error:
        assert "\n" not in str(error)


def test_the_newest_rebalance_is_shown_however_old_it_is() -> None:
    found = records(rounds=1, with_troubles=False)
    stay = next(
        record for record in records() if record["event"] == "RebalancePlanned" and record["decision"] == "stay"
    )
    state, _ = state_of(found)
    committed = state.newest_rebalance
    assert committed is not None and committed["outcome"] == "committed"
    for step in range(5000, 5000 + MOST_DECISIONS + 1):
        state.apply(stay | {"step": step})
    assert committed not in state.decisions
    view = json.loads(json.dumps(view_of(state)))
    rows = [line.split() for line in shown(view).splitlines()]
    outcomes = {row[0]: row[1] for row in rows if len(row) > 1 and row[1] in ("stay", "committed")}
    assert outcomes.pop(str(committed["step"])) == "committed"
    assert list(outcomes) == [str(5000 + MOST_DECISIONS - back) for back in range(6, -1, -1)]
    without = {name: value for name, value in view.items() if name != "newest_rebalance"}
    assert "committed" not in shown(without), "control"


def test_a_rebalance_among_the_newest_decisions_is_shown_once() -> None:
    view = json.loads(json.dumps(view_of(state_of(records(with_troubles=False))[0])))
    row = view["newest_rebalance"]
    lines = [line.split()[:2] for line in shown(view).splitlines()]
    assert row in view["decisions"] and lines.count([str(row["step"]), "committed"]) == 1


def test_noise_does_not_fill_the_height_of_a_curve() -> None:
    assert sparkline([1.0, 1.002, 1.001], 10) == "▁▁▁" and sparkline([1.0, 1.05, 1.1], 10) == "▁▄█"


def test_a_curve_is_a_row_of_blocks() -> None:
    assert sparkline([1.0, 1.5, 2.0], 10) == "▁▄█" and sparkline([], 5) == "" and len(sparkline([1.0] * 9, 4)) == 4
