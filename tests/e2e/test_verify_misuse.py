"""`eplb-runtime verify` on loops that users could write: some are wrong in one thing, some right. All of them:
``python -m tests.support.misuse.table``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CASES = (
    "ema_in_generator",
    "compute_by_index",
    "compute",
    "penalty_that_couples",
    "clip_what_attach_has_replaced",
    "summed_by_the_loop",
    "averaged_by_the_loop",
)
RIGHT = {"averaged_by_the_loop", "compute"}

pytest.importorskip("transformers", reason="Transformers is not installed")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status of the table, and its reports by case."""
    reports = tmp_path_factory.mktemp("table") / "reports.jsonl"
    command = [sys.executable, "-m", "tests.support.misuse.table", "--json", str(reports)]
    for case in CASES:
        command += ["--case", case]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    lines = [json.loads(line) for line in reports.read_text().splitlines()]
    return status, {line["case"]: line["report"] for line in lines}


def test_no_wrong_loop_is_called_right_in_silence_and_no_right_one_wrong(table: tuple[int, dict[str, Any]]) -> None:
    status, reports = table
    assert status == 0
    for case, report in reports.items():
        assert (report["verdict"] == "right") == (case in RIGHT), case


EXPECTED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "ema_in_generator": lambda report: "ema_in_generator" in report["unregistered"][0]["holder"],
    "compute_by_index": lambda report: report["moved"]["equal"] is False,
    "compute": lambda report: report["moved"]["equal"] and report["single"]["equal"],
    "clip_what_attach_has_replaced": lambda report: "before attach are in use still" in report["reason"],
    "summed_by_the_loop": lambda report: "times as large as the experts" in report["reason"],
}


def test_the_report_says_what_differs(table: tuple[int, dict[str, Any]]) -> None:
    _, reports = table
    for case in reports.keys() & EXPECTED:
        assert EXPECTED[case](reports[case]), (case, reports[case])
