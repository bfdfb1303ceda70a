"""Training with migrations gives the very bits of training without: losses, every parameter, every optimizer tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.shuffle import plan_by, plan_newest, plan_shuffle, wait_until_compiled

import eplb_runtime as eplb
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted

EXPERTS = 16


@dataclass(frozen=True)
class Job:
    """By a planner that moves something after each step."""

    steps: int = 2
    interval: int = 1
    shuffled: bool = True
    optimizer: str = "AdamW"
    dtype: torch.dtype = torch.float32
    implementation: str = "grouped_mm"
    checkpointing: bool = False


def train(rank: int, policy: str, job: Job) -> dict:
    model = make_model("olmoe", experts=EXPERTS, top_k=4).to(job.dtype)
    model.set_experts_implementation(job.implementation)
    if job.checkpointing:
        model.gradient_checkpointing_enable()
    options = {"AdamW": {"weight_decay": 0.1}, "SGD": {"momentum": 0.9}}.get(job.optimizer, {})
    optimizer = getattr(torch.optim, job.optimizer)(model.parameters(), lr=3e-3, **options)
    balancer = training.attach(model, optimizer, interval=job.interval, policy=policy, gate="always", lag=0)
    if policy != "static":
        plan_by(balancer, plan_shuffle if job.shuffled else plan_newest)
    wait_until_compiled(balancer)
    model.train()
    losses = []
    for step in range(job.steps):
        # The text changes every two steps, and with it the experts that it calls for.
        ids = batch_of(rank, step) % 12 + 12 * ((step // 2) % 7)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        balancer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    result = {
        "losses": losses,
        "state": eplb.logical_state_dict(model, optimizer),
        "migrations": len(balancer.events.of_type(RebalanceCommitted)),
        "aborted": [event.cause for event in balancer.events.of_type(RebalanceAborted)],
        "placement": balancer.placement.digest(),
    }
    balancer.close()
    return result


def differences(one: Sequence[dict], other: Sequence[dict]) -> list[str]:
    """Names of everything that is not the same bits in two runs."""
    found = []
    for rank, (a, b) in enumerate(zip(one, other, strict=True)):
        if a["losses"] != b["losses"]:
            found.append(f"losses of rank {rank}")
        assert a["state"].keys() == b["state"].keys()
        found += [
            f"{name} on rank {rank}" for name in a["state"] if not torch.equal(a["state"][name], b["state"][name])
        ]
    return found


def both(rank: int, jobs: Sequence[Job]) -> list[list[dict]]:
    return [[train(rank, policy, job) for policy in ("static", "incremental")] for job in jobs]


def compare(world_size: int, *jobs: Job) -> list[tuple[list[str], int]]:
    """For each job what differs between the run that never moves experts and the one that does, and how often that one
    did."""
    found = []
    for of_ranks in zip(*run_ranks(world_size, both, jobs), strict=True):
        static, balanced = zip(*of_ranks, strict=True)
        assert static[0]["migrations"] == 0
        assert balanced[0]["aborted"] == []
        assert len({result["placement"] for result in balanced}) == 1
        found.append((differences(static, balanced), balanced[0]["migrations"]))
    return found


PLANNED = Job(steps=16, interval=2, shuffled=False)
"""By the planner itself."""
JOBS = {
    "eager": Job(implementation="eager"),
    "batched_mm": Job(implementation="batched_mm"),
    "SGD": Job(optimizer="SGD"),
    "Adagrad": Job(optimizer="Adagrad"),
    "RMSprop": Job(optimizer="RMSprop"),
    "bfloat16": Job(dtype=torch.bfloat16),
    "activation checkpointing": Job(checkpointing=True),
}


def test_adamw_with_decay_and_clipping_and_at_least_5_migrations() -> None:
    ((found, migrations),) = compare(4, PLANNED)
    assert migrations >= 5
    assert found == []


def test_so_is_training_with_other_optimizers_dtypes_and_experts() -> None:
    for name, (found, migrations) in zip(JOBS, compare(2, *JOBS.values()), strict=True):
        assert migrations == 2, name
        assert found == [], name
