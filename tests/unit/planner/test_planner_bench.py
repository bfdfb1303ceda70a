"""The planner benchmark: its rows, its generator, and planners of other people."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eplb_runtime.planner import PlanError, bench
from eplb_runtime.planner.peers import load_peer
from eplb_runtime.planner.policies.deepseek import balance

PEER = """
import numpy as np
from .{helper} import copies

class Policy:
    @classmethod
    def rebalance_experts(cls, weight, num_replicas, num_groups, num_nodes, num_ranks, old=None):
        assert weight.shape[1] <= num_replicas
        return copies(weight, num_replicas)
"""
HELPER = """
import torch

def copies(weight, slots):
    return torch.arange(slots).remainder(weight.shape[1]).expand(len(weight), slots)
"""


def test_rows_of_a_load_file_with_a_peer_from_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "load.npz", load=bench.synthetic_load(3, 32, 0.6))
    (tmp_path / "their_helper.py").write_text(HELPER)
    (tmp_path / "theirs.py").write_text(PEER.format(helper="their_helper"))
    result = bench.run([tmp_path / "load.npz"], [str(tmp_path / "theirs.py")], 1)
    assert json.loads(json.dumps(result)) == result
    by_planner: dict[str, list[float]] = {}
    for row in result["planners"]:
        assert row["balancedness"] <= row["bound"] + 1e-3
        by_planner.setdefault(row["planner"], []).append(row["balancedness"])
    assert set(by_planner) == {"deepseek", "free", "theirs"}
    assert np.mean(by_planner["free"]) >= np.mean(by_planner["deepseek"]) > np.mean(by_planner["theirs"])


def test_generated_loads_repeat_and_have_the_skew_they_are_calibrated_to() -> None:
    load = bench.synthetic_load(58, 256, 0.73)
    assert np.array_equal(load, bench.synthetic_load(58, 256, 0.73))
    assert np.mean(load.std(axis=1) / load.mean(axis=1)) == pytest.approx(0.84, abs=0.05)
    assert np.mean(load.max(axis=1) / load.mean(axis=1)) == pytest.approx(6.0, abs=0.8)


def test_a_peer_with_deepseeks_signature_gets_deepseeks_arguments(tmp_path: Path) -> None:
    (tmp_path / "like_deepseek.py").write_text(
        "def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus):\n"
        "    from eplb_runtime.planner.policies.deepseek import balance\n"
        "    return balance(weight.numpy(), num_replicas, num_groups, num_nodes, num_gpus)\n"
    )
    name, planner = load_peer(str(tmp_path / "like_deepseek.py"))
    load = bench.synthetic_load(2, 32, 0.6)
    assert name == "like_deepseek"
    assert np.array_equal(planner(load, 40, 4, 2, 8), balance(load, 40, 4, 2, 8)[0])
    assert np.array_equal(planner(load, 40, 1, 2, 8), balance(load, 40, 1, 1, 8)[0])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "there is no rebalance_experts"),
        ("def rebalance_experts(weight, flavour): ...", "wants flavour"),
        ("import no_such_module", "cannot be imported"),
    ],
)
def test_a_peer_that_cannot_be_used_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "peer.py"
    path.write_text(text)
    with pytest.raises(PlanError, match=complaint):
        load_peer(str(path))


def test_a_peer_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="no such file"):
        load_peer("/nowhere/eplb.py")
