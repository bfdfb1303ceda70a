"""A verification says right where training is, names what is not, and admits when it has shown nothing."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from support.training import undone

import eplb_runtime as eplb
from eplb_runtime.balancer.loop_state import LoopState
from eplb_runtime.balancer.rebalancer import Rebalancer
from eplb_runtime.hosts.attaching import trial
from eplb_runtime.moe.experts.registry import ExpertTensors
from eplb_runtime.moe.layer import ExpertParallelLayer
from eplb_runtime.replicas.sync import ReplicaSync
from eplb_runtime.tools.verification import Report, Run, proof, scaled_gradients, untrained

KEPT: dict[str, torch.Tensor] = {}


def forget_second_moment() -> None:
    """An optimizer-state tensor that does not move; the record has it all the same."""
    whole = ExpertTensors.of_home
    moved = Rebalancer.place

    def place(self, target):
        self._registry._state_of_layers.clear()
        ExpertTensors.of_home = lambda own, layer: [t for t in whole(own, layer) if not t.name.endswith("exp_avg_sq")]
        moved(self, target)
        ExpertTensors.of_home = whole

    Rebalancer.place = place


def move_nothing() -> None:
    trial.shuffled = lambda placement, load: placement.with_epoch(placement.epoch - 1)


def forget_gradients_of_replicas() -> None:
    ReplicaSync._add_to_homes = lambda *_: None


def give_more_than_the_layers_own_code() -> None:
    forward = ExpertParallelLayer.__call__
    ExpertParallelLayer.__call__ = lambda self, *given: 1.01 * forward(self, *given)


def keep_a_snapshot() -> None:
    attach = eplb.Balancer.__init__

    def made(self, runtime, *rest):
        attach(self, runtime, *rest)
        KEPT.update({name: one.detach().clone() for name, one in runtime.parameters.items()})

    eplb.Balancer.__init__ = made


def write_on_one_rank_in_step_4() -> None:
    reduce = LoopState.before_step

    def before(self):
        reduce(self)
        if torch.distributed.get_rank() == 1 and self.step == 3:
            next(iter(self.tensors.dense.values())).data.mul_(1.01)

    LoopState.before_step = before


def asked(
    rank: int,
    damage: Callable[[], object] = list,
    steps: int = 3,
    replica_slots: int = 0,
    dtype: torch.dtype = torch.float32,
    fresh_weights: bool = False,
) -> Report:
    damage()
    calls = []

    def new_model() -> torch.nn.Module:
        calls.append(True)
        model = make_model("olmoe", experts=8, top_k=2, seed=len(calls) if fresh_weights else 0).to(dtype)
        model.set_experts_implementation("grouped_mm")
        return model

    def new_batch(step: int) -> dict[str, torch.Tensor]:
        ids = batch_of(rank, step)
        return {"input_ids": ids, "labels": ids}

    return eplb.verify(
        new_model,
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1),
        new_batch,
        steps=steps,
        config=eplb.BalancerConfig(replica_slots=replica_slots),
    )


CASES: dict[str, dict[str, Any]] = {
    "right": {"dtype": torch.bfloat16},
    "replicas": {"replica_slots": 1},
    "gradients of replicas lost": {"damage": forget_gradients_of_replicas, "replica_slots": 1},
    "state left behind": {"damage": forget_second_moment},
    "not plain training": {"damage": give_more_than_the_layers_own_code},
    "written on one rank": {"damage": write_on_one_rank_in_step_4, "steps": 5},
    "nothing moves": {"damage": move_nothing, "steps": 2},
    "one step": {"steps": 1},
    "not repeated": {"steps": 2, "fresh_weights": True},
    "a snapshot": {"damage": keep_a_snapshot},
}


def asked_of(rank: int, names: list[str]) -> dict[str, Report]:
    found = {}
    for name in names:
        with undone(eplb.Balancer, Rebalancer, ExpertTensors, ExpertParallelLayer, LoopState, ReplicaSync, trial):
            found[name] = asked(rank, **CASES[name])
        gc.collect()
    return found


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    found: dict[str, Report] = {}
    for names in (list(CASES)[::2], list(CASES)[1::2]):
        first, second = run_ranks(2, asked_of, names)
        assert first == second
        found |= first
    json.dumps([report.to_dict() for report in found.values()])
    return found


def test_a_right_job_is_found_right(reports: dict[str, Report]) -> None:
    report, replicas = reports["right"], reports["replicas"]
    assert report.passed and report.moved["equal"] and report.repeats, str(report)
    assert report.single["equal"] and report.single["steps"] > 0
    assert str(report).startswith("right: 3 steps, 2 ranks")
    assert replicas.passed and replicas.moved["equal"], str(replicas)
    assert 0 < replicas.moved["rounding"]["worst"] < 1e-2


def test_what_is_wrong_is_named(reports: dict[str, Report]) -> None:
    report = reports["state left behind"]
    found = report.moved
    assert (report.verdict, found["equal"], found["step"]) == ("wrong", False, 2), "moved after step 1"
    assert "experts" in found["tensor"] and found["expert"] in range(8) and found["rank"] in range(2)
    assert found["tensor"] in str(report)
    report = reports["gradients of replicas lost"]
    assert report.verdict == "wrong" and report.moved["equal"] and not report.moved["rounding"]["equal"]
    report = reports["not plain training"]
    assert report.verdict == "wrong" and report.moved["equal"], "it is the same wherever experts are"
    assert report.single["equal"] is False and report.single["step"] == 1
    report = reports["written on one rank"]
    assert report.verdict == "wrong" and report.moved["equal"] and "on rank 1 differ from rank 0's" in report.reason


def test_what_shows_nothing_is_unknown(reports: dict[str, Report]) -> None:
    for name in ("nothing moves", "one step"):
        assert reports[name].verdict == "unknown" and "no expert moved" in reports[name].reason
    report = reports["not repeated"]
    assert (report.verdict, report.repeats) == ("unknown", False) and "before the first step" in report.reason
    report = reports["a snapshot"]
    assert report.verdict == "unknown" and report.moved["equal"], "nobody has registered it"
    assert {one["holder"].split(":")[0] for one in report.unregistered} == {"rank 0", "rank 1"}


def ended(folder: Path, steps: int, failure: str = "", digest: int = 0) -> Run:
    folder.mkdir()
    for step in range(steps + 1):
        (folder / f"step-{step:05d}.jsonl").write_text(f'[[0]]\n[["a", "number", -1, 1, {digest}, [0.0]]]')
    return Run(folder, {"commits": 1}, failure)


SOONER: list[tuple[Any, Any, str]] = [
    ((2, "failed"), (3,), "wrong"),
    ((2, "failed"), (2, "failed"), "unknown"),  # it fails with fixed homes, too
    ((-1, "failed"), (3,), "unknown"),  # before attach
    ((2,), (), "unknown"),
    ((3, "", 1), (2, "failed"), "unknown"),
    ((2, "failed", 1), (2, ""), "wrong"),  # by the bits of the steps that it has
]


@pytest.mark.parametrize(("moved", "again", "verdict"), SOONER)
def test_a_run_that_ends_sooner_is_wrong_only_by_homes(tmp_path: Path, moved: Any, again: Any, verdict: str) -> None:
    runs = [ended(tmp_path / "1", 3), ended(tmp_path / "2", *moved), ended(tmp_path / "3", *again or (0,))]
    report = proof(lambda _: runs.pop(0))
    assert report.verdict == verdict and ("ended sooner" in report.reason or report.moved["step"] == 0)
    assert "no weight has a gradient" in next(untrained(ended(tmp_path / "4", 1)))


def test_gradients_that_are_no_numbers_have_no_factor(tmp_path: Path) -> None:
    kinds = {"a/given": "given", "a/grad": "gradient"}
    rows = [(name, kinds[name], expert, 1, 0, [np.nan] * 17) for name in kinds for expert in (-1, 0)]
    for step in range(3):
        (tmp_path / f"step-{step:05d}.jsonl").write_text(f"[[0]]\n{json.dumps(rows)}")
    assert [*scaled_gradients(Run(tmp_path, {"ranks": 2}))] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_digest_is_that_of_all_bits_and_adds_up_over_parts(dtype: torch.dtype) -> None:
    row = torch.randn(40).mul(100).to(dtype)
    whole = trial.row_of("a", "parameter", 0, row)
    if not dtype.is_complex:
        parts = [trial.row_of("a", "parameter", 0, row[a:b], a) for a, b in ((0, 7), (7, 40))]
        assert (sum(part.digest for part in parts) - whole.digest) % 2**64 == 0
        np.testing.assert_allclose(np.sum([part.sums for part in parts], axis=0), whole.sums)
    changed = row.clone()
    changed[3] = 0 if row[3] else 1
    assert trial.row_of("a", "parameter", 0, changed).digest != whole.digest
