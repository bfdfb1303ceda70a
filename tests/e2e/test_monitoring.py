"""The dashboard and the alert rules fit the metrics, by a real Prometheus that scrapes a job's server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from observed import RANKS, TOPOLOGY, records, start
from scraping import MONITORING, ask, prometheus_of, scraped, wait_until

from eplb_runtime import BalancerConfig
from eplb_runtime.load.clock import Progress
from eplb_runtime.observe.start import Shown

TOKEN = "a-token-for-prometheus"


def needs(program: str) -> pytest.MarkDecorator:
    reason = f"{program} is not installed (Debian's package prometheus)"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


@pytest.fixture
def shown() -> Iterator[Shown]:
    config = BalancerConfig(interval=5, replica_slots=1, listen="127.0.0.1:0", listen_token=TOKEN)
    made = Shown(config, TOPOLOGY, start(), RANKS, lambda: Progress(25, 0.25, 1.0))
    for record in records(5)[1:]:
        made.state.apply(record)
    yield made
    made.close()


@pytest.fixture
def prometheus(shown: Shown, tmp_path: Path) -> Iterator[str]:
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


def test_dashboard_and_rules_name_metrics_that_exist(shown: Shown) -> None:
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
def test_a_real_prometheus_scrapes_all_that_the_dashboard_shows(prometheus: str, shown: Shown) -> None:
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
