"""`eplb-runtime trace`, as it is typed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traces import GEMM, cpu_events, gpu_events, kernel, launch, of_rank, span

from eplb_runtime.cli import main
from eplb_runtime.observe.traces import Change, MarkedSteps, analyse, compare, traces_in


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
    found = json.loads(said("trace", "analyse", path, "--json"))
    assert found["span_us"] == 400
    assert found["communication"] == {"us": 210, "hidden_us": 60, "exposed_us": 150, "hidden_share": 0.285714}
    assert {"streams", "kernels", "phases", "idle_us"} <= found.keys()


def test_tables_fit_eighty_columns(said: Any, tmp_path: Path) -> None:
    path = of_rank(tmp_path / "a.json", 0, [*gpu_events(), kernel("x" * 300, 400, 99_999_999, 7, 1)])
    for arguments in (("analyse", path, "--layers"), ("compare", path, path)):
        lines = [line for line in said("trace", *arguments).splitlines() if line[:1] in "│┏┡└"]
        assert max(map(len, lines)) <= 80, max(lines, key=len)


def test_a_folder_is_the_ranks_of_a_job(said: Any, tmp_path: Path) -> None:
    folder = a_job(tmp_path / "job", [100, 300])
    found = json.loads(said("trace", "analyse", folder, "--json"))
    assert [one["rank"] for one in found["traces"]] == [0, 1]
    # 100 and 300 us of computing in each of two steps, nothing hidden: all ranks send until 400 us.
    assert (found["compute_us"], found["communication"]["exposed_us"]) == (400, 400)


def test_traces_of_a_folder_come_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    for rank in (10, 9, 2):
        of_rank(tmp_path / f"rank{rank}.json", rank, cpu_events())
    (tmp_path / "merged.json.gz").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    assert [path.name for path in traces_in(tmp_path)] == ["rank2.json", "rank9.json", "rank10.json"]


def test_compare_says_what_changed(said: Any, tmp_path: Path) -> None:
    a, b = a_job(tmp_path / "static", [100, 300]), a_job(tmp_path / "balanced", [200, 200])
    found = json.loads(said("trace", "compare", a, b, "--json"))
    summary = {row["what"]: (row["a"], row["b"]) for row in found["summary"]}
    assert found["per"] == "step"
    assert summary["computing, busiest rank"] == (300, 200)
    assert summary["computing, max / mean over ranks"] == (1.5, 1.0)
    assert summary["communication, exposed"] == (200, 100)
    assert summary["step, median"] == (500, 400)
    shown = said("trace", "compare", a, b)
    assert "computing, busiest rank" in shown and "compute(F)" in shown


def test_shares_differ_in_points(said: Any, tmp_path: Path) -> None:
    """A share that falls from 20 % to 10 % has not fallen by half of a step."""
    row, relative = Change.of("communication, hidden share", 0.2, 0.1), Change.of("communication, hidden", 0.2, 0.1)
    assert (row.change, row.is_share) == (-0.1, True) and (relative.change, relative.is_share) == (-0.5, False)
    shown = said("trace", "compare", *(a_job(tmp_path / name, [100, 300]) for name in "ab"))
    assert "+0.0 points" in next(line for line in shown.splitlines() if "hidden share" in line)


@pytest.mark.parametrize("slower, is_noise", [(20.0, True), (21.0, False)])
def test_a_difference_of_medians_is_noise_up_to_the_spread_of_medians(
    slower: float, is_noise: bool, tmp_path: Path
) -> None:
    one = analyse(next(a_job(tmp_path / "job", [100, 300]).iterdir()))
    a = replace(one, steps=8, step_us=1000.0, step_spread_us=40.0)
    b = replace(one, steps=32, step_us=1000.0 + slower, step_spread_us=80.0)
    found = compare([a], [b], "a", "b")
    assert found.is_noise is is_noise
    assert (found.steps_a, found.steps_b) == (MarkedSteps(8, 1000.0, 40.0), MarkedSteps(32, 1000.0 + slower, 80.0))
    # 40 / sqrt(8) = 80 / sqrt(32) = 14.14 us, and 20 us of both: one step alone differs by more.
    assert (found.steps_a.error_us, found.steps_b.error_us) == pytest.approx((14.142, 14.142), abs=1e-3)
    single = replace(one, steps=1)
    assert compare([single], [single], "a", "b").is_noise is None, "one step has no spread"


def test_merge_writes_beside_what_it_reads(said: Any, tmp_path: Path) -> None:
    folder = a_job(tmp_path / "job", [100, 300])
    assert "2 ranks" in said("trace", "merge", folder)
    assert json.loads(said("trace", "merge", folder, "-o", tmp_path / "all.json", "--json"))["ranks"] == [0, 1]
    assert (folder / "merged.json.gz").exists() and (tmp_path / "all.json").exists()


def test_what_cannot_work_is_said_in_one_line(said: Any, tmp_path: Path) -> None:
    path = of_rank(tmp_path / "a.json", 0, gpu_events())
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "empty").mkdir()
    assert "broken off" in said("trace", "analyse", tmp_path / "b.json", status=2)
    assert "no traces in this folder" in said("trace", "analyse", tmp_path / "empty", status=2)
    assert "No such file" in said("trace", "compare", path, tmp_path / "none.json", status=2)
    assert "must end in" in said("trace", "merge", tmp_path, "-o", tmp_path / "p.txt", status=2)
    (tmp_path / "b.json").write_bytes(path.read_bytes())
    assert "both of rank 0" in said("trace", "merge", tmp_path, status=2)
