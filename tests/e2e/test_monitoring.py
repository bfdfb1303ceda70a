"""The dashboard and the alert rules fit the metrics, by a real Prometheus that scrapes a job's server."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from observed import RANKS, TOPOLOGY, records, start

from eplb_runtime import BalancerConfig
from eplb_runtime.load.clock import Progress
from eplb_runtime.observe.start import Shown

MONITORING = Path(__file__).resolve().parents[2] / "launch" / "monitoring"
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "token").write_text(TOKEN)
    settings = (MONITORING / "prometheus.yaml").read_text()
    settings = settings.replace("15s", "1s").replace("127.0.0.1:8080", f"127.0.0.1:{shown.server.port}")
    settings = settings.replace("    #   authorization: {credentials_file: /run/secrets/eplb_runtime_token}", "")
    settings += f"    authorization: {{credentials_file: {tmp_path / 'token'}}}\n"
    (tmp_path / "prometheus.yaml").write_text(settings)
    shutil.copy(MONITORING / "alerts.yaml", tmp_path)
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path / 'prometheus.yaml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
             f"--web.listen-address={address}"], stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_until(lambda: ask(address, "eplb_steps"), tmp_path / "log")
        yield address
    finally:
        server.terminate()
        server.wait(30)


def ask(address: str, expression: str) -> list[dict[str, Any]]:
    with urlopen(f"http://{address}/api/v1/query?query={quote(expression)}", timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def labels_of(metric: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Ours, without those that Prometheus adds."""
    return tuple(sorted((name, text) for name, text in metric.items() if name not in ("__name__", "job", "instance")))


def wait_until(true: Any, log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            if true():
                return
        except OSError:
            pass
        time.sleep(0.2)
    pytest.fail(log.read_text()[-3000:])


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
        got = {labels_of(row["metric"]): float(row["value"][1]) for row in ask(prometheus, name)}
        assert got == {tuple(sorted(labels.items())): pytest.approx(value) for labels, value in metric.samples}
