"""A verification says right where training is, names what is not, and admits when it has shown nothing."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.balancer.loop_state import LoopState
from eplb_runtime.hosts.attaching import trial
from eplb_runtime.moe.experts.registry import ExpertTensors
from eplb_runtime.moe.layer import ExpertParallelLayer
from eplb_runtime.replicas.sync import ReplicaSync
from eplb_runtime.tools.verification import Report


def break_nothing() -> None:
    pass


def forget_second_moment() -> None:
    """An optimizer-state tensor that does not move; the record has it all the same."""
    whole = ExpertTensors.of_home
    moved = eplb.Balancer.place

    def place(self, target):
        self.runtime.registry._state_of_layers.clear()
        ExpertTensors.of_home = lambda own, layer: [t for t in whole(own, layer) if not t.name.endswith("exp_avg_sq")]
        moved(self, target)
        ExpertTensors.of_home = whole

    eplb.Balancer.place = place


def move_nothing() -> None:
    trial.shuffled = lambda placement, load: placement.with_epoch(placement.epoch - 1)


def forget_gradients_of_replicas() -> None:
    ReplicaSync._add_to_homes = lambda *_: None


def give_more_than_the_layers_own_code() -> None:
    forward = ExpertParallelLayer._forward
    ExpertParallelLayer._forward = lambda self, *given: 1.01 * forward(self, *given)


def keep_a_snapshot(copy: Callable[[torch.Tensor], torch.Tensor] = lambda one: one.detach().clone()) -> None:
    attach = eplb.Balancer.__init__

    def made(self, runtime, *rest):
        attach(self, runtime, *rest)
        KEPT.update({name: copy(one) for name, one in runtime.parameters.items()})

    eplb.Balancer.__init__ = made


def keep_a_snapshot_with_its_graph() -> None:
    keep_a_snapshot(torch.clone)


def write_on_one_rank_in_step_4() -> None:
    reduce = LoopState.before_step

    def before(self):
        reduce(self)
        if torch.distributed.get_rank() == 1 and self.step == 3:
            next(iter(self.tensors.dense.values())).data.mul_(1.01)

    LoopState.before_step = before


KEPT: dict[str, torch.Tensor] = {}


def asked(
    rank: int,
    damage: Callable[[], None] = break_nothing,
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
        model.set_experts_implementation("eager" if dtype == torch.float64 else "grouped_mm")
        return model

    def new_batch(step: int) -> dict[str, torch.Tensor]:
        ids = batch_of(rank, step)
        return {"input_ids": ids, "labels": ids}

    return eplb.verify(
        new_model,
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1),
        new_batch,
        steps=steps,
        config=eplb.BalancerConfig(
            replica_slots=replica_slots, dispatch=eplb.DispatchConfig(split_least_tokens=0 if replica_slots else 64)
        ),
    )


def on_ranks(world_size: int, *args: object) -> Report:
    reports = run_ranks(world_size, asked, *args)
    assert all(report == reports[0] for report in reports)
    json.dumps(reports[0].to_dict())
    return reports[0]


def test_a_right_job_is_found_right() -> None:
    report = on_ranks(2, break_nothing, 3, 0, torch.bfloat16)
    assert report.passed and report.moved and report.repeats, str(report)
    assert report.single is not None and report.single.equal and report.single.steps > 0
    assert str(report).startswith("right: 3 steps, 2 ranks")


def test_replicas_are_right_to_rounding() -> None:
    report = on_ranks(2, break_nothing, 3, 1)
    assert report.passed and report.moved, str(report)
    assert report.moved_rounding is not None and 0 < report.moved_rounding.worst < 1e-2


def test_gradients_of_replicas_that_are_lost_are_noticed() -> None:
    report = on_ranks(2, forget_gradients_of_replicas, 3, 1)
    assert report.verdict == "wrong" and report.moved and not report.moved_rounding.equal


def test_a_state_tensor_left_behind_is_named_with_its_expert() -> None:
    report = on_ranks(2, forget_second_moment)
    assert (report.verdict, report.moved) == ("wrong", False)
    found = report.difference
    assert found is not None and "experts" in found.tensor and found.expert in range(8) and found.rank in range(2)
    assert found.step == 2  # moved after step 1
    assert found.tensor in str(report)


def test_what_is_the_same_wherever_experts_are_and_not_plain_training_is_noticed() -> None:
    report = on_ranks(2, give_more_than_the_layers_own_code)
    assert report.verdict == "wrong" and report.moved
    assert report.single is not None and report.single.equal is False and report.single.step == 1


@pytest.mark.parametrize(
    "damage", [keep_a_snapshot, pytest.param(keep_a_snapshot_with_its_graph, marks=pytest.mark.long)]
)
def test_what_nobody_registered_is_named(damage: Callable[[], None]) -> None:
    report = on_ranks(2, damage)
    assert report.verdict == "unknown" and report.moved
    assert {one["holder"].split(":")[0] for one in report.unregistered} == {"rank 0", "rank 1"}


def test_ranks_that_share_a_weight_and_differ_are_named_in_any_step() -> None:
    report = on_ranks(2, write_on_one_rank_in_step_4, 5)
    assert report.verdict == "wrong" and report.moved and "on rank 1 differ from rank 0's" in report.reason


@pytest.mark.parametrize(("damage", "steps"), [(move_nothing, 2), (break_nothing, 1)])
def test_nothing_is_proved_when_nothing_moves(damage: Callable[[], None], steps: int) -> None:
    report = on_ranks(2, damage, steps)
    assert report.verdict == "unknown" and "no expert moved" in report.reason


def test_a_job_that_does_not_repeat_itself_is_unknown() -> None:
    report = on_ranks(2, break_nothing, 2, 0, torch.float32, True)
    assert (report.verdict, report.repeats) == ("unknown", False)
    assert "before the first step" in report.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_digest_is_that_of_all_bits_and_adds_up_over_parts(dtype: torch.dtype) -> None:
    row = torch.randn(40).mul(100).to(dtype)
    digest, sums = trial._sketched(trial.TrialEntry("a", "parameter", 0, row))
    if not dtype.is_complex:
        parts = [trial._sketched(trial.TrialEntry("a", "parameter", 0, row[a:b], a)) for a, b in ((0, 7), (7, 40))]
        assert sum(part for part, _ in parts) == digest
        np.testing.assert_allclose(sum(part for _, part in parts), sums)
    changed = row.clone()
    changed[3] = 0 if row[3] else 1
    assert trial._sketched(trial.TrialEntry("a", "parameter", 0, changed))[0] != digest
