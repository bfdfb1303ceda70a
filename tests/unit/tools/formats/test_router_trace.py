"""Megatron's router trace is read as tokens per expert by step and layer, over all ranks and micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_runtime.cli import main
from eplb_runtime.tools.formats.loads import read_load, read_record
from eplb_runtime.tools.formats.reading import FormatError


def line(step: int, layer: int, top_indices: list[list[int]], **more: Any) -> dict[str, Any]:
    """As Megatron-LM writes it."""
    sizes = {"num_tokens": len(top_indices), "topk": 2}
    known = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0}
    return {**known, **sizes, "top_indices": top_indices, **more}


def write(folder: Path, *ranks: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, lines in enumerate(ranks):
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (folder / f"router_trace_rank{rank}.jsonl").write_text(text)
    return folder


def test_tokens_are_summed_over_ranks_and_micro_batches(tmp_path: Path) -> None:
    first = [line(0, 3, [[0, 1], [0, 2]]), line(0, 3, [[3, 1]]), line(1, 3, [[0, 1]])]
    second = [line(0, 3, [[2, 3]]), line(1, 3, [])]
    assert read_load(write(tmp_path, first, second)).tolist() == [[[2, 2, 2, 2]], [[1, 1, 0, 0]]]


def test_layers_of_pipeline_stages_and_of_token_prediction_are_put_in_order(tmp_path: Path) -> None:
    """Layers of multi-token prediction have numbers that layers of the decoder have, too."""
    late = [line(0, 9, [[0, 1]]), line(0, 1, [[2, 3]], block="mtp", mtp_idx=0)]
    early = [line(0, 1, [[1, 2]])]
    load = read_load(write(tmp_path, late, early))
    assert load.tolist() == [[[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]]]


def test_a_step_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, [line(0, 1, [[0, 1]]), line(0, 2, [[0, 1]]), line(1, 1, [[0, 1]])])
    with open(folder / "router_trace_rank0.jsonl", "a") as file:
        file.write(json.dumps(line(1, 2, [[0, 1]]))[:-20])
    assert read_load(folder).shape == (1, 2, 2)


def test_dropped_tokens_and_other_stages_do_not_count(tmp_path: Path) -> None:
    lines = [line(0, 1, [[0, -1], [-1, -1]]), line(0, 1, [[1, 1]], stage="post_dispatch"), line(0, 1, [[1, 0]])]
    assert read_load(write(tmp_path, lines)).tolist() == [[[2, 1]]]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[]", "no line of a router trace (it holds a list)"),
        ("{", "no line of a router trace"),
        ('{"step": 0, "layer": 1}', "a router trace has 'top_indices' in each line"),
        (json.dumps(line(0, 1, [[0, 1], [2]])), "ragged"),
        (json.dumps({**line(0, 1, []), "top_indices": [[0.5]]}), "expert ids"),
        (json.dumps(line(0, 1, [[1 << 40]])), f"expert {1 << 40}"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, content: str, part: str) -> None:
    folder = write(tmp_path, [line(0, 1, [[0, 1]])])
    with open(folder / "router_trace_rank0.jsonl", "a") as file:
        file.write(content + "\n")
    with pytest.raises(FormatError) as caught:
        read_load(folder)
    assert part in str(caught.value) and "router_trace_rank0.jsonl, line 2" in str(caught.value)


def test_some_ranks_alone_of_a_trace_are_refused_where_no_step_is_whole(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="give the files of all ranks"):
        read_load(write(tmp_path, [line(0, 1, [[0, 1]]), line(1, 2, [[0, 1]])]))


def skewed(folder: Path) -> Path:
    """24 steps on four ranks; experts 0 and 1 of eight get most tokens of both layers."""
    generator = np.random.default_rng(0)
    ids = generator.choice(8, (4, 24, 2, 256, 1), p=[0.3, 0.3, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
    ranks = [
        [line(step, layer, ids[rank, step, layer].tolist(), rank=rank) for step in range(24) for layer in range(2)]
        for rank in range(4)
    ]
    return write(folder, *ranks)


def test_a_trace_is_assessed_with_as_many_ranks_as_wrote_it_and_without_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's layers hold none."""
    folder = skewed(tmp_path)
    assert read_record(folder).job.ranks == 4
    assert main(["assess", str(folder), "--json", "--every", "4"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["pays"] is True and shown["imbalance"]["now"] > 2 and shown["imbalance"]["homes"] < 1.5
    assert shown["imbalance"]["replicas"] is None and shown["advice"] == "Next: BalancerConfig(interval=4)"
