"""A verification says identical where training is, names what is not, and admits when it has shown nothing."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.moe.experts.registry import ExpertTensors
from eplb_runtime.replicas.sync import ReplicaSync
from eplb_runtime.tools.verification.report import Report


def break_nothing() -> None:
    pass


def forget_second_moment() -> None:
    """An optimizer-state tensor that does not move."""
    whole = ExpertTensors.of_home
    ExpertTensors.of_home = lambda self, layer: [t for t in whole(self, layer) if not t.name.endswith("exp_avg_sq")]


def move_nothing() -> None:
    from eplb_runtime.tools.verification import runs as room

    room.plan_shuffle = eplb.plan


def forget_gradients_of_copies() -> None:
    ReplicaSync._add_to_homes = lambda *_: None


def average_instead_of_sum() -> None:
    add = ReplicaSync._add_to_homes

    def averaged(self, lent, trained, arrivals):
        return add(self, lent, trained, [[row / 2 for row in rows] for rows in arrivals])

    ReplicaSync._add_to_homes = averaged


def miss_every_refresh() -> None:
    """And take them for made: weights that were written without one are refused."""
    ReplicaSync.refresh = lambda self: setattr(
        self, "_versions", {layer: self._versions_now(layer) for layer in self._banks}
    )


def asked(
    rank: int,
    damage: Callable[[], None] = break_nothing,
    steps: int = 8,
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


@pytest.mark.parametrize("world_size", [2, 4])
def test_training_with_migrations_is_found_identical(world_size: int) -> None:
    report = on_ranks(world_size)
    assert (report.verdict, report.passed) == ("identical", True)
    assert report.migrations >= 3 and report.bytes_moved > 0
    assert report.experts_moved == report.migrations * 2 * 8  # both layers, every expert
    assert report.first_difference is None and report.first_loss_step is None and report.dropped == ()
    assert str(report).startswith("bit-identical")


def test_a_state_tensor_left_behind_is_named_with_layer_and_expert() -> None:
    report = on_ranks(2, forget_second_moment)
    assert (report.verdict, report.passed) == ("different", False)
    found = report.first_difference
    assert found is not None
    assert found.tensor.endswith("exp_avg_sq") and "experts" in found.tensor
    assert found.layer == 0 and found.expert in range(8) and found.rank in range(2)
    assert found.largest > 0 and found.relative > 0
    # Moved after step 3; the weights that it misleads are seen later, and the losses later still.
    assert found.step == 3
    assert report.first_loss_step is not None and report.first_loss_step > found.step
    assert found.tensor in str(report)


def test_nothing_is_proved_when_nothing_moves() -> None:
    report = on_ranks(2, move_nothing)
    assert (report.verdict, report.passed) == ("nothing proved", False)
    assert report.first_difference is None
    assert "NOTHING PROVED" in str(report)


def test_too_few_steps_prove_nothing() -> None:
    report = on_ranks(2, break_nothing, 2)
    assert report.verdict == "nothing proved"
    assert any("steps" in note for note in report.notes)


def test_a_model_that_does_not_repeat_itself_is_no_fault_of_migrations() -> None:
    report = on_ranks(2, break_nothing, 8, 0, torch.float32, True)
    assert (report.verdict, report.passed) == ("not repeatable", False)
    assert report.first_difference is not None and report.first_difference.step == 0


def test_one_rank_says_what_it_cannot_show() -> None:
    report = on_ranks(1)
    assert report.verdict == "identical" and report.bytes_moved == 0
    assert any("one rank" in note for note in report.notes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_copies_keep_to_the_bound(dtype: torch.dtype) -> None:
    report = on_ranks(2, break_nothing, 8, 1, dtype)
    assert report.verdict == "identical"
    check = report.replicas
    assert check is not None and check.passed and report.passed, str(report)
    assert check.copies > 0 and check.steps >= 4 and check.parts == 2
    assert 0 < check.bound < {torch.float64: 1e-12, torch.float32: 1e-3, torch.bfloat16: 0.1}[dtype]


@pytest.mark.parametrize("damage", [forget_gradients_of_copies, average_instead_of_sum, miss_every_refresh])
def test_control_a_broken_copy_is_out_of_bounds(damage: Callable[[], None]) -> None:
    report = on_ranks(2, damage, 8, 1)
    assert report.verdict == "identical"
    assert report.replicas is not None and not report.replicas.passed and not report.passed
    assert "NOT WITHIN THE BOUND" in str(report)


def refused(rank: int, wrong: str) -> str:
    parts = {
        "make_model": lambda: make_model("olmoe", experts=8, top_k=2, seed=0),
        "make_optimizer": lambda model: torch.optim.AdamW(model.parameters()),
        "make_batch": lambda step: {"input_ids": batch_of(rank, step)},
        "loss": lambda output, batch: output.logits.mean(),
    }
    parts[wrong] = lambda *_: None
    loss = parts.pop("loss")
    with pytest.raises(TypeError) as caught:
        eplb.verify(**parts, loss=loss, steps=1)
    return str(caught.value)


@pytest.mark.parametrize("wrong", ["make_model", "make_optimizer", "loss"])
def test_a_callback_that_returns_nothing_is_named_in_one_line(wrong: str) -> None:
    (said,) = run_ranks(1, refused, wrong)
    assert wrong in said and "NoneType" in said and "\n" not in said
