"""A job that goes on with other ranks or copies places experts anew for the load that it had; its state is the same."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.job import Job, Run
from support.moe_models import batch_of
from support.ranks import run_ranks
from support.seen import said_by, same
from support.shuffle import plan_by

import eplb_runtime as eplb
from eplb_runtime.load.counter import saved_windows
from eplb_runtime.placement import Placement
from eplb_runtime.planner.evaluate import predicted_imbalance

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


def go_on(rank: int, folder: Path, replica_slots: int, moved: bool) -> dict[str, Any]:
    """Nothing moves later, so that what the restart has placed stays."""
    job = started(rank, replica_slots=replica_slots)
    balancer, job.steps = job.balancer, SAVED_AT
    start = balancer.placement
    eplb.checkpoint.load(folder, job.model, job.optimizer, warm_start=moved)
    placed, at_load = balancer.placement, job.state()
    with balancer.quiesce():
        at_end = job.train(STEPS - SAVED_AT).state()
    assert balancer.placement is placed
    history = [load.tolist() for load in balancer.rebalancer.decisions.history]
    balancer.load_state_dict(balancer.state_dict())
    assert balancer.placement.digest() == placed.digest(), "one of the same sizes is taken over as it is"
    balancer.close()
    return {"start": start.to_json(), "placed": placed.to_json(), "load": at_load, "end": at_end, "history": history}


def refuse(rank: int, saved: dict[str, Any]) -> list[str]:
    """What is said, after how many windows of the load were taken all the same."""
    said, without = [], {key: saved[key] for key in ("step", "placement")}
    static, balancer = started(rank, policy="static").balancer, started(rank).balancer
    stands = balancer.placement
    logging.disable(logging.WARNING)
    for one, state in ((static, saved), (balancer, without), (balancer, saved), (balancer, {**saved, "step": rank})):
        if one is balancer and state is saved:
            plan_by(balancer, lambda *_, **__: 1 / 0)
        line = said_by(lambda one=one, state=state: one.load_state_dict(state))
        said.append(f"{len(one.rebalancer.decisions.history)} {line}")
    assert balancer.placement is stands
    static.close()
    balancer.close()
    return said


def resume(rank: int, folder: Path, saved: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    found = [go_on(rank, folder, slots, moved) for slots, moved in ((0, True), (0, False), (1, True))]
    return found, refuse(rank, saved)


def furthest(one: State, other: State) -> float:
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def test_a_restart_on_fewer_ranks_places_experts_for_the_load_they_had(tmp_path: Path) -> None:
    """Without that load or a plan they stay where they are."""
    (at_save, at_end, saved), *_ = run_ranks(SHARES, begin, tmp_path)
    windows = saved_windows(saved["load"], LAYERS, EXPERTS)
    assert windows is not None and len(windows) == SAVED_AT, "what was counted since the last decision is a part of it"
    results, refusals = zip(*run_ranks(2, resume, tmp_path, saved), strict=True)
    for anew, standing, with_copies in results:
        assert anew["placed"] == results[0][0]["placed"], "every rank has the same placement"
        history = np.array(anew["history"][:SAVED_AT], dtype=float)
        for result in (anew, with_copies):
            start, placed = (Placement.from_json(result[name]) for name in ("start", "placed"))
            before, after = (predicted_imbalance(history.sum(axis=0), one).max() for one in (start, placed))
            assert after < 1.02 < before, "the load that was saved is balanced"
            assert same(result["load"], at_save), "and where experts stand changes no bit of what was saved"
        assert standing["placed"] == standing["start"] != anew["placed"], "control: this one has not moved"
        assert same(anew["end"], standing["end"]), "nor of the next steps"
        assert not same(anew["end"], anew["load"]), "control: the steps do something"
        for result in (anew, with_copies):
            assert furthest(result["end"], at_end) < 1e-10 < furthest(result["load"], at_end)
    for static, without, failed, different in refusals:
        assert static.startswith("4 ") and f"on {SHARES} ranks" in static
        assert without.startswith("0 ") and f"on {SHARES} ranks" in without
        assert failed.startswith("4 ") and "ZeroDivisionError" in failed
        assert "another usable saved state" in different or "has another" in different
