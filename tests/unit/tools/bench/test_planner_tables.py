"""The tables of the planner's README are made by one command, and the README holds the rows that it makes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import eplb_runtime
from eplb_runtime.planner import CostModel
from eplb_runtime.tools.bench import families, next_windows, per_batch, planner, tables, workloads
from eplb_runtime.tools.bench.families import FAMILIES, Family
from eplb_runtime.tools.bench.per_batch import EXPONENTS, Sweep
from eplb_runtime.tools.bench.workloads import NAMES

README = (Path(eplb_runtime.__file__).parent / "planner" / "README.md").read_text()
DRAWN = {
    "autoregressive": workloads.autoregressive,
    "rotating": workloads.rotating,
    "shifting": workloads.shifting,
    "jumping": workloads.jumping,
    "near_uniform": workloads.near_uniform,
    "hash_layers": workloads.hash_layers,
}


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]


def test_one_command_makes_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.random.default_rng(0).integers(1, 1000, (1, 2, 16)).astype(float)
    monkeypatch.setattr(planner, "generated_loads", lambda: {"2 x 16": drawn})
    monkeypatch.setattr(next_windows, "SHAPES", ((8, 2),))
    monkeypatch.setattr(next_windows, "NAMES", {"W2 hot rank": ""})
    monkeypatch.setattr(next_windows, "JUDGED", 2)
    monkeypatch.setattr(families, "JUDGED", 3)
    suite = (
        Family("AR(1), .9 a window", workloads.autoregressive, 16, 4, 1, drifts=True),
        Family("K3-like, near uniform", workloads.near_uniform, 16, 4, 0),
    )
    sweep = Sweep(ranks=4, experts=8, layers=1, judged=1, seeds=(1,))
    said: list[str] = []
    result = json.loads(json.dumps(tables.run(repeats=1, suite=(suite, (1, 2), sweep), on_progress=said.append)))
    assert said
    text = tables.markdown(result)
    assert first_cells(text) == [
        *("shape", "---", "2 x 16, EP4, 16 slots", "2 x 16, EP4, 20 slots"),
        *("load", "---", "normal(1, .3), EP8, 2 copies a rank", "W2 hot rank, EP8, 2 copies a rank"),
        *("load", "---", *(tables.suite_label(one.name, 16, 4, one.replicas) for one in suite)),
        *("Zipf", "---", *(f"{exponent:g}" for exponent in EXPONENTS)),
    ]
    drifting, steady = result["suite"]
    assert drifting["drifts"] and 1 <= drifting["ours"] < drifting["no_planner"]
    assert drifting["moved"] < drifting["deepseek_moved"]
    assert steady["ours"] <= steady["ours_worst"] and "a window" not in text.splitlines()[-13]
    for row in result["per_batch"]:
        assert 1 <= row["per_batch"] <= row["no_copies"] + 1e-6
        assert row["jitter"] or row["persistent"] < row["per_batch"] + 0.1


def test_a_peer_takes_the_place_of_what_is_cited() -> None:
    row = {"load": "x", "layers": 58, "experts": 256, "ranks": 32, "slots": 288, "groups": 1, "balancedness": 0.9}
    ours, theirs = row | {"planner": "deepseek", "ms": 3.0}, row | {"planner": "vllm", "ms": 36.0}
    (cited,), (measured,) = tables.plans([ours]), tables.plans([ours, theirs])
    assert cited["DeepSeek, SGLang, vLLM: ms (cited)"] == "813 / 47 / 35"
    assert measured["DeepSeek, SGLang, vLLM: ms (cited)"] == "vllm: 0.900, 36 ms"


def test_the_readme_has_every_row() -> None:
    shapes = [(58, 256), (24, 32), (96, 1024)]
    wanted = [
        *(tables.plan_label(*sizes, shape) for sizes in shapes for shape in planner.shapes_for(sizes[1])),
        *(tables.next_label("normal(1, .3)", ranks, replicas) for ranks, replicas in next_windows.SHAPES),
        *(tables.next_label(name, 8, 2) for name in NAMES),
        *(tables.suite_label(one.name, one.experts, one.ranks, one.replicas) for one in FAMILIES),
        *(f"{exponent:g}" for exponent in EXPONENTS),
    ]
    rows = first_cells(README)
    assert [label for label in wanted if label not in rows] == []
    assert {zipf for zipf in rows if zipf.replace(".", "").isdigit()} <= {f"{one:g}" for one in EXPONENTS}


@pytest.mark.parametrize("name", DRAWN)
def test_a_load_of_the_suite_is_repeatable_and_whole(name: str) -> None:
    load = DRAWN[name](16, 2, 64, 3)
    assert np.array_equal(load, DRAWN[name](16, 2, 64, 3))
    assert not np.array_equal(load, DRAWN[name](16, 2, 64, 4))
    assert load.shape == (16, 2, 64) and (load == np.floor(load)).all() and (load >= 0).all()
    assert load.mean() == pytest.approx(workloads.TOKENS_OF_SUITE, rel=0.05)


def test_loads_of_the_suite_differ_in_what_they_are_for() -> None:
    def likeness(load: np.ndarray, lag: int) -> float:
        share = load[:, 0] / load[:, 0].mean(axis=1, keepdims=True)
        return float(np.corrcoef(share[-1 - lag], share[-1])[0, 1])

    wandering = workloads.autoregressive(24, 1, 256, 1)
    assert likeness(wandering, 1) > 0.8 > 0.6 > likeness(wandering, 12)
    regimes = workloads.rotating(33, 1, 256, 1)
    assert likeness(regimes, 16) > 0.95 > 0.3 > likeness(regimes, 8)
    shifted = workloads.shifting(20, 1, 256, 1)
    assert likeness(shifted, 4) > 0.95 > 0.3 > likeness(shifted, 8)
    hot = workloads.jumping(12, 1, 64, 1)[:, 0]
    assert (hot.max(axis=1) / hot.sum(axis=1)).min() > 0.11 and len(set(hot.argmax(axis=1).tolist())) > 6
    share = workloads.dominated(4, 2, 64, 0.3, 1).max(axis=2) / workloads.dominated(4, 2, 64, 0.3, 1).sum(axis=2)
    assert share == pytest.approx(0.3, abs=0.02)
    near = workloads.near_uniform(8, 16, 896, 1).reshape(8, 16, 16, 56).sum(axis=3)
    assert np.median(near.max(axis=2) / near.mean(axis=2)) == pytest.approx(1.069, abs=0.015), "K3's, as reported"
    tokens = workloads.hash_layers(2, 1, 256, 1)[0, 0]
    assert 3 < tokens.max() / tokens.mean() < 8


def test_copies_for_a_batch_leave_homes_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = Sweep(ranks=8, experts=32, replicas=1, layers=1, judged=1, seeds=(1,))
    monkeypatch.setattr(per_batch, "JITTERS", (0.3,))
    (row,) = per_batch.run(sweep, exponents=(1.0,))
    assert row["per_batch"] < 1.2 < row["no_copies"]
    monkeypatch.setattr(per_batch, "HOMES_STAY", CostModel(home_bytes=1, step_seconds=1.0))
    with pytest.raises(RuntimeError, match="a home moved"):
        per_batch.run(sweep, exponents=(1.0,))
