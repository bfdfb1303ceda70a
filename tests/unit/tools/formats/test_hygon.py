"""Hygon's offline maps are read: version 2 with a map for each model, and one map alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eplb_runtime.tools.formats.convert import ConvertError, convert, read_placement

ROWS = [[1, 0, 2, 1], [0, 2, 1, 0]]


def entry(name: str = "Target", rows: Any = ROWS, **more: Any) -> dict[str, Any]:
    return {
        "model_name": "/models/x",
        "model_class": name,
        "num_moe_layers": len(rows),
        "num_logical_experts": 3,
        "num_physical_experts": 4,
        "num_redundant_experts": 1,
        "physical_to_logical_map": rows,
        **more,
    }


def write(folder: Path, content: Any) -> Path:
    (folder / "hygon.json").write_text(json.dumps(content))
    return folder / "hygon.json"


@pytest.mark.parametrize(
    "content",
    [
        {"version": 2, "model_maps": {"Target": entry()}},
        {
            "version": 2,
            "format": "vllm_offline_eplb_physical_to_logical_by_model",
            "model_maps": {"Target": entry(record_kind="proposal")},
        },
        entry(version=1, format="vllm_offline_eplb_physical_to_logical"),
        {"model_class": "Target", "expert_map": ROWS},
    ],
    ids=["version 2", "with its format", "one map alone", "older key"],
)
def test_a_map_is_read(tmp_path: Path, content: dict[str, Any]) -> None:
    path = write(tmp_path, content)
    done = convert(path, tmp_path / "own.json", num_ranks=2)
    assert (done.source_format, done.kind, done.shape) == ("hygon", "placement", (2, 4))
    placement = read_placement(path, 2)
    assert placement.physical_to_logical.tolist() == ROWS and placement.num_experts == 3


def test_of_several_models_one_is_chosen(tmp_path: Path) -> None:
    path = write(
        tmp_path, {"version": 2, "model_maps": {"Target": entry(), "TargetMTP": entry("TargetMTP", [[2, 1, 0, 0]])}}
    )
    with pytest.raises(ConvertError, match="holds maps of several models, 'Target', 'TargetMTP': give --model NAME"):
        convert(path, tmp_path / "own.json", num_ranks=2)
    assert convert(path, tmp_path / "own.json", num_ranks=2, model="TargetMTP").shape == (1, 4)
    assert read_placement(path, 2, model="Target").physical_to_logical.tolist() == ROWS
    with pytest.raises(ConvertError, match="holds no model 'Draft', only 'Target', 'TargetMTP'"):
        read_placement(path, 2, model="Draft")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"version": 2, "model_maps": {}}, "holds no model"),
        ({"version": 2, "model_maps": [1]}, "holds no model"),
        ({"version": 2, "model_maps": {"a": 1}}, 'a model without "physical_to_logical_map"'),
        ({"version": 2, "model_maps": {"a": entry(num_moe_layers=58)}}, "it says 58 MoE layers, its map has 2"),
        ({"version": 2, "model_maps": {"a": entry(num_logical_experts=4)}}, "expert 3 stands in no slot"),
        ({"version": 2, "model_maps": {"a": entry(num_logical_experts=2)}}, "no such expert"),
        ({"version": 2, "model_maps": {"a": entry(rows=[[0, "b"]])}}, "holds str"),
    ],
)
def test_a_broken_map_is_one_line(tmp_path: Path, content: dict[str, Any], says: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ValueError) as refusal:
        convert(path, tmp_path / "own.json", num_ranks=2)
    assert str(refusal.value).startswith(f"{path}: ") and says in str(refusal.value) and "\n" not in str(refusal.value)


def test_an_sglang_map_stays_sglangs(tmp_path: Path) -> None:
    path = write(tmp_path, {"physical_to_logical_map": ROWS})
    assert convert(path, tmp_path / "own.json", num_ranks=2).source_format == "sglang"
