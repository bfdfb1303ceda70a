"""`eplb-runtime verify` on loops that users could write: some are wrong in one thing, some right. All of them:
``python -m tests.support.misuse.table``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WRONG = (
    *("penalty_that_couples", "ema_in_generator", "compute_by_index", "clip_what_attach_has_replaced"),
    "summed_by_the_loop",
)
RIGHT = ("averaged_by_the_loop", "compute")

pytest.importorskip("transformers", reason="Transformers is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status of the table, and its reports by case."""
    reports = tmp_path_factory.mktemp("table") / "reports.jsonl"
    command = [sys.executable, "-m", "tests.support.misuse.table", "--json", str(reports)]
    for case in (*WRONG, *RIGHT):
        command += ["--case", case]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    lines = [json.loads(line) for line in reports.read_text().splitlines()]
    return status, {line["case"]: line["report"] for line in lines}


def test_no_wrong_loop_is_called_right_in_silence_and_no_right_one_wrong(table: tuple[int, dict[str, Any]]) -> None:
    status, reports = table
    assert status == 0
    assert {case for case in WRONG if reports[case]["verdict"] == "right"} == set()
    assert {reports[case]["verdict"] for case in RIGHT} == {"right"}


def test_the_report_says_what_differs(table: tuple[int, dict[str, Any]]) -> None:
    _, reports = table
    assert "ema_in_generator" in reports["ema_in_generator"]["unregistered"][0]["holder"]
    assert reports["compute_by_index"]["moved"]["equal"] is False
    assert reports["compute"]["moved"]["equal"] and reports["compute"]["single"]["equal"]
    assert "before attach are in use still" in reports["clip_what_attach_has_replaced"]["reason"]
    assert "as those of experts" in reports["summed_by_the_loop"]["reason"]
