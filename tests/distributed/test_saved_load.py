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
from eplb_runtime.load.series import encode

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


def keep_record(rank: int) -> list[object]:
    model = make_model("olmoe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    balancer = eplb.attach(model, optimizer, config=eplb.BalancerConfig(interval=INTERVAL, dense_gradients="allreduce"))
    decisions = balancer._rebalancer.decisions
    first = balancer.state_dict()
    rows = [[0.5, 0.1, 2, 0.9]]
    balancer.load_state_dict({**first, "track_record": rows})
    trusted = decisions._track_record.trust
    saved = balancer.state_dict()["track_record"]
    balancer.load_state_dict({**first, "track_record": "broken"})
    after_broken = decisions._track_record.trust
    balancer.load_state_dict({name: first[name] for name in ("step", "placement", "load")})
    balancer.close()
    return [first["track_record"], saved, trusted < 0.5, after_broken == trusted, decisions._track_record.trust]


def test_trust_in_predictions_is_saved_and_restored() -> None:
    """A state of an earlier version, without it, loads as before."""
    assert run_ranks(2, keep_record) == [[[], [[0.5, 0.1, 2, 0.9]], True, True, 1.0]] * 2


def refuse(rank: int) -> list[bool]:
    model = make_model("olmoe", experts=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    balancer = eplb.attach(model, optimizer, config=eplb.BalancerConfig(interval=INTERVAL, dense_gradients="allreduce"))
    good = encode(np.ones((2, 2, 6), dtype=np.int64))
    taken = []
    for history in ({**good, "shape": [3, 2, 6]}, {**good, "shape": [2, 2, 7]}, {**good, "data": "no"}, {}, [], good):
        load = {"steps_per_bucket": 1, "history": history}
        balancer.load_state_dict({**balancer.state_dict(), "load": load})
        taken.append(len(balancer._rebalancer.decisions.history) == 2)
    balancer.close()
    return taken


def test_a_saved_load_that_is_broken_is_left_out() -> None:
    assert run_ranks(2, refuse) == [[False] * 5 + [True]] * 2
