"""The command as a user runs it: tables, JSON with the documented keys, one-line refusals, exit statuses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eplb_runtime.cli import main
from eplb_runtime.placement import Placement
from eplb_runtime.tools.formats import loads
from eplb_runtime.tools.formats.loads import write_load

CLUSTER = ["--ranks", "4", "--ranks-per-node", "2", "--slots-per-rank", "3"]


@pytest.fixture
def load_file(tmp_path: Path) -> Path:
    write_load(tmp_path / "load.npz", np.random.default_rng(0).integers(0, 1000, (8, 3, 8)))
    return tmp_path / "load.npz"


def shell(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eplb_runtime.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# -- in a process of its own ---------------------------------------------------------------------------------------


def test_help_shows_examples_and_waits_for_no_heavy_import() -> None:
    done = shell("simulate", "--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout and "--every 5" in done.stdout
    program = """
import sys
from eplb_runtime.cli.arguments import POLICIES
from eplb_runtime.cli import main
try:
    main(["simulate", "--help"])
except SystemExit:
    print([name for name in ("numpy", "numba", "torch", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[]\n"), done.stdout


def test_a_reader_that_goes_away_causes_no_traceback(load_file: Path) -> None:
    command = [sys.executable, "-m", "eplb_runtime.cli", "plan", str(load_file), *CLUSTER]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write_end)
    assert done.returncode == 141 and done.stderr == ""


# -- in this process -----------------------------------------------------------------------------------------------


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, object]:
    assert main([*map(str, arguments), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


def test_plan_json_has_the_documented_keys(load_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "plan", load_file, *CLUSTER)
    keys = "policy layers experts ranks slots_per_rank imbalance lower_bound moved_slots moved_homes seconds"
    assert list(result) == keys.split()
    assert list(result["imbalance"]) == list(result["lower_bound"]) == ["mean", "max"]  # type: ignore[call-overload]
    assert (result["layers"], result["experts"], result["ranks"], result["slots_per_rank"]) == (3, 8, 4, 3)


def test_simulate_json_has_the_documented_keys(load_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "simulate", load_file, *CLUSTER, "--every", "2", "--policies", "static,incremental")
    assert list(result) == ["policies"]
    for policy in result["policies"]:  # type: ignore[attr-defined]
        keys = "policy balancedness imbalance crossing_share moved_slots_share rebalances plan_seconds step_seconds"
        assert list(policy) == keys.split()
        assert list(policy["balancedness"]) == ["mean", "p5", "min"]
        assert list(policy["imbalance"]) == ["mean", "p95", "max"]


def test_a_plan_travels_to_an_engine_and_back(
    load_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    plan, map_, back = (tmp_path / name for name in ("placement.json", "map.json", "back.json"))
    answer(capsys, "plan", load_file, *CLUSTER, "-o", plan)
    done = answer(capsys, "convert", plan, map_, "--to", "sglang", "--dense-layers", "2")
    assert done["kind"] == "placement" and done["format"] == "sglang" and done["shape"] == [3, 12]
    assert len(json.loads(map_.read_text())["physical_to_logical_map"]) == 5
    command = ["convert", str(map_), str(back), "--ranks", "4"]
    assert "sglang files number each layer of the model: give --dense-layers N" in refused(*command)
    assert main([*command, "--dense-layers", "2"]) == 0
    assert "placement of 3 layers x 12 slots: sglang -> eplb-runtime" in capsys.readouterr().out
    assert Placement.load(back).layout == "free"
    write_load(tmp_path / "all.npz", np.concatenate([np.zeros((8, 2, 8)), np.load(load_file)["load"]], axis=1))
    again = [*CLUSTER, "--current", map_, "--policy", "free"]
    assert "layers" in refused("plan", load_file, *again), "five of the map, three of the load"
    assert answer(capsys, "plan", tmp_path / "all.npz", *again, "--dense-layers", "2")["layers"] == 3


def test_planners_are_measured_on_a_load_file(load_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "bench", "planner", load_file, "--repeats", "1")
    assert {row["planner"] for row in result["planner"]} >= {"deepseek", "free"}  # type: ignore[attr-defined]
    assert main(["bench", "planner", str(load_file), "--repeats", "1"]) == 0
    assert "balancedness" in capsys.readouterr().out


def test_bad_input_is_refused_in_one_line(load_file: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "broken.json").write_text("{")
    few = ["--ranks", "4", "--ranks-per-node", "2", "--slots-per-rank", "1"]
    odd = ["--ranks", "4", "--ranks-per-node", "3", "--slots-per-rank", "3"]
    Placement.initial(1, 8, 2).save(tmp_path / "other.json")
    cases: list[tuple[list[str | Path], str]] = [
        ([], "arguments are required: COMMAND"),
        (["bench"], "arguments are required: WHAT"),
        (["bench", "migrate", "--ranks", "1"], "a whole number above 1"),
        (["bench", "train", "--ranks", "3"], "choose from 1, 2, 4"),
        (["verify"], "verify needs the command that trains"),
        (["verify", "--family", "olmoe"], "unrecognized arguments: --family"),
        (["verify", "--steps", "0"], "whole number above 0"),
        (["assess", load_file, "--step-seconds", "1e99"], "a number above 0, from 2**-53 to 2**53"),
        (["plan", "/nowhere/load.npz", *CLUSTER], "/nowhere/load.npz: cannot be read: No such file or directory"),
        (["plan", load_file], "--ranks, --ranks-per-node, --slots-per-rank"),
        (["plan", load_file, *few], "slots"),
        (["plan", load_file, *odd], "ranks_per_node=3 does not divide num_ranks=4"),
        (["plan", tmp_path / "broken.json", *CLUSTER], "not JSON"),
        (["plan", load_file, *CLUSTER, "--current", tmp_path / "other.json"], "is for 2 ranks, not 4"),
        (["plan", load_file, *CLUSTER, "--dense-layers", "3"], "none would be left"),
        (["convert", tmp_path / "broken.json", tmp_path / "out.json"], "not JSON"),
        (["convert", load_file, tmp_path / "out.yaml"], "tensorrt-llm reads no load file"),
        (["convert", load_file, tmp_path / "out.json"], "the name must end in .npz"),
    ]
    for arguments, says in cases:
        message = refused(*arguments)
        assert says in message and message.startswith("eplb-runtime"), message


# -- What cannot work is said before the work, and nothing is left behind


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["plan", "--policy", "best"], "policy 'best' is unknown; choose one of: static"),
        (["simulate", "--every", "2", "--policies", "static,best"], "policy 'best' is unknown; choose one of: static"),
        (["plan", "-o", "none/p.json"], "none: No such file or directory"),
        (["plan", "-o", "p.txt"], "p.txt: the name must end in .json"),
    ],
)
def test_names_and_places_are_looked_at_before_a_load_is_read(
    load_file: Path, command: list[str], says: str, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setattr(loads, "read_record", lambda *_: pytest.fail("the load was read before this was noticed"))
    monkeypatch.chdir(load_file.parent)
    assert says in refused(command[0], load_file, *CLUSTER, *command[1:])
    assert [path.name for path in load_file.parent.iterdir()] == ["load.npz"]


@pytest.mark.parametrize("policy", ["static", "deepseek", "free", "hierarchical", "incremental"])
def test_more_slots_a_rank_than_experts(policy: str, load_file: Path, refused: Callable[..., str]) -> None:
    cluster = ["--ranks", "2", "--ranks-per-node", "2", "--slots-per-rank", "1000000"]
    assert "give at most 8" in refused("plan", load_file, *cluster, "--policy", policy)
    assert "give 4 to 8 slots per rank" in refused(
        "simulate", load_file, *cluster, "--every", "2", "--policies", policy
    )
