"""61 layers meet 58: leading dense layers are left out, put back, or asked for; never taken for MoE layers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from eplb_runtime.placement import Placement
from eplb_runtime.tools.formats.convert import convert, write_placement
from eplb_runtime.tools.formats.reading import FormatError

PLACEMENT = Placement([[3, 1, 2, 0], [1, 0, 3, 2]], 4, 2)


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    """A map of five layers, of which the first three are dense."""
    write_placement(tmp_path / "sglang.json", PLACEMENT, "sglang", dense_layers=3)
    return tmp_path / "sglang.json"


ASKED = r": sglang files number each layer of the model: give --dense-layers N, .* \(0: none\)"


@pytest.mark.parametrize(("to", "name"), [("eplb-runtime", "o.json"), ("vllm", "o.json"), (None, "o.yaml")])
def test_dense_layers_of_an_sglang_map_are_asked_for(sglang: Path, to: str | None, name: str) -> None:
    out = sglang.with_name(name)
    with pytest.raises(FormatError, match=ASKED):
        convert(sglang, out, to=to, num_ranks=2)
    assert not out.exists()
    assert convert(sglang, out, to=to, num_ranks=2, dense_layers=3).shape == (2, 4)
    assert convert(sglang, out, to=to, num_ranks=2, dense_layers=0).shape == (5, 4)


def test_dense_layers_of_a_load_are_asked_for(tmp_path: Path) -> None:
    load = np.concatenate([np.zeros((2, 3, 4)), np.ones((2, 2, 4))], axis=1)
    (tmp_path / "dump.json").write_text(json.dumps({"logical_count": load.tolist()}))
    with pytest.raises(FormatError, match=ASKED):
        convert(tmp_path / "dump.json", tmp_path / "load.npz")
    assert convert(tmp_path / "dump.json", tmp_path / "load.npz", dense_layers=3).shape == (2, 2, 4)
    assert convert(tmp_path / "dump.json", tmp_path / "load.npz", dense_layers=0).shape == (2, 5, 4)


def test_where_numbers_start_is_asked_for_where_they_are_written(tmp_path: Path) -> None:
    PLACEMENT.save(tmp_path / "own.json")
    with pytest.raises(
        FormatError, match=r": tensorrt-llm files number each layer of the model: give --dense-layers N"
    ):
        convert(tmp_path / "own.json", tmp_path / "o.yaml")
    convert(tmp_path / "own.json", tmp_path / "o.yaml", dense_layers=3)
    assert list(yaml.safe_load((tmp_path / "o.yaml").read_text())["initial_global_assignments"]) == [3, 4]
