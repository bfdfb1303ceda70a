"""Experts that are tensors of their own move as rows of one tensor do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eplb_runtime.moe.experts.optimizer_state import OptimizerStateError
from eplb_runtime.moe.experts.record import RecordFormat
from eplb_runtime.moe.experts.registry import ExpertTensors, RegistryError


def experts(count: int = 3) -> tuple[nn.Parameter, ...]:
    return tuple(nn.Parameter(torch.full((2, 4), float(number))) for number in range(count))


def registered(rows: tuple[nn.Parameter, ...], *optimizers: torch.optim.Optimizer, **options: bool) -> ExpertTensors:
    registry = ExpertTensors(1, 3, optimizers, **options)
    registry.add(0, "weight", rows)
    return registry


def step(rows: tuple[nn.Parameter, ...], optimizer: torch.optim.Optimizer) -> None:
    for number, row in enumerate(rows):
        row.grad = torch.full_like(row, number + 1.0)
    optimizer.step()


def test_a_record_takes_an_expert_with_all_its_state_to_another_slot() -> None:
    here, there = experts(), experts()
    formats = []
    for rows in (here, there):
        optimizer = torch.optim.AdamW(rows, lr=0.1)
        step(rows, optimizer)
        formats.append(RecordFormat(tuple(registered(rows, optimizer).of_home(0))))
    record = torch.zeros(formats[0].nbytes, dtype=torch.uint8)
    assert formats[0].digest() == formats[1].digest()
    formats[0].row(2).pack(record)
    formats[1].row(0).unpack(record)
    names = [one.name for one in formats[1].tensors]
    assert names == ["weight", "weight/exp_avg", "weight/exp_avg_sq", "weight/step"]
    for source, target in zip(formats[0].tensors, formats[1].tensors, strict=True):
        assert torch.equal(source.row(2), target.row(0))
        assert torch.equal(source.row(1), target.row(1))
    assert not torch.equal(there[0], there[1]) and torch.equal(there[0], here[2])


def test_gradients_that_stay_may_not_be_used_and_those_that_move_go_along() -> None:
    rows = experts()
    for row in rows:
        row.grad = torch.ones_like(row)
    staying = registered(rows)
    staying.leave_gradients(0)
    with pytest.raises(RuntimeError, match="the gradient of weight from before, which has not moved along"):
        staying.refuse_left_behind(rows[1])
    moving = registered(rows, move_gradients=True)
    assert [tensor.name for tensor in moving.of_home(0)] == ["weight", "weight/grad"]
    rows[0].grad = None
    with pytest.raises(RegistryError, match="others have none"):
        moving.of_home(0)


def test_unequal_experts_and_unequal_state_are_refused() -> None:
    with pytest.raises(RegistryError, match="equal"):
        registered((*experts(2), nn.Parameter(torch.zeros(3, 4))))
    with pytest.raises(RegistryError, match="3 experts"):
        registered(experts(2))
    rows = experts()
    optimizer = torch.optim.AdamW(rows, lr=0.1)
    step(rows[:2], optimizer)
    with pytest.raises(OptimizerStateError, match="step all experts together"):
        registered(rows, optimizer).of_home(0)
    optimizer.state[rows[2]] = {}
    for row in rows:
        optimizer.state[row] = {"step": 3}
    with pytest.raises(OptimizerStateError, match="only tensors move"):
        registered(rows, optimizer).of_home(0)
