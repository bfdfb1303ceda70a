"""A job that goes on with other ranks or copies has the same state, and decides on the load that it had."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.job import Job, Run
from support.moe_models import batch_of
from support.ranks import run_ranks
from support.seen import said_by, same

import eplb_runtime as eplb
from eplb_runtime.placement import Placement

pytestmark = pytest.mark.long

EXPERTS, LAYERS, SHARES = 16, 2, 4
SAVED_AT, STEPS = 6, 9
State = dict[str, torch.Tensor]


def shares(rank: int, step: int) -> torch.Tensor:
    """Batches that are the same on any number of ranks."""
    return torch.cat([batch_of(share, step + 1) for share in range(rank, SHARES, dist.get_world_size())])


def started(rank: int, **settings: Any) -> Run:
    exact = {"dtype": torch.float64, "implementation": "eager"}  # the only one for float64
    job = partial(Job, experts=EXPERTS, optimizer=torch.optim.AdamW, planner=eplb.plan, batches=shares, **exact)
    return Run(rank, job(settings={"interval": 4, "lag": 1, **settings})).attach()


def begin(rank: int, folder: Path) -> tuple[State, State, dict[str, Any]]:
    """What is saved, how that run goes on, and the balancer's part of it."""
    job = started(rank)
    at_save = job.train(SAVED_AT).state()
    eplb.checkpoint.save(folder, job.model, job.optimizer)
    state = job.balancer.state_dict()
    at_end = job.train(STEPS - SAVED_AT).state()
    job.balancer.close()
    return at_save, at_end, state


def go_on(rank: int, folder: Path, replica_slots: int) -> dict[str, Any]:
    """Nothing moves later, so that experts stay where the restart leaves them."""
    job = started(rank, replica_slots=replica_slots)
    balancer, job.steps = job.balancer, SAVED_AT
    start = balancer.placement
    eplb.checkpoint.load(folder, job.model, job.optimizer)
    at_load = job.state()
    with balancer.quiesce():
        at_end = job.train(STEPS - SAVED_AT).state()
    assert balancer.placement is start
    history = [load.tolist() for load in balancer.rebalancer.decisions.history]
    balancer.close()
    return {"load": at_load, "end": at_end, "history": history}


def refuse(rank: int, saved: dict[str, Any]) -> list[str]:
    balancer, other = started(rank).balancer, Placement.initial(LAYERS + 1, EXPERTS, 2).to_json()
    stands = balancer.placement
    said = [
        said_by(lambda s=s: balancer.load_state_dict(s))
        for s in ({**saved, "step": rank}, {**saved, "placement": other})
    ]
    assert balancer.placement is stands and not balancer.rebalancer.decisions.history
    balancer.close()
    return said


def resume(rank: int, folder: Path, saved: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    return [go_on(rank, folder, slots) for slots in (0, 1)], refuse(rank, saved)


def furthest(one: State, other: State) -> float:
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def test_a_restart_on_fewer_ranks_goes_on_from_the_load_that_was_saved(tmp_path: Path) -> None:
    (at_save, at_end, saved), *_ = run_ranks(SHARES, begin, tmp_path)
    for results, (different, of_another) in run_ranks(2, resume, tmp_path, saved):
        for result in results:
            # Up to a decision two steps later.
            assert len(result["history"]) == SAVED_AT + 2, "what was counted since the last decision is a part of it"
            assert same(result["load"], at_save), "on other ranks not a bit is different"
            assert not same(result["end"], result["load"]), "control: the steps do something"
            assert furthest(result["end"], at_end) < 1e-10 < furthest(result["load"], at_end)
        assert "another usable saved state" in different or "has another" in different
        assert f"{LAYERS + 1} MoE layers" in of_another
