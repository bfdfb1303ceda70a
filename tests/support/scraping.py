"""A real Prometheus that scrapes a job's server by the configuration in launch/monitoring."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest

MONITORING = Path(__file__).resolve().parents[2] / "launch" / "monitoring"


@contextmanager
def prometheus_of(port: int, folder: Path, token: str | None = None) -> Iterator[str]:
    """The address of a Prometheus that has scraped the job on ``port`` once, and does so each second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = (MONITORING / "prometheus.yaml").read_text()
    settings = settings.replace("15s", "1s").replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    if token is not None:
        (folder / "token").write_text(token)
        settings = settings.replace("    #   authorization: {credentials_file: /run/secrets/eplb_runtime_token}", "")
        settings += f"    authorization: {{credentials_file: {folder / 'token'}}}\n"
    (folder / "prometheus.yaml").write_text(settings)
    shutil.copy(MONITORING / "alerts.yaml", folder)
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={address}"], stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_until(lambda: ask(address, "eplb_steps"), folder / "log")
        yield address
    finally:
        server.terminate()
        server.wait(30)


def ask(address: str, expression: str) -> list[dict[str, Any]]:
    with urlopen(f"http://{address}/api/v1/query?query={quote(expression)}", timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def wait_until(true: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            if true():
                return
        except OSError:
            pass
        time.sleep(0.2)
    pytest.fail(log.read_text()[-3000:])


def scraped(address: str, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The values of a metric by its labels: ours, without those that Prometheus adds."""
    return {_labels(row["metric"]): float(row["value"][1]) for row in ask(address, name)}


def _labels(metric: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, text) for name, text in metric.items() if name not in ("__name__", "job", "instance")))
