"""`plan` and `simulate` say which load their imbalance is of, and what nothing moved costs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from eplb_runtime import planner
from eplb_runtime.balancer import planner_process
from eplb_runtime.cli import main, printing
from eplb_runtime.load.series import RecordedJob
from eplb_runtime.observe.recording import Recorder
from eplb_runtime.tools.formats.loads import write_load
from eplb_runtime.utils import jit

CLUSTER = ["--ranks", "4", "--ranks-per-node", "2", "--slots-per-rank", "3"]


@pytest.fixture
def load(tmp_path: Path) -> str:
    write_load(tmp_path / "load.npz", np.random.default_rng(0).integers(0, 1000, (8, 3, 8)))
    return str(tmp_path / "load.npz")


def test_a_plan_from_nothing_is_an_initial_placement_and_moves_nothing(
    load: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = str(tmp_path / "placement.json")
    assert main(["plan", load, *CLUSTER, "-o", placement]) == 0
    shown = capsys.readouterr().out
    assert "initial placement" in shown and "moves" not in shown
    write_load(tmp_path / "part.npz", np.load(load)["load"][:2])
    assert main(["plan", str(tmp_path / "part.npz"), *CLUSTER, "--current", placement]) == 0
    shown = capsys.readouterr().out
    assert "initial placement" not in shown and "  moves " in shown


def test_layers_without_tokens_are_pointed_out_wherever_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = np.ones((2, 5, 8))
    loads[:, [0, 3]] = 0
    write_load(tmp_path / "load.npz", loads)
    assert main(["plan", str(tmp_path / "load.npz"), *CLUSTER]) == 0
    said = capsys.readouterr().err
    assert "no tokens in layer 0, 3, counted from 0; --dense-layers N leaves out" in said
    write_load(tmp_path / "load.npz", np.zeros((2, 5, 8)))
    assert main(["plan", str(tmp_path / "load.npz"), *CLUSTER]) == 2
    assert "leaves out" not in capsys.readouterr().err, "nothing would be left"


def test_a_folder_says_what_is_not_given_and_a_file_does_not(
    load: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = RecordedJob(4, 2, ep_size=4, interval=2, expert_bytes=10**9, optimizer_bytes=2 * 10**9, takes_no_replicas=1)
    writer = Recorder(tmp_path / "run", 3, 8, job)
    writer.write(np.load(load)["load"], 1)
    writer.close()
    shown = []
    for given in ([], ["--ranks", "4", "--ranks-per-node", "2", "--slots-per-rank", "2", "--every", "2"]):
        assert main(["simulate", str(tmp_path / "run"), *given, "--policies", "static", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["policies"]
        shown.append({name: value for name, value in row.items() if name != "plan_seconds"})
    assert shown[0] == shown[1]
    for way in (["--json"], []):
        assert main(["simulate", str(tmp_path / "run"), "--policies", "incremental", *way]) == 0
        shown.append(capsys.readouterr().out)
    moved = 3 * 3 * 8 * json.loads(shown[2])["policies"][1]["moved_slots_share"]
    assert moved > 0 and f" {3 * moved:.4g} " in shown[3], "three GB with each home, in three plans of three layers"
    assert main(["simulate", load, *CLUSTER[:2]]) == 2
    said = capsys.readouterr().err
    assert "does not say what job it is of: give --ranks-per-node, --slots-per-rank, --every" in said


def test_the_seconds_of_a_plan_are_not_those_of_loading_compiled_code(
    load: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first plan of a process loads it; the second is the one that is shown."""
    made: list[Any] = []
    own = planner.plan
    monkeypatch.setattr(planner, "plan", lambda *args, **terms: made.append(own(*args, **terms)) or made[-1])
    assert main(["plan", load, *CLUSTER, "--json"]) == 0
    assert len(made) == 2 and json.loads(capsys.readouterr().out)["seconds"] == made[1].plan_seconds


# -- ``eplb-runtime warmup`` says what it found and fails where nothing can be compiled


def test_it_compiles_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)
    compiles = Mock(**{"return_value.is_ready": lambda seconds: jit.note_compiled()})
    monkeypatch.setattr(planner_process, "PlannerProcess", compiles)
    assert main(["warmup"]) == 0
    assert "compiled in" in capsys.readouterr().out
    assert main(["warmup", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compiled_before"] is True and compiles.call_count == 1


def test_without_a_compiler_it_says_so_and_fails() -> None:
    command, environment = [sys.executable, "-m", "eplb_runtime.cli", "warmup"], os.environ | {"NUMBA_DISABLE_JIT": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and "nothing was compiled" in ended.stdout


# -- ``eplb-runtime assess`` answers in words


@pytest.fixture
def skewed(tmp_path: Path) -> Path:
    load = np.full((12, 2, 8), 1000)
    load[:, :, :2] = 4000
    write_load(tmp_path / "load.npz", load)
    return tmp_path / "load.npz"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["assess", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_paragraph_stands_above_what_is_assumed(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, skewed, "--ranks", "4", "--every", "3")
    paragraph, assumed = shown.split("\n\n")
    assert paragraph.startswith("4 ranks: the busiest rank has 2.29x the mean load; with homes moved 1.43x, with")
    assert "It pays. Next: BalancerConfig(interval=3" in paragraph.replace("\n", " ")
    assert "see assess --help" in assumed
    assert max(map(len, shown.splitlines())) <= 80


def test_json_is_the_verdict_alone(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(printed(capsys, skewed, "--ranks", "4", "--every", "3", "--json"))
    assert list(shown) == ["pays", "imbalance", "step_saved", "move_seconds", "data_parallel", "advice"]
    assert shown["pays"] is True and shown["imbalance"]["now"] == pytest.approx(16 / 7)


# -- What commands print beside their results: headings with units, signs of life, more on request, shells


def test_markup_in_a_cell_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_table("[t]", [{"a": "[red]x[/red]"}])
    shown = capsys.readouterr().out
    assert "[red]x[/red]" in shown and "[t]" in shown


def wide(*heads: str) -> list[dict[str, object]]:
    return [{"policy": head, **{f"a_long_number_{n}": 123456.789 * n for n in range(9)}} for head in heads]


def test_a_wide_table_is_turned(capsys: pytest.CaptureFixture[str]) -> None:
    """No column goes into a second table."""
    printing.print_table("t", wide("one", "two"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if "policy" in line] == ["┃ policy          ┃       one ┃       two ┃"]
    assert all(f" {123456.789 * n:.4g} " in lines[4 + n] and f"a long number {n}" in lines[4 + n] for n in range(9))


def test_a_turned_table_that_is_too_wide_comes_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_table("t", wide(*map(str, range(20))))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and shown.count(f" {123456.789:.4g} ") == 20
