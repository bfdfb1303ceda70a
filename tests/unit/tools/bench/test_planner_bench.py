"""The planner benchmark measures ours and others on the same load in one run, and refuses peers it cannot call."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from eplb_runtime.planner import PlanError
from eplb_runtime.tools.bench import peers
from eplb_runtime.tools.bench.peers import find_peer
from eplb_runtime.tools.bench.planner import generated_loads, run, shapes_for
from eplb_runtime.tools.formats.loads import write_load

IN_ORDER = """
import torch

def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus):
    row = torch.arange(num_replicas) % weight.shape[1]
    return row.repeat(weight.shape[0], 1), None, None
"""

AS_A_METHOD = """
from abc import ABC, abstractmethod
import torch

class Abstract(ABC):
    @classmethod
    @abstractmethod
    def rebalance_experts(cls, weight, num_replicas): ...

class Policy(Abstract):
    @classmethod
    def rebalance_experts(cls, weight, num_replicas, num_ranks, old=None):
        return (torch.arange(num_replicas) % weight.shape[1]).repeat(weight.shape[0], 1)
"""


@pytest.fixture
def load_file(tmp_path: Path) -> Path:
    write_load(tmp_path / "load.npz", np.random.default_rng(0).integers(1, 1000, (2, 3, 16)))
    return tmp_path / "load.npz"


def test_ours_and_others_stand_in_one_table(load_file: Path, tmp_path: Path) -> None:
    (tmp_path / "peer.py").write_text(IN_ORDER)
    peer = str(tmp_path / "peer.py")
    said: list[str] = []
    result = json.loads(json.dumps(run([load_file], [peer], repeats=1, on_progress=said.append)))
    rows = result["planner"]
    assert len(said) == len(rows) == 2 * 4, "two shapes, four planners"
    for shape in (rows[:4], rows[4:]):
        by_planner = {row["planner"]: row for row in shape}
        assert list(by_planner) == ["deepseek", "free", "incremental (home layout)", peer]
        assert by_planner[peer]["balancedness"] < by_planner["deepseek"]["balancedness"]
        for row in shape:
            assert 0 < row["balancedness"] <= row["bound"] + 1e-9 <= 1 + 1e-9
            assert (row["load"], row["layers"], row["experts"]) == ("load.npz, 2 windows", 3, 16)
    assert [row["slots"] for row in rows[::4]] == [16, 20]


def test_long_series_are_merged_into_few_windows(tmp_path: Path) -> None:
    write_load(tmp_path / "load.npz", np.ones((50, 1, 4)))
    rows = run([tmp_path / "load.npz"], repeats=1)["planner"]
    assert rows[0]["load"] == "load.npz, 16 windows", "three into one, the last two left out"


@pytest.mark.parametrize("experts", [1, 4, 8, 16, 60, 64, 128, 160, 256, 384, 512, 1024])
def test_every_shape_can_hold_its_experts(experts: int) -> None:
    shapes = shapes_for(experts)
    assert shapes
    for shape in shapes:
        assert shape.slots >= experts
        assert shape.ranks % shape.ranks_per_node == 0
        assert shape.slots_per_rank <= experts


def test_generated_loads_have_the_spread_that_was_measured() -> None:
    loads = generated_loads()
    assert all(
        np.array_equal(load, again) for load, again in zip(loads.values(), generated_loads().values(), strict=True)
    )
    large = loads["58 x 256, as DeepSeek-V3"][0]
    spread = np.log(large).std(axis=1)
    assert spread.min() > 0.45 and spread.max() < 1.0
    small = loads["24 x 32, as gpt-oss-20b"][0]
    hottest = small.max(axis=1) / small.mean(axis=1)
    assert 2.1 < np.median(hottest) < 4.5


@pytest.mark.parametrize("source", [IN_ORDER, AS_A_METHOD])
def test_a_peer_is_called_by_the_names_of_its_arguments(tmp_path: Path, source: str) -> None:
    (tmp_path / "peer.py").write_text(source)
    planned = find_peer(str(tmp_path / "peer.py"))(np.ones((2, 4)), 6, 1, 1, 2)
    assert planned.tolist() == [[0, 1, 2, 3, 0, 1]] * 2


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "no such file"),
        ("x = 1", "has no rebalance_experts"),
        ("import no_such_package", "cannot be imported: No module named 'no_such_package'"),
        ("def rebalance_experts(weight, secret): ...", "wants secret, whose meaning is not known"),
        ("def rebalance_experts(weight): raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    ],
)
def test_a_peer_that_cannot_be_asked_is_refused_in_one_line(tmp_path: Path, source: str | None, says: str) -> None:
    path = tmp_path / "peer.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(PlanError) as refusal:
        find_peer(str(path))(np.ones((1, 2)), 2, 1, 1, 1)
    assert says in str(refusal.value) and str(path) in str(refusal.value) and "\n" not in str(refusal.value)


WITHOUT_COPIES = """
from megatron.training import get_args
from megatron.core import mpu

class Planner:
    @staticmethod
    def expert_placement_greedy(experts, devices):
        order = sorted(experts, key=experts.get)
        homes = len(order) // len(devices)
        by_rank = {device: order[device * homes : (device + 1) * homes] for device in devices}
        return None, by_rank
"""


def test_a_planner_without_copies_leaves_their_slots_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tuple(name.replace("megatron", "no_such_framework") for name in peers.FRAMEWORKS)
    monkeypatch.setattr(peers, "FRAMEWORKS", hidden)  # the real one may be installed
    (tmp_path / "peer.py").write_text(WITHOUT_COPIES.replace("megatron", "no_such_framework"))
    peer = find_peer(str(tmp_path / "peer.py"))
    assert "no_such_framework" not in sys.modules, "a placeholder that stays would be taken for the framework"
    load = np.array([[4.0, 3, 2, 1], [1, 2, 3, 4]])
    planned = peer(load, 6, 1, 1, 2)
    assert planned.tolist() == [[3, 2, -1, 1, 0, -1], [0, 1, -1, 2, 3, -1]]
    placement = peers.as_placement(planned, 4, 2)
    assert placement.layout == "home" and (placement.physical_to_logical[:, 2::3] == -1).all()
    assert placement.home_rank.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    with pytest.raises(PlanError, match="3 ranks do not divide"):
        peer(load, 6, 1, 1, 3)


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(PlanError, match=r"peer 'gurobi' is unknown: give one of vllm, sglang, or the path"):
        find_peer("gurobi")


def test_a_peer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.INSTALLED, "vllm", ("no_such_package.planner",))
    with pytest.raises(PlanError, match="peer vllm: not installed"):
        find_peer("vllm")
