"""`report` of a load that was recorded without a balancer shows its imbalance, and names what comes next."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_runtime.cli import main
from eplb_runtime.load.series import RecordedJob, SeriesWriter


def written(folder: Path, ranks: int, experts: int = 8) -> Path:
    """Rank 0's experts of four ranks get four times as many tokens; 16 / 7 of the mean."""
    load = np.full((6, 2, experts), 100)
    load[:, :, :2] = 400
    writer = SeriesWriter(folder, 2, experts, RecordedJob(ranks=ranks, step_seconds=0.25))
    writer.append(load, 5)
    writer.close()
    return folder


def summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["report", str(folder), "-o", str(folder / "report.html"), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["summary"]
    return found


@pytest.mark.parametrize(("ranks", "experts", "asked"), [(4, 8, 4), (1, 8, 8), (3, 8, 8), (1, 12, 4), (1, 7, 1)])
def test_where_the_jobs_own_ranks_say_nothing_others_are_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int, experts: int, asked: int
) -> None:
    assert summary(written(tmp_path, ranks, experts), capsys)["ranks"] == asked


def test_the_report_draws_the_recorded_imbalance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "run", 4)
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html")]) == 0
    assert "30 steps recorded; imbalance on 4 ranks 2.286 mean" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert data is not None
    (policy,) = json.loads(data[1])["simulation"]["policies"]
    assert policy["imbalance"] == pytest.approx([16 / 7] * 6) and policy["moved_bytes"] == 0


def test_windows_without_tokens_are_no_balanced_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As steps in evaluation mode leave them."""
    written(tmp_path, 4)
    writer = SeriesWriter(tmp_path, 2, 8, RecordedJob(ranks=4))
    writer.append(np.zeros((6, 2, 8), dtype=np.int64), 5)
    writer.close()
    shown = summary(tmp_path, capsys)
    assert shown["imbalance"]["mean"] == pytest.approx(16 / 7) and shown["steps"] == 30 and shown["windows"] == 6


def test_what_has_no_tokens_yet_is_said_of_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = SeriesWriter(tmp_path, 2, 8, RecordedJob(ranks=4))
    for _ in range(2):
        assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 2
        assert f"{tmp_path}: no " in capsys.readouterr().err
        writer.append(np.zeros((6, 2, 8), dtype=np.int64), 5)
    writer.close()
