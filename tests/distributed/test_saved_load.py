"""A resumed job foresees what it would have foreseen: the load that was measured is saved with the placement."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.shuffle import plan_by

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks

INTERVAL, SAVED_AT, STEPS = 4, 10, 13


def train(rank: int, first: int, saved: str | None, ranks: int) -> tuple[str, list[list]]:
    """Steps ``first`` to 13 of a model that does not change: the state after step 10, and what planners were given."""
    if rank >= ranks:
        return "", []
    model = make_model("olmoe", experts=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    balancer = training.attach(
        model, optimizer, ranks=Ranks(job=tuple(range(ranks))), interval=INTERVAL, policy="static"
    )
    seen: list[list] = []

    def planner(load: np.ndarray, *arguments: Any, **options: Any) -> eplb.Plan:
        seen.append(load.tolist())
        return eplb.plan(load, *arguments, **options)

    plan_by(balancer, planner)
    if saved is not None:
        try:
            balancer.load_state_dict(json.loads(saved))
        except eplb.placement.PlacementError:
            assert ranks == 1, "only another number of ranks keeps the placement from being taken over"
    model.train()
    state = ""
    for step in range(first, STEPS + 1):
        training.step(
            model, optimizer, torch.cat([batch_of(share, step) for share in range(2) if share % ranks == rank])
        )
        if step == SAVED_AT:
            state = json.dumps(balancer.state_dict())
    balancer.close()
    return state, seen


def test_a_forecast_after_a_resume_is_what_it_would_have_been() -> None:
    (state, whole), (other, _) = run_ranks(2, train, 1, None, 2)
    assert state == other, "every rank saves the same"
    (_, resumed), _ = run_ranks(2, train, SAVED_AT + 1, state, 2)
    assert [len(load) for load in whole] == [4, 8, 12]
    assert resumed == whole[2:], "steps 1 to 8 of the history, 9 and 10 counted before, 11 and 12 after"
    without = json.loads(state)
    del without["load"]
    (_, forgotten), _ = run_ranks(2, train, SAVED_AT + 1, json.dumps(without), 2)
    assert forgotten != resumed, "control: without the saved load the forecast is another"
