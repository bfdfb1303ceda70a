"""The live page in a real browser: what it shows is what the metrics say, and it goes on showing it."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.observed import LAYERS, RANKS, TOPOLOGY, decisions, records, start
from support.scraping import MONITORING, ask, prometheus_of, scraped, wait_until

from eplb_runtime import BalancerConfig
from eplb_runtime.load.clock import Progress
from eplb_runtime.observe.events_file import NAME, LineFile, record_of
from eplb_runtime.observe.page import report_of
from eplb_runtime.observe.run_state import state_of_run
from eplb_runtime.observe.start import Observers

PHONE = {"width": 360, "height": 740}


class ShownJob:
    """A made-up job that is shown, and takes events one decision at a time."""

    def __init__(self) -> None:
        self.step = 0
        config = BalancerConfig(interval=5, replica_slots=1, listen=0)
        self.shown = Observers(config, TOPOLOGY, start(), RANKS, lambda: Progress(self.step, 0.25, 0.0))
        assert self.shown.server is not None
        self.url = self.shown.server.url
        self._coming = decisions(rounds=5)

    def decide(self) -> None:
        for event in next(self._coming):
            self.step = event.step + 1
            self.shown.state.apply(record_of(event, start(), 1000.0 + event.step))

    def metric(self, name: str, **labels: str) -> float:
        found = [metric for metric in self.shown.metrics() if metric.name == f"eplb_{name}"]
        return next(value for told, value in found[0].samples if told == labels)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser test")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium: no browser test")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def job() -> Iterator[ShownJob]:
    made = ShownJob()
    yield made
    made.shown.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    made = browser.new_page(viewport={"width": 1200, "height": 900})
    troubles: list[str] = []

    def note(message: Any) -> None:
        """A request that the network lost is asked again by the page; a bad status or a refused script is ours."""
        if message.type == "error" and not message.text.startswith("Failed to load resource: net::"):
            troubles.append(message.text)

    made.on("pageerror", lambda error: troubles.append(str(error)))
    made.on("console", note)
    yield made
    made.close()
    assert troubles == []


def exact(page: Any, key: str) -> float:
    return float(page.get_attribute(f'#numbers dd[data-key="{key}"]', "data-exact"))


def look_again(page: Any, job: ShownJob) -> None:
    page.evaluate("ask()")
    page.wait_for_selector(f'html[data-version="{job.shown.state.version}"]', state="attached")


def test_the_page_shows_what_the_metrics_say(page: Any, job: ShownJob) -> None:
    for _ in range(3):
        job.decide()
    page.goto(job.url)
    look_again(page, job)
    assert exact(page, "imbalance") == pytest.approx(job.metric("imbalance", kind="measured", over="mean"), abs=1e-9)
    assert exact(page, "imbalance-start") == pytest.approx(job.metric("imbalance", kind="start", over="mean"), abs=1e-9)
    assert exact(page, "imbalance-worst") == pytest.approx(job.metric("max_overload_factor"), abs=1e-9)
    assert exact(page, "rebalances") == job.metric("rebalances") == 2
    assert exact(page, "pause") == pytest.approx(job.metric("pause_seconds"))
    assert exact(page, "saved") == pytest.approx(job.metric("saved_seconds", kind="measured"))
    away = ("inside a node", "between nodes")
    assert exact(page, "moved") == sum(job.metric("moved_experts", link=link) for link in away)
    carried = [float(cell.get_attribute("data-exact")) for cell in page.query_selector_all("#links [data-exact]")]
    assert carried == [job.metric("moved_bytes", link=link) for link in ("inside a rank", *away)]
    assert page.inner_text("#standing") == "balancing"
    assert page.inner_text('#progress [data-key="step"]') == str(job.step)


def test_a_rebalance_shows_up_without_a_reload(page: Any, job: ShownJob) -> None:
    job.decide()
    page.goto(job.url)
    look_again(page, job)
    page.evaluate("window.same = true")
    assert exact(page, "rebalances") == 1
    job.decide()
    job.decide()
    page.wait_for_selector('[data-key="rebalances"][data-exact="2"]')
    assert page.evaluate("window.same") and page.inner_text("#timeline tbody tr td:nth-child(2)") == "committed"
    assert len(page.query_selector_all("#timeline tbody tr")) == 3


def test_a_layer_is_opened_by_the_keyboard_alone_and_each_slot_shows_its_expert(page: Any, job: ShownJob) -> None:
    """And an expert its slots."""
    for _ in range(2):
        job.decide()
    page.goto(job.url)
    look_again(page, job)
    page.focus("#heat [data-which=now] canvas")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    tokens = job.shown.state.measured["rank_load"][0]
    assert page.inner_text("#heat .readout").startswith(f"layer 1, rank 2: {tokens[1, 2]:,} tokens")
    page.keyboard.press("Enter")
    assert page.inner_text("#layer h2") == "Layer 1"
    told = float(page.get_attribute('#layer [data-fact="imbalance"]', "data-exact"))
    assert told == pytest.approx(job.metric("layer_imbalance", layer="1", kind="measured"))
    placement = job.shown.state.placement.reshape(LAYERS, RANKS, -1)
    page.focus("#layer .placement canvas")
    page.keyboard.press("ArrowRight")
    for rank in range(1, RANKS):
        page.keyboard.press("ArrowRight")
        assert f"rank {rank}, slot 0: expert {placement[1, rank, 0]} (home)" in page.inner_text("#layer .readout")
    expert = placement[1, RANKS - 1, 0]
    page.keyboard.press("Enter")
    said = page.inner_text("#layer .readout")
    for rank in np.flatnonzero((placement[1] == expert).any(axis=1)):
        assert f"rank {rank} (" in said
    assert said.startswith(f"expert {expert}: ") and said.count("(") == (placement[1] == expert).sum()


def test_it_fits_a_phone_and_follows_the_dark(browser: Any, job: ShownJob) -> None:
    job.decide()
    grounds = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport=PHONE, color_scheme=scheme)
        page.goto(job.url)
        look_again(page, job)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        reason = page.query_selector("#timeline tbody td.reason").bounding_box()
        assert reason["x"] >= 0 and reason["x"] + reason["width"] <= PHONE["width"], "seen without scrolling sideways"
        grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.close()
    assert grounds["light"] != grounds["dark"]


def test_what_a_record_says_is_never_markup(page: Any, job: ShownJob) -> None:
    job.decide()
    evil = "<img src=x onerror=window.hurt=1>"
    job.shown.state.apply({"event": "GuardFinding", "step": 6, "time": 1.0, "finding": evil})
    job.shown.state.apply({"event": "BalancingPaused", "step": 6, "time": 1.0, "cause": evil})
    page.goto(job.url)
    look_again(page, job)
    assert evil in page.inner_text("#troubles") and evil in page.inner_text("#standing")
    assert page.evaluate("window.hurt") is None and page.query_selector("main img") is None


def test_a_report_shows_the_same_without_a_server(page: Any, tmp_path: Path) -> None:
    """Opened from the disk, with its scripts under a policy that lets nothing else run."""
    first, *others = records()
    writer = LineFile(tmp_path / NAME, first)
    for record in others:
        writer.write(record)
    writer.close()
    (tmp_path / "report.html").write_text(report_of(tmp_path)[0])
    page.goto((tmp_path / "report.html").as_uri())
    state = state_of_run(tmp_path)
    assert exact(page, "imbalance") == pytest.approx(state.measured["imbalance"].mean(), abs=1e-9)
    assert exact(page, "rebalances") == 2 and len(page.query_selector_all("#timeline tbody tr")) == 3
    ticks = [text.text_content() for text in page.query_selector_all("#imbalance text[text-anchor=middle]")]
    assert ticks == ["4", "6", "8", "10", "12", "14", "16", "step"], "round numbers"
    assert page.query_selector("#imbalance svg") and page.query_selector("#step-time svg")


# -- The dashboard and the alert rules fit the metrics, by a real Prometheus that scrapes a job's server


TOKEN = "a-token-for-prometheus"


def needs(program: str) -> pytest.MarkDecorator:
    reason = f"{program} is not installed (Debian's package prometheus)"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


@pytest.fixture
def shown() -> Iterator[Observers]:
    config = BalancerConfig(interval=5, replica_slots=1, listen="127.0.0.1:0", listen_token=TOKEN)
    made = Observers(config, TOPOLOGY, start(), RANKS, lambda: Progress(25, 0.25, 1.0))
    for record in records(5)[1:]:
        made.state.apply(record)
    yield made
    made.close()


@pytest.fixture
def prometheus(shown: Observers, tmp_path: Path) -> Iterator[str]:
    """Its address. It scrapes the job by the rules and the token of ours."""
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    assert shown.server is not None
    with prometheus_of(shown.server.port, tmp_path, TOKEN) as address:
        yield address


def expressions() -> list[str]:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    return [expression.replace("$job", ".*").replace("$instance", ".*") for expression in found]


def rules() -> str:
    return (MONITORING / "alerts.yaml").read_text()


def test_dashboard_and_rules_name_metrics_that_exist(shown: Observers) -> None:
    known = {metric.name + ("_total" if metric.kind == "counter" else "") for metric in shown.metrics()}
    named = set(re.findall(r"\beplb_(?!runtime)\w+", " ".join(expressions()) + rules()))
    assert named <= known and len(named) > 12


@needs("promtool")
def test_rules_alert_when_they_should() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yaml"], cwd=MONITORING, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    named, tested = set(re.findall(r"alert: (\w+)", rules())), (MONITORING / "alerts_test.yaml").read_text()
    assert all(f"alertname: {name}" in tested for name in named)


@needs("prometheus")
@pytest.mark.slow
def test_a_real_prometheus_scrapes_all_that_the_dashboard_shows(prometheus: str, shown: Observers) -> None:
    wait_until(lambda: ask(prometheus, "count_over_time(eplb_steps[5m]) > 2"), MONITORING / "alerts.yaml")
    empty = [
        expression for expression in expressions() if not ask(prometheus, expression.replace("[1m]) > 0", "[1m])"))
    ]
    assert empty == []
    for metric in shown.metrics():
        name = metric.name + ("_total" if metric.kind == "counter" else "")
        if "timestamp" in name:
            continue
        assert scraped(prometheus, name) == {
            tuple(sorted(labels.items())): pytest.approx(value) for labels, value in metric.samples
        }
