"""Questions to the planner that cannot be answered, or whose answer would be wrong in silence: one line each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_runtime.cli import main
from eplb_runtime.load.series import read_series
from eplb_runtime.observe.recording import Recorder
from eplb_runtime.planner import CostModel, PlanError, plan
from eplb_runtime.topology import Topology
from eplb_runtime.utils.files import FileError

SIZES = ["--ranks", "4", "--ranks-per-node", "4", "--slots-per-rank", "2"]
LOAD = np.arange(1.0, 17.0).reshape(2, 8)


def asked(**terms: Any) -> Any:
    given: dict[str, Any] = {"load": LOAD, "topology": Topology(4), "slots_per_rank": 2, **terms}
    return plan(given.pop("load"), given.pop("topology"), **given)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a number for a topology": ({"topology": 4}, "topology is a int: give a Topology"),
    "a dict for costs": ({"cost": {"home_bytes": 1}}, "cost is a dict: give a CostModel"),
    "a list of policies": ({"policy": ["static"]}, "is unknown; choose one of"),
    "a policy of earlier releases": ({"policy": "swaps"}, "choose incremental, or deepseek with layout='home'"),
    "ragged speeds": ({"rank_speed": [1, 1, 1, [2]]}, "rank_speed is not an array"),
    "speeds that are trained": ({"rank_speed": torch.ones(4, requires_grad=True)}, "rank_speed is not an array"),
    "numbers beyond float64": ({"load": [[10**400] * 8] * 2}, "load is not an array of numbers"),
    "masked counts": ({"load": np.ma.masked_less(LOAD, 3.0)}, "masked entries: fill them in"),
    "three speeds": ({"rank_speed": [1.0] * 3}, "each of 4 ranks"),
    "a rank that stands still": ({"rank_speed": [1.0, 1.0, 1.0, 0.0]}, "above 0"),
    "speeds for free": ({"rank_speed": [1.0, 1.0, 1.0, 2.0], "policy": "free"}, "equally fast"),
    "no layers": ({"load": LOAD[0]}, "shape"),
    "experts that ranks do not divide": ({"load": LOAD[:, :6]}, "evenly"),
    "letters": ({"load": [["a"] * 8]}, "numbers"),
    "no number": ({"load": LOAD * [1, float("nan"), *[1] * 6]}, "layer 0, expert 1"),
    "no end": ({"load": LOAD * [1, 1, float("inf"), *[1] * 5]}, "layer 0, expert 2"),
    "less than nothing": ({"load": LOAD - 2}, "layer 0, expert 0"),
    "complex counts": ({"load": LOAD * 1j}, "not an array of numbers"),
    "nan moves": ({"max_moves": float("nan")}, "max_moves=nan: give a whole number"),
    "half a move": ({"max_moves": 2.5}, "max_moves=2.5: give a whole number"),
    "moves from nothing": ({"max_moves": 3}, "limit moves from a current placement"),
    "a list of experts": ({"current": [[0, 1, 2, 3]]}, "current is a list: give a Placement"),
    "slots as a float": ({"slots_per_rank": 2.0}, "slots_per_rank=2.0: give a whole number"),
    "loads whose squares overflow": ({"load": LOAD * 1e155}, "too much to add up"),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_line_says_what_is_wrong(case: str) -> None:
    terms, expected = WRONG[case]
    with pytest.raises(PlanError) as raised:
        asked(**terms)
    assert expected in str(raised.value) and "\n" not in str(raised.value)


def test_bytes_that_the_layout_does_not_count_are_no_limit_and_refused() -> None:
    current = plan(LOAD, Topology(4), slots_per_rank=3, policy="free").placement
    terms: dict[str, Any] = {"policy": "free", "slots_per_rank": 3, "current": current, "max_bytes": 0}
    with pytest.raises(PlanError, match="replica_bytes"):
        asked(**terms, cost=CostModel(home_bytes=100))
    assert len(asked(**terms, load=LOAD[:, ::-1], cost=CostModel(replica_bytes=10)).moves) == 0


def test_what_is_nearly_a_load_is_one() -> None:
    slots = asked().placement.physical_to_logical.tolist()
    for load in (np.ma.array(LOAD, mask=False), torch.tensor(LOAD, dtype=torch.bfloat16, requires_grad=True)):
        assert asked(load=load).placement.physical_to_logical.tolist() == slots


def test_a_share_is_no_more_than_the_step() -> None:
    assert CostModel(moe_share=1.0).moe_share == 1.0
    with pytest.raises(ValueError, match=r"moe_share=1\.5: give a share of the step"):
        CostModel(moe_share=1.5)
    with pytest.raises(ValueError, match="give all three for one step"):
        CostModel(step_seconds=1e-310, crossing_seconds=1.0)


def test_plain_python_plans_what_compiled_code_does() -> None:
    """``NUMBA_DISABLE_JIT=1`` is how one debugs the planner."""
    script = (
        "import numpy as np; from eplb_runtime import Placement, Topology, plan; "
        "load = 1e3 * np.random.default_rng(0).lognormal(0, 0.8, (3, 1, 6)); current = Placement.initial(1, 6, 3, 1); "
        "made = [plan(load, Topology(3), slots_per_rank=3, current=current, max_moves=most) for most in (None, 2)]; "
        "print([one.placement.physical_to_logical.tolist() for one in made])"
    )
    plain, compiled = (
        subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            env={**os.environ, "NUMBA_DISABLE_JIT": off},
            capture_output=True,
            text=True,
            check=False,
        )
        for off in ("1", "0")
    )
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout == compiled.stdout != ""


@pytest.mark.parametrize("steps", [0, -3, 2.5, True, "7", 10**30])
def test_a_window_is_of_whole_steps(tmp_path: Path, steps: Any) -> None:
    record(tmp_path, np.ones((2, 1, 4), dtype=np.int64))
    file = next(tmp_path.rglob("*.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[-1]["steps"] = steps
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(FileError, match=r"steps is .*: a window is of 1 or more training steps"):
        read_series(tmp_path)


def record(folder: Path, load: np.ndarray) -> None:
    series = Recorder(folder, load.shape[1], load.shape[2])
    series.write(load, 5)
    series.close()


@pytest.mark.parametrize("command", [["plan"], ["simulate", "--every", "2"]])
def test_a_load_without_tokens_is_not_balanced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    np.savez(tmp_path / "none.npz", load=np.zeros((6, 2, 8)))
    assert main([*command, str(tmp_path / "none.npz"), *SIZES]) == 2
    assert "no token was counted" in capsys.readouterr().err


def test_windows_without_tokens_are_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = np.random.default_rng(0).gamma(1.0, size=(12, 2, 8)).round(3) * 1000
    gaps = np.concatenate([load[:8], np.zeros((6, 2, 8)), load[8:]])
    found = []
    for name, of in (("load", load), ("gaps", gaps)):
        np.savez(tmp_path / f"{name}.npz", load=of)
        given = [str(tmp_path / f"{name}.npz"), *SIZES, "--every", "2", "--policies", "static", "--json"]
        assert main(["simulate", *given]) in (None, 0)
        said = capsys.readouterr()
        found.append(json.loads(said.out))
    assert "6 of 18 windows have no tokens and are left out" in said.err
    one, other = ([run["imbalance"] for run in each["policies"]] for each in found)
    assert one == other
