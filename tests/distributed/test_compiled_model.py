"""torch.compile of an attached model: graphs break at MoE layers, and training has the bits of the model without."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.shuffle import wait_until_compiled
from torch._dynamo.utils import counters

import eplb_runtime as eplb

STEPS = 5
COMPILED = (("model", 0), ("step", 1))
"""What is compiled, the model or a function with the whole training step in it, and replica slots."""


def train(rank: int, way: str, slots: int) -> dict[str, Any]:
    """Losses, counts, state and graphs by step, of steps with one or two micro-batches; homes move after each."""
    torch._dynamo.reset()
    counters.clear()
    model = make_model("olmoe", layers=1).train()
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    balancer = training.attach(model, optimizer, interval=1, replica_slots=slots, lag=0, moving=True)
    wait_until_compiled(balancer)
    if way == "model":
        model.compile(backend="aot_eager")

    def step(*batches: torch.Tensor) -> torch.Tensor:
        for ids in batches[:-1]:
            with balancer.no_sync():
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        loss = model(input_ids=batches[-1], labels=batches[-1], use_cache=False).loss
        loss.backward()
        balancer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = torch.compile(step, backend="aot_eager") if way == "step" else step
    losses, loads, graphs = [], [], []
    for number in range(STEPS):
        losses.append(run(*(batch_of(rank, number + 10 * part) for part in range(number % 2 + 1))).item())
        loads.append(balancer._counted.tolist())
        graphs.append(counters["stats"]["unique_graphs"])
    state = eplb.logical_state_dict(model, optimizer)
    assert balancer.placement.epoch == STEPS
    balancer.close()
    return {"losses": losses, "loads": loads, "state": state, "graphs": graphs}


def _all(rank: int) -> dict[tuple[str, int], dict[str, Any]]:
    return {case: train(rank, *case) for case in [("", 0), ("", 1), *COMPILED]}


@cache
def results() -> list[dict[tuple[str, int], dict[str, Any]]]:
    return run_ranks(2, _all)


@pytest.mark.parametrize(("way", "slots"), COMPILED)
def test_a_compiled_model_trains_to_the_same_bits(way: str, slots: int) -> None:
    for of_rank in results():
        plain, compiled = of_rank["", slots], of_rank[way, slots]
        assert compiled["graphs"][0] > 0 == plain["graphs"][-1], "control: it is compiled"
        assert compiled["graphs"][-1] == compiled["graphs"][3], "no new graph at a commit"
        assert plain["losses"] == compiled["losses"] and plain["loads"] == compiled["loads"]
        assert len(set(plain["losses"])) == STEPS
        for name, tensor in plain["state"].items():
            assert not isinstance(tensor, torch.Tensor) or torch.equal(tensor, compiled["state"][name]), name
