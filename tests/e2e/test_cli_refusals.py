"""What cannot work is said in one line, before the work, with status 2; and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eplb_runtime.cli import main
from eplb_runtime.placement import Placement
from eplb_runtime.tools.formats import loads
from eplb_runtime.tools.formats.convert import write_placement
from eplb_runtime.tools.formats.loads import write_load

CLUSTER = ["--ranks", "2", "--ranks-per-node", "2", "--slots-per-rank", "3"]
LOAD = np.random.default_rng(0).integers(1, 100, (6, 2, 4))


@pytest.fixture
def load_file(tmp_path: Path) -> Path:
    write_load(tmp_path / "load.npz", LOAD)
    return tmp_path / "load.npz"


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str | Path) -> str:
        try:
            status = main([*map(str, arguments)])
        except SystemExit as stop:
            status = int(stop.code or 0)
        said = capsys.readouterr()
        assert status == 2 and said.out == "" and said.err.count("\n") == 1, said
        return said.err

    return run


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a load has begun to work."""

    def began(*arguments: object) -> None:
        raise AssertionError("the load was read before this was noticed")

    monkeypatch.setattr(loads, "read_record", began)


# -- sizes that do not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["static", "deepseek", "free", "hierarchical", "incremental"])
def test_more_slots_a_rank_than_experts(refusal: Callable[..., str], load_file: Path, policy: str) -> None:
    cluster = ["--ranks", "2", "--ranks-per-node", "2", "--slots-per-rank", "1000000"]
    assert "give at most 4" in refusal("plan", load_file, *cluster, "--policy", policy)
    assert "give at most 4" in refusal("simulate", load_file, *cluster, "--every", "2", "--policies", policy)


# -- files ---------------------------------------------------------------------------------------------------------


# -- noticed before the work ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["plan", "--policy", "best"], "policy 'best' is unknown; choose one of: static"),
        (["simulate", "--every", "2", "--policies", "static,best"], "policy 'best' is unknown; choose one of: static"),
        (["plan", "-o", "none/p.json"], "none: No such file or directory"),
        (["plan", "-o", "p.txt"], "p.txt: the name must end in .json"),
    ],
)
def test_names_and_places_are_looked_at_first(
    refusal: Callable[..., str],
    load_file: Path,
    command: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refusal(command[0], load_file, *CLUSTER, *command[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["load.npz"]


# -- 61 layers meet 58 ---------------------------------------------------------------------------------------------


def test_dense_layers_are_left_out_of_a_load_and_of_an_engines_map(
    refusal: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_placement(tmp_path / "sglang.json", Placement.initial(2, 4, 2, replica_slots=1), "sglang", dense_layers=3)
    write_load(tmp_path / "all.npz", np.concatenate([np.zeros((6, 3, 4)), LOAD], axis=1))
    command = ["plan", str(tmp_path / "all.npz"), *CLUSTER, "--current", str(tmp_path / "sglang.json")]
    assert main([*command, "--policy", "free", "--dense-layers", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 2
    write_load(tmp_path / "moe.npz", LOAD)
    other = ["plan", tmp_path / "moe.npz", *CLUSTER, "--policy", "free", "--current", tmp_path / "sglang.json"]
    assert "layers" in refusal(*other)
