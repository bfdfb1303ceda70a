"""A model that several optimizers train, in logical order and in checkpoints, which say in the log where they are."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from support.seen import same
from torch import nn

import eplb_runtime as eplb


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(model[0].parameters(), lr=0.1 + seed),
        torch.optim.SGD(model[1].parameters(), lr=0.2, momentum=0.9),
    ]
    for _ in range(steps):
        model(torch.randn(4, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


def test_the_state_of_each_is_there_under_its_parameters() -> None:
    model, optimizers = trained(0)
    state = eplb.logical_state_dict(model, optimizers)
    assert {"optimizer.0.weight.exp_avg", "optimizer.1.weight.momentum_buffer"} <= state.keys()
    assert torch.equal(state["optimizer.0.weight.exp_avg"], optimizers[0].state[model[0].weight]["exp_avg"])
    one, other = (eplb.logical_state_dict(model, optimizer) for optimizer in optimizers)
    assert state.keys() == one.keys() | other.keys()


@pytest.mark.parametrize("steps", [0, 2], ids=["optimizers without state", "optimizers with state"])
def test_each_takes_its_own_back(steps: int) -> None:
    model, optimizers = trained(0)
    state = eplb.logical_state_dict(model, optimizers)
    fresh, fresh_optimizers = trained(1, steps)
    assert not same(state, eplb.logical_state_dict(fresh, fresh_optimizers))
    eplb.load_logical_state_dict(fresh, fresh_optimizers, state)
    assert same(state, eplb.logical_state_dict(fresh, fresh_optimizers))


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_folder_keeps_all_of_them(format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eplb_runtime")
    model, optimizers = trained(0)
    eplb.checkpoint.save(tmp_path / "at", model, optimizers, format=format)  # type: ignore[arg-type]
    assert f"checkpoint saved to {tmp_path / 'at'}" in caplog.messages
    fresh, fresh_optimizers = trained(1)
    eplb.checkpoint.load(tmp_path / "at", fresh, fresh_optimizers)
    assert f"checkpoint loaded from {tmp_path / 'at'}" in caplog.messages
    assert same(eplb.logical_state_dict(model, optimizers), eplb.logical_state_dict(fresh, fresh_optimizers))
    assert fresh_optimizers[0].param_groups[0]["lr"] == 0.1


def test_what_is_no_optimizer_is_refused_in_one_line() -> None:
    model, optimizers = trained(0, 0)
    with pytest.raises(TypeError, match="optimizer 1 of the list is a Linear"):
        eplb.logical_state_dict(model, [optimizers[0], model[1]])  # type: ignore[list-item]
