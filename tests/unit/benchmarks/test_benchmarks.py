"""The benchmarks that judge planners: their loads, their judge, other planners beside ours, and what they print."""

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.planner import loads, suite
from benchmarks.planner.__main__ import run
from benchmarks.planner.exact import judge
from benchmarks.planner.suite import Family
from benchmarks.rollouts import run as play

from eplb_runtime.placement import Placement
from eplb_runtime.planner import PlanError
from eplb_runtime.tools.formats.loads import write_load

IN_ORDER = """
import torch

def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus):
    row = torch.arange(num_replicas) % weight.shape[1]
    return row.repeat(weight.shape[0], 1), None, None
"""


def test_the_best_split_is_what_arithmetic_says() -> None:
    pytest.importorskip("scipy")
    # expert 0 on ranks 0 and 1: its 12 tokens level 1 + 12 and 3 to 8 each
    placement = Placement([[0, 1, 2, 0]], 3, 2)
    judged, judged_by = judge(placement, np.array([[[12.0, 1.0, 3.0]]]))
    assert judged_by == "exact" and judged[0, 0] == pytest.approx(1.0)
    judged, _ = judge(placement, np.array([[[2.0, 1.0, 9.0]]]))
    assert judged[0, 0] == pytest.approx(9 / 6), "an expert without replicas stays on its rank"


def test_one_command_measures_all_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_load(tmp_path / "load.npz", np.random.default_rng(0).integers(1, 1000, (2, 3, 16)))
    (tmp_path / "peer.py").write_text(IN_ORDER)
    monkeypatch.setattr(suite, "JUDGED", 3)
    family = Family("AR(1), .9 a window", loads.autoregressive, 16, 4, 1, drifts=True)
    monkeypatch.setattr(suite.run, "__defaults__", ((family,), (1, 2), *suite.run.__defaults__[2:]))
    peer = str(tmp_path / "peer.py")
    result = json.loads(json.dumps(run([str(tmp_path / "load.npz")], 1, (peer,))))
    for shape in (result["plans"][:4], result["plans"][4:]):
        by_planner = {row["planner"]: row for row in shape}
        assert list(by_planner) == ["deepseek", "free", "incremental (home layout)", peer]
        assert by_planner[peer]["balancedness"] < by_planner["deepseek"]["balancedness"]
        assert all(0 < row["balancedness"] <= row["bound"] + 1e-9 for row in shape)
    (drifting,) = result["suite"]
    assert 1 <= drifting["ours"] < drifting["no_planner"] and 0 < drifting["moved"] < 1
    best = min(drifting[name] for name in ("no_planner", "rule", "graph"))
    assert result["behind"] == f"by more than 0.5% in {int(drifting['ours'] > 1.005 * best)} of 1 rows"


def test_a_step_without_doubt_is_played_as_computed_by_hand(tmp_path: Path) -> None:
    """Two ranks of two experts; the busy pair changes with each step, and no order of homes is even but by swaps."""
    np.savez(tmp_path / "load.npz", load=np.array([[[9, 9, 1, 1]], [[1, 1, 9, 9]], [[9, 9, 1, 1]]]))
    result = play([tmp_path / "load.npz"], ranks_of_job=2, micro_batches=1)
    found = {row["policy"]: row for row in result["rollouts"]}
    assert found["static"]["step"] == found["static"]["micro_batch"] == pytest.approx(1.8)
    assert found["declared"]["share"] == pytest.approx(1.0) and found["static"]["of_oracle"] == pytest.approx(1 / 1.8)
    assert found["declared"]["moved_homes"] == 1.0, "two at the first of two decisions, none at the second"
    with pytest.raises(PlanError, match="no two steps of 2 micro-batches"):
        play([tmp_path / "load.npz"], ranks_of_job=2, micro_batches=2)
