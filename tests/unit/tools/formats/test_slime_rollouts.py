"""slime's rollout data is read as tokens per expert by rollout and layer of the model."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_runtime.cli import main
from eplb_runtime.tools.formats.loads import read_load, read_record
from eplb_runtime.tools.formats.reading import FormatError


def write(path: Path, *samples: Any, tokens: int | None = None) -> Path:
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
    first = write(tmp_path / "2.pt", chosen([[0, 1], [3, 2]], [[1, 2], [0, 1]]), [[[1, 0], [2, 3]]])
    write(tmp_path / "10.pt", chosen([[0, 1], [0, 1]]))
    write(tmp_path / "eval" / "0.pt", chosen([[2, 3], [2, 3]])).rename(tmp_path / "eval_2.pt")
    of_first = [[2, 3, 1, 0], [1, 1, 2, 2]]
    assert read_load(tmp_path).tolist() == [of_first, [[1, 1, 0, 0], [1, 1, 0, 0]]]
    assert read_load(first).tolist() == [of_first]


def test_dense_layers_have_no_load_and_can_be_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "0.pt", chosen([[0, 0], [0, 1]], [[0, 0], [2, 0]]))
    assert read_load(file).tolist() == [[[0, 0, 0], [2, 1, 1]]]
    assert read_load(file, dense_layers=1).shape == (1, 1, 3)
    one_choice = write(tmp_path / "1.pt", chosen([[0], [1]]))
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
        read_load(write(tmp_path / "0.pt", *samples))


def test_arrays_are_read_and_a_sample_a_row_short_is_named(tmp_path: Path) -> None:
    assert read_load(write(tmp_path / "0.pt", np.uint8([[[0, 1]]]), tokens=2)).tolist() == [[[1, 1]]]
    with pytest.raises(FormatError, match="sample 0 has 1 rows of rollout_routed_experts and 3 tokens"):
        read_load(write(tmp_path / "0.pt", chosen([[0, 1]]), tokens=3))


def test_rollouts_of_different_models_are_one_line(tmp_path: Path) -> None:
    write(tmp_path / "0.pt", chosen([[0, 1]]))
    write(tmp_path / "1.pt", chosen([[0, 1], [0, 1]]))
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
        write(tmp_path / f"{rollout}.pt", torch.from_numpy(ids))
    assert read_record(tmp_path).job.takes_no_replicas
    assert main(["assess", str(tmp_path), "--ranks", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "homes alone are tried. 4 ranks: the busiest rank has" in shown
    assert main(["assess", str(tmp_path), "--ranks", "3", "--experts", "18"]) == 0, "two were never chosen"
    assert "3 ranks: the busiest rank has" in " ".join(capsys.readouterr().out.split())
