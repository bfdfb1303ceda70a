"""`eplb-runtime trace`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from traces import GEMM, gpu_events, kernel, launch, of_rank, span

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


def a_job(folder: Path, busy: list[float]) -> Path:
    """Two steps of each rank that compute so long, and send from then to 100 us after the busiest."""
    folder.mkdir()
    for rank, us in enumerate(busy):
        events = []
        for step in range(2):
            begin = 1000.0 * step
            events += [
                span(f"ProfilerStep#{step}", "user_annotation", begin, begin + max(busy) + 200),
                span("eplb_runtime compute(F) layer=0 epoch=0", "user_annotation", begin, begin + 10),
                launch(begin + 1, 10 * step + 1),
                kernel(GEMM, begin, begin + us, 7, 10 * step + 1),
                kernel("ncclDevKernel_AllReduce_Sum", begin + us, begin + max(busy) + 100, 8, 10 * step + 2),
            ]
        of_rank(folder / f"rank{rank}.json.gz", rank, events)
    return folder


def test_analyse_prints_tables_and_one_json_object(said: Any, tmp_path: Path) -> None:
    path = of_rank(tmp_path / "a.json", 0, gpu_events())
    shown = said("trace", "analyse", path, "--layers")
    assert "28.6% of communication is hidden" in shown and "dispatch(F)" in shown and "1 step of 350 us" in shown
    assert "several files" not in shown and "several files are of rank 0" in said("trace", "analyse", path, path)
    found = json.loads(said("trace", "analyse", path, "--json"))
    assert found["span_us"] == 400
    assert found["communication"] == {"us": 210, "hidden_us": 60, "exposed_us": 150, "hidden_share": 0.285714}
    assert {"kernels", "phases", "idle_us"} <= found.keys()


def test_a_folder_is_the_ranks_of_a_job(said: Any, tmp_path: Path) -> None:
    folder = a_job(tmp_path / "job", [100, 300])
    found = json.loads(said("trace", "analyse", folder, "--json"))
    assert [one["rank"] for one in found["traces"]] == [0, 1]
    # 100 and 300 us of computing in each of two steps, nothing hidden: all ranks send until 400 us.
    assert (found["compute_us"], found["communication"]["exposed_us"]) == (400, 400)


def test_what_cannot_work_is_said_in_one_line(said: Any, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "empty").mkdir()
    assert "broken off" in said("trace", "analyse", tmp_path / "b.json", status=2)
    assert "no traces in this folder" in said("trace", "analyse", tmp_path / "empty", status=2)
    assert "No such file" in said("trace", "analyse", tmp_path / "none.json", status=2)
