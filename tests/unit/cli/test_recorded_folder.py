"""`top` and `report` of a load that was recorded without a balancer show its imbalance, and name what comes next."""

from __future__ import annotations

import json
import re
from pathlib import Path

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


def test_top_shows_imbalance_of_the_ranks_that_were_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(written(tmp_path, 4))]) == 0
    shown = capsys.readouterr().out
    assert "30 steps" in shown and "on 4 ranks\n" in shown and "imbalance 2.286 mean" in shown
    assert "at start" not in shown and f"eplb-runtime assess {tmp_path}" in shown.replace("\n", "")
    assert main(["top", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["imbalance"]["mean"] == pytest.approx(16 / 7)


@pytest.mark.parametrize(("ranks", "experts", "asked"), [(1, 8, 8), (3, 8, 8), (1, 12, 4), (1, 7, 1)])
def test_where_the_jobs_own_ranks_say_nothing_others_are_tried_and_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int, experts: int, asked: int
) -> None:
    assert main(["top", str(written(tmp_path, ranks, experts))]) == 0
    assert f"{experts} experts in logical order on {asked} ranks, as if there were so many" in capsys.readouterr().out


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
    assert main(["top", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["imbalance"]["mean"] == pytest.approx(16 / 7) and shown["steps"] == 30 and shown["windows"] == 6


def test_what_has_no_tokens_yet_is_said_of_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = SeriesWriter(tmp_path, 2, 8, RecordedJob(ranks=4))
    for _ in range(2):
        for command in (["top", str(tmp_path)], ["report", str(tmp_path), "-o", str(tmp_path / "report.html")]):
            assert main(command) == 2
            assert f"{tmp_path}: no " in capsys.readouterr().err
        writer.append(np.zeros((6, 2, 8), dtype=np.int64), 5)
    writer.close()


def test_a_folder_without_any_load_is_refused_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path)]) == 2
    assert "no folder of a run" in capsys.readouterr().err
