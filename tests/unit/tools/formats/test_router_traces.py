"""Megatron's router trace is read as tokens per expert by step and layer, over all ranks and micro-batches."""

from __future__ import annotations

import json
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from eplb_runtime.cli import main
from eplb_runtime.placement import Placement
from eplb_runtime.tools.formats.convert import convert, write_placement
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


# -- slime's rollout data is read as tokens per expert by rollout and layer of the model


def write_slime(path: Path, *samples: Any, tokens: int | None = None) -> Path:
    """As slime's `save_debug_rollout_data` does, with some of what stands beside the routing in a sample."""
    known: dict[str, Any] = {"index": 0, "prompt": "2 + 2?", "response": "4", "status": "completed", "metadata": {}}
    known |= {} if tokens is None else {"tokens": [7] * tokens}
    routed = [{**known, "rollout_routed_experts": chosen} for chosen in samples]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": int(path.stem), "samples": routed}, path)
    return path


def chosen(*tokens: list[list[int]]) -> torch.Tensor:
    """``[tokens, layers, topk]``"""
    return torch.tensor(tokens, dtype=torch.int32)


def test_tokens_are_summed_over_samples_and_rollouts_are_windows_in_their_order(tmp_path: Path) -> None:
    first = write_slime(tmp_path / "2.pt", chosen([[0, 1], [3, 2]], [[1, 2], [0, 1]]), [[[1, 0], [2, 3]]])
    write_slime(tmp_path / "10.pt", chosen([[0, 1], [0, 1]]))
    write_slime(tmp_path / "eval" / "0.pt", chosen([[2, 3], [2, 3]])).rename(tmp_path / "eval_2.pt")
    of_first = [[2, 3, 1, 0], [1, 1, 2, 2]]
    assert read_load(tmp_path).tolist() == [of_first, [[1, 1, 0, 0], [1, 1, 0, 0]]]
    assert read_load(first).tolist() == [of_first]


def test_a_sample_is_counted_in_the_memory_of_another(tmp_path: Path) -> None:
    ids = torch.arange(8, dtype=torch.uint8).repeat(4096, 16, 1)
    file = write_slime(tmp_path / "0.pt", ids, ids)
    read_load(file)
    tracemalloc.start()
    read_load(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < ids.nbytes * 1.5, "tensors are torch's and not traced; a layer at a time is counted"


def test_dense_layers_have_no_load_and_can_be_left_out(tmp_path: Path) -> None:
    file = write_slime(tmp_path / "0.pt", chosen([[0, 0], [0, 1]], [[0, 0], [2, 0]]))
    assert read_load(file).tolist() == [[[0, 0, 0], [2, 1, 1]]]
    assert read_load(file, dense_layers=1).shape == (1, 1, 3)
    one_choice = write_slime(tmp_path / "1.pt", chosen([[0], [1]]))
    assert read_load(one_choice).tolist() == [[[1, 0], [0, 1]]]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([None], "sample 0 has no rollout_routed_experts: start slime with --use-rollout-routing-replay"),
        ([], "rollout 0 has no samples"),
        ([chosen([[0, 1]]), chosen([[0, 1], [0, 1]])], "sample 1 has 2 layers, those before have 1"),
        ([torch.zeros(3, 2, dtype=torch.int32)], r"must be \[tokens, layers, topk\] of expert ids"),
        ([chosen([[0, -1]])], "experts -1 to 0"),
        ([chosen([[0, 1 << 20]])], "experts 0 to 1048576"),
        (["/shm/routing.0"], "sample 0: rollout_routed_experts is a str"),
        ([Fraction(1, 2)], r"not a torch file of tensors and plain values \(it holds a fractions\.Fraction\)$"),
    ],
)
def test_what_is_no_routing_is_one_line(tmp_path: Path, samples: list[Any], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        read_load(write_slime(tmp_path / "0.pt", *samples))


def test_arrays_are_read_and_a_sample_a_row_short_is_named(tmp_path: Path) -> None:
    assert read_load(write_slime(tmp_path / "0.pt", np.uint8([[[0, 1]]]), tokens=2)).tolist() == [[[1, 1]]]
    with pytest.raises(FormatError, match="sample 0 has 1 rows of rollout_routed_experts and 3 tokens"):
        read_load(write_slime(tmp_path / "0.pt", chosen([[0, 1]]), tokens=3))


def test_rollouts_of_different_models_are_one_line(tmp_path: Path) -> None:
    write_slime(tmp_path / "0.pt", chosen([[0, 1]]))
    write_slime(tmp_path / "1.pt", chosen([[0, 1], [0, 1]]))
    with pytest.raises(FormatError, match="rollout 1 has 2 layers, the first 1"):
        read_load(tmp_path)
    torch.save({"weights": torch.zeros(2)}, tmp_path / "1.pt")
    with pytest.raises(FormatError, match="of different kinds"):
        read_load(tmp_path)


def test_assess_takes_a_folder_of_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    hot = rng.dirichlet(np.full(16, 0.3), 2)
    for rollout in range(12):
        ids = np.stack([[rng.choice(16, 2, replace=False, p=layer) for layer in hot] for _ in range(200)])
        write_slime(tmp_path / f"{rollout}.pt", torch.from_numpy(ids))
    assert read_record(tmp_path).job.takes_no_replicas
    assert main(["assess", str(tmp_path), "--ranks", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "homes alone are tried. 4 ranks: the busiest rank has" in shown
    assert main(["assess", str(tmp_path), "--ranks", "3", "--experts", "18"]) == 0, "two were never chosen"
    assert "3 ranks: the busiest rank has" in " ".join(capsys.readouterr().out.split())


# -- 61 layers meet 58: leading dense layers are left out, put back, or asked for; never taken for MoE layers


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
