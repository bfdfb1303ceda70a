"""61 layers meet 58: leading dense layers are left out, put back, or asked for; never taken for MoE layers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from eplb_runtime.cli import main
from eplb_runtime.placement import Placement
from eplb_runtime.tools.formats.convert import convert, read_placement, write_placement
from eplb_runtime.tools.formats.loads import read_load, write_load
from eplb_runtime.tools.formats.reading import FormatError

PLACEMENT = Placement([[3, 1, 2, 0], [1, 0, 3, 2]], 4, 2)


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    """A map of five layers, of which the first three are dense."""
    write_placement(tmp_path / "sglang.json", PLACEMENT, "sglang", dense_layers=3)
    return tmp_path / "sglang.json"


ASKED = r": sglang files have a row for each layer of the model: give --dense-layers N, .* \(0: none\)"


@pytest.mark.parametrize(("to", "name"), [("eplb-runtime", "o.json"), ("vllm", "o.json"), (None, "o.yaml")])
def test_dense_layers_of_an_sglang_map_are_asked_for(sglang: Path, to: str | None, name: str) -> None:
    out = sglang.with_name(name)
    with pytest.raises(FormatError, match=ASKED):
        convert(sglang, out, to=to, num_ranks=2)
    assert not out.exists()
    assert convert(sglang, out, to=to, num_ranks=2, dense_layers=3).shape == (2, 4)
    assert convert(sglang, out, to=to, num_ranks=2, dense_layers=0).shape == (5, 4)


def test_from_sglang_to_sglang_every_row_stays(sglang: Path) -> None:
    convert(sglang, sglang.with_name("o.pt"), num_ranks=2)
    convert(sglang.with_name("o.pt"), sglang.with_name("p.json"), to="sglang", num_ranks=2)
    assert sglang.with_name("p.json").read_text() == sglang.read_text()


def test_dense_layers_of_a_load_are_asked_for(tmp_path: Path) -> None:
    load = np.concatenate([np.zeros((2, 3, 4)), np.ones((2, 2, 4))], axis=1)
    (tmp_path / "dump.json").write_text(json.dumps({"logical_count": load.tolist()}))
    with pytest.raises(FormatError, match=ASKED):
        convert(tmp_path / "dump.json", tmp_path / "load.npz")
    assert convert(tmp_path / "dump.json", tmp_path / "load.npz", dense_layers=3).shape == (2, 2, 4)
    assert convert(tmp_path / "dump.json", tmp_path / "load.npz", dense_layers=0).shape == (2, 5, 4)
    assert convert(tmp_path / "dump.json", tmp_path / "dump.pt").shape == (2, 5, 4)
    write_load(tmp_path / "busy.npz", np.ones((2, 2, 4)))
    assert convert(tmp_path / "busy.npz", tmp_path / "busy.json", to="sglang", dense_layers=3).shape == (2, 2, 4)
    assert read_load(tmp_path / "busy.json").shape == (2, 5, 4)


def test_tensorrt_llm_says_itself_where_its_layers_stand(tmp_path: Path) -> None:
    write_placement(tmp_path / "map.yaml", PLACEMENT, "tensorrt-llm", dense_layers=3)
    convert(tmp_path / "map.yaml", tmp_path / "sglang.json", to="sglang", num_ranks=2)
    assert len(json.loads((tmp_path / "sglang.json").read_text())["physical_to_logical_map"]) == 5
    convert(tmp_path / "map.yaml", tmp_path / "again.yaml", num_ranks=2)
    assert (tmp_path / "again.yaml").read_text() == (tmp_path / "map.yaml").read_text()
    assert convert(tmp_path / "map.yaml", tmp_path / "own.json", num_ranks=2).shape == (2, 4)
    with pytest.raises(FormatError, match="its first MoE layer has number 3: leave --dense-layers out, or give 3"):
        convert(tmp_path / "map.yaml", tmp_path / "sglang.json", to="sglang", num_ranks=2, dense_layers=2)


def test_whoever_writes_numbers_without_saying_where_they_start_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PLACEMENT.save(tmp_path / "own.json")
    write_placement(tmp_path / "sglang.json", PLACEMENT, "sglang")
    command = ["convert", str(tmp_path / "own.json"), str(tmp_path / "o.yaml")]
    for options, told in (([], True), (["--dense-layers", "0"], False), (["--dense-layers", "3"], False)):
        assert main([*command, *options]) == 0
        assert ("give --dense-layers N if N dense layers come first" in capsys.readouterr().err) is told
    assert main(["convert", str(tmp_path / "sglang.json"), str(tmp_path / "o.yaml"), "--dense-layers", "0"]) == 0
    assert capsys.readouterr().err == "", "an SGLang map has a row for every layer"


def test_moe_layers_with_others_between_are_not_given_wrong_numbers(tmp_path: Path) -> None:
    rows = {1: [0, 1], 3: [1, 0], 5: [0, 1]}
    (tmp_path / "every_other.yaml").write_text(yaml.safe_dump({"initial_global_assignments": rows}))
    for name, to in (("o.json", "sglang"), ("o.yaml", None)):
        with pytest.raises(FormatError, match=r"its MoE layers 1, 3, 5, \.\.\. do not follow each other"):
            convert(tmp_path / "every_other.yaml", tmp_path / name, to=to, num_ranks=2)
    assert read_placement(tmp_path / "every_other.yaml", 2).num_layers == 3
