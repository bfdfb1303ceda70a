"""MoE layers that stay in evaluation mode while others train are named once, whenever that begins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flat_settings import config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import heard
from torch import nn

import eplb_runtime as eplb
from eplb_runtime.events import GuardFinding

STEPS, INTERVAL = 5, 3


def trained(rank: int, modes: Callable[[nn.Module, int], None], guard: str = "warn", steps: int = STEPS) -> list[str]:
    """Warnings, and findings with their steps, of a training whose modules' modes are set ahead of each step."""
    model = make_model("olmoe", layers=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = {"interval": INTERVAL, "lag": 1, "dense_gradients": "allreduce", "policy": "static", "guard": guard}
    balancer = eplb.attach(model, optimizer, config=config_from_settings(settings))
    model.train()
    with heard() as warned:
        for step in range(steps):
            modes(model, step)
            training.step(model, optimizer, batch_of(rank, step))
    found = [(event.step, event.finding) for event in balancer.events.of_type(GuardFinding)]
    balancer.close()
    return [f"step {step}: {finding}" for step, finding in found if finding in warned]


def one_layer_late(model: nn.Module, step: int) -> None:
    """From the second step of an interval on; later another layer, too."""
    if step >= 4:
        model.model.layers[1].eval()
    if step >= 9:
        model.model.layers[2].eval()


def most_layers(model: nn.Module, step: int) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp.experts.eval()


def without_the_experts(model: nn.Module, step: int) -> None:
    """Frozen parts in evaluation mode: all but the experts modules."""
    model.eval()
    for layer in model.model.layers:
        layer.mlp.experts.train()


def between_steps(model: nn.Module, step: int) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=batch_of(0, step))
    model.train()


CASES: dict[str, Callable[[int], list[str]]] = {
    "one layer, late": lambda rank: trained(rank, one_layer_late, steps=13),
    "no guard": lambda rank: trained(rank, most_layers, "off"),
    "whole model": lambda rank: trained(rank, lambda model, step: model.eval() and None),
    "without the experts": lambda rank: trained(rank, without_the_experts),
    "evaluations between steps": lambda rank: trained(rank, between_steps),
}


def all_cases(rank: int) -> dict[str, list[str]]:
    return {name: run(rank) for name, run in CASES.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, list[str]]]:
    return run_ranks(2, all_cases)


def about_layers(found: list[str]) -> list[str]:
    return [line for line in found if "MoE layers in evaluation mode, while others train" in line]


def test_a_layer_is_named_once_at_the_next_decision(results: list[dict[str, list[str]]]) -> None:
    first, second = about_layers(results[0]["one layer, late"])
    assert first.startswith("step 6: ")
    assert first.endswith(": model.layers.1.mlp.experts") and "\n" not in first
    assert "step 6: call train() on the whole model" in first
    assert second.startswith("step 12: ") and second.endswith(": model.layers.1.mlp.experts and 1 more")
    assert results[1]["one layer, late"] == [], "one rank says it for all that hold the layer"


@pytest.mark.parametrize("name", ["whole model", "without the experts", "evaluations between steps", "no guard"])
def test_other_uses_of_evaluation_mode_say_nothing_of_layers(results: list[dict[str, list[str]]], name: str) -> None:
    for result in results:
        assert about_layers(result[name]) == []
        assert name != "evaluations between steps" or result[name] == []
    said = [line for line in results[0][name] if "no token was counted" in line]
    assert bool(said) == (name == "whole model"), "which has a finding of its own"
