"""torch.compile of a training step with an attached model: graphs break at MoE layers, and training has the bits of the
step without. `test_any_module` has a compiled model alone."""

from __future__ import annotations

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


def train(rank: int, compiled: bool) -> dict[str, Any]:
    """Losses, counts, state and graphs by step, of steps with one or two micro-batches; homes move after each."""
    torch._dynamo.reset()
    counters.clear()
    model = make_model("olmoe", layers=1).train()
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    balancer = training.attach(model, optimizer, interval=1, replica_slots=1, lag=0, moving=True)
    wait_until_compiled(balancer)

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

    run = torch.compile(step, backend="aot_eager") if compiled else step
    losses, loads, graphs = [], [], []
    for number in range(STEPS):
        losses.append(run(*(batch_of(rank, number + 10 * part) for part in range(number % 2 + 1))).item())
        loads.append(balancer._runtime.counter.counts.tolist())
        graphs.append(counters["stats"]["unique_graphs"])
    state = eplb.logical_state_dict(model, optimizer)
    assert balancer.placement.epoch == STEPS
    balancer.close()
    return {"losses": losses, "loads": loads, "state": state, "graphs": graphs}


def both(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return train(rank, False), train(rank, True)


@pytest.mark.long
def test_a_compiled_step_trains_to_the_same_bits() -> None:
    for plain, compiled in run_ranks(2, both):
        assert compiled["graphs"][0] > 0 == plain["graphs"][-1], "control: it is compiled"
        assert compiled["graphs"][-1] == compiled["graphs"][3], "no new graph at a commit"
        assert plain["losses"] == compiled["losses"] and plain["loads"] == compiled["loads"]
        assert len(set(plain["losses"])) == STEPS
        for name, tensor in plain["state"].items():
            assert not isinstance(tensor, torch.Tensor) or torch.equal(tensor, compiled["state"][name]), name
