"""`eplb-runtime trace`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from traces import gpu_events, of_rank

from eplb_runtime.cli import main


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str | Path, status: int = 0) -> str:
        assert main([*map(str, arguments)]) == status
        shown = capsys.readouterr()
        if status == 0:
            return shown.out
        assert shown.out == "" and shown.err.count("\n") == 1
        return shown.err

    return run


def test_analyse_prints_tables_and_one_json_object(said: Any, tmp_path: Path) -> None:
    path = of_rank(tmp_path / "a.json", 0, gpu_events())
    shown = said("trace", "analyse", path, "--layers")
    assert "28.6% of communication is hidden" in shown and "dispatch(F)" in shown and "1 step of 350 us" in shown
    assert "several files" not in shown and "several files are of rank 0" in said("trace", "analyse", path, path)
    found = json.loads(said("trace", "analyse", path, "--json"))
    assert found["span_us"] == 400
    assert found["communication"] == {"us": 210, "hidden_us": 60, "exposed_us": 150, "hidden_share": 0.285714}
    assert {"kernels", "phases", "idle_us"} <= found.keys()


def test_what_cannot_work_is_said_in_one_line(said: Any, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "empty").mkdir()
    assert "broken off" in said("trace", "analyse", tmp_path / "b.json", status=2)
    assert "no traces in this folder" in said("trace", "analyse", tmp_path / "empty", status=2)
    assert "No such file" in said("trace", "analyse", tmp_path / "none.json", status=2)
