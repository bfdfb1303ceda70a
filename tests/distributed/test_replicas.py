"""Replica slots in training: copies share the work of hot experts and change the result by rounding alone.

Sums over an expert's tokens are parted among copies and added in another order, so float32 results differ in the last
bits; in float64 they agree to 1e-12. Broken rules that show: `mutants`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training

import eplb_runtime as eplb
from eplb_runtime.events import RebalanceAborted
from eplb_runtime.replicas import tree

EXPERTS = 16


@dataclass(frozen=True)
class Job:
    replica_slots: int
    steps: int = 3
    interval: int = 1
    dtype: torch.dtype = torch.float64
    policy: str = "incremental"
    checkpointing: bool = False
    accumulate: int = 1
    keep_back: bool = False
    ranks_per_node: int = 4
    each: tuple[int, int] = (tree.NODES_EACH, tree.RANKS_EACH)


def train(rank: int, job: Job) -> dict:
    tree.NODES_EACH, tree.RANKS_EACH = job.each
    os.environ["LOCAL_WORLD_SIZE"] = str(job.ranks_per_node)
    model = make_model("gpt_oss", experts=EXPERTS, top_k=2).to(job.dtype)
    model.set_experts_implementation("eager" if job.dtype == torch.float64 else "grouped_mm")
    with torch.no_grad():
        for layer in model.model.layers:  # a router that is biased to few experts
            layer.mlp.router.bias.copy_(torch.linspace(4.0, -1.0, EXPERTS))
    if job.checkpointing:
        model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    balancer = training.attach(
        model,
        optimizer,
        interval=job.interval,
        policy=job.policy,
        gate="always",
        replica_slots=job.replica_slots,
        lag=0,
    )
    model.train()
    losses, norms = [], []
    for step in range(job.steps):
        for part in range(job.accumulate):
            ids = batch_of(rank, job.accumulate * step + part, batch=4, length=24)
            loss = model(input_ids=ids, labels=ids).loss
            last = part == job.accumulate - 1
            with nullcontext() if last or not job.keep_back else balancer.no_sync():
                (loss / job.accumulate).backward()
            losses.append(loss.item())
        norms.append(balancer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    replicas = balancer._rebalancer._runtime.maps.replicas
    result = {
        "handed_on": sum(len(stage) for plan in replicas._plans.values() for stage in plan.weights[1:])
        if replicas
        else 0,
        "losses": losses,
        "norms": norms,
        "state": eplb.logical_state_dict(model, optimizer),
        "copies": int((balancer.placement.copy_count > 1).sum()),
        "placement": balancer.placement.digest(),
        "aborted": [event.cause for event in balancer.events.of_type(RebalanceAborted)],
    }
    balancer.close()
    return result


def largest_difference(one: list[dict], other: list[dict]) -> float:
    """Over all losses, norms, parameters and optimizer tensors, relative to the largest value of each."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        assert a["state"].keys() == b["state"].keys()
        pairs = [(torch.tensor(a[key]), torch.tensor(b[key])) for key in ("losses", "norms")]
        pairs += [(a["state"][name], b["state"][name]) for name in a["state"]]
        for x, y in pairs:
            worst = max(worst, ((x - y).abs().max() / x.abs().max().clamp(min=1e-30)).item())
    return worst


def several(rank: int, jobs: Sequence[Job]) -> list[dict]:
    return [train(rank, job) for job in jobs]


WITH = {
    "copies": Job(replica_slots=1),
    "activation checkpointing": Job(replica_slots=1, checkpointing=True),
    "copies that hang on copies": Job(replica_slots=2, ranks_per_node=2, each=(1, 1)),
}
ACCUMULATED = {
    "sent each time": Job(replica_slots=1, accumulate=2),
    "kept back": Job(replica_slots=1, accumulate=2, keep_back=True),
}
FLOAT32 = Job(replica_slots=1, dtype=torch.float32)
JOBS = {
    "without": Job(replica_slots=0, policy="static"),
    "without, accumulated": Job(replica_slots=0, policy="static", accumulate=2),
    **WITH,
    **ACCUMULATED,
    "once": FLOAT32,
    "twice": FLOAT32,
}


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict]]:
    """Of each job what each rank gave."""
    return dict(zip(JOBS, map(list, zip(*run_ranks(4, several, list(JOBS.values())), strict=True)), strict=True))


@pytest.mark.parametrize("name", WITH)
def test_training_with_copies_is_training_without_to_1e_12(trained: dict[str, list[dict]], name: str) -> None:
    results = trained[name]
    assert results[0]["aborted"] == []
    assert results[0]["copies"] > 0
    assert largest_difference(trained["without"], results) < 1e-12
    assert (sum(result["handed_on"] for result in results) > 0) == (WITH[name].replica_slots == 2)


@pytest.mark.parametrize("name", ACCUMULATED)
def test_gradient_accumulation_sums_copies_over_micro_batches(trained: dict[str, list[dict]], name: str) -> None:
    assert trained[name][0]["copies"] > 0
    assert largest_difference(trained["without, accumulated"], trained[name]) < 1e-12


def test_the_same_run_twice_gives_the_same_bits(trained: dict[str, list[dict]]) -> None:
    assert largest_difference(trained["once"], trained["twice"]) == 0


def two_forwards_then_one_backward(loss_of, rank, step, balancer, optimizer) -> None:
    (loss_of(batch_of(rank, 2 * step)) + loss_of(batch_of(rank, 2 * step + 1))).backward()


def two_forwards_then_two_backwards(loss_of, rank, step, balancer, optimizer) -> None:
    for loss in [loss_of(batch_of(rank, 2 * step)), loss_of(batch_of(rank, 2 * step + 1))]:
        loss.backward()


def backward_twice(loss_of, rank, step, balancer, optimizer) -> None:
    loss = loss_of(batch_of(rank, step))
    loss.backward(retain_graph=True)
    loss.backward()


def evaluation_before_backward(loss_of, rank, step, balancer, optimizer) -> None:
    loss = loss_of(batch_of(rank, 2 * step))
    with torch.no_grad():
        loss_of(batch_of(rank, 2 * step + 1))
    loss.backward()


def gradients_thrown_away(loss_of, rank, step, balancer, optimizer) -> None:
    for keeping in (nullcontext(), balancer.no_sync()):
        with keeping:
            loss_of(batch_of(rank, 2 * step + 1)).backward()
        optimizer.zero_grad()
    loss_of(batch_of(rank, 2 * step)).backward()


ORDERS = (
    two_forwards_then_one_backward,
    two_forwards_then_two_backwards,
    backward_twice,
    evaluation_before_backward,
    gradients_thrown_away,
)


def train_in_order(rank: int, order: Callable[..., None], replica_slots: int) -> dict:
    model = make_model("gpt_oss", experts=8, top_k=2).double()
    model.set_experts_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    placement = eplb.Placement.initial(2, 8, 2, replica_slots)
    if replica_slots:
        slots = placement.physical_to_logical.copy()
        slots[:, [4, 9]] = [5, 1]
        placement = eplb.Placement(slots, 8, 2, placement.home)
    balancer = training.attach(
        model,
        optimizer,
        policy="static",
        replica_slots=replica_slots,
        initial_placement=placement,
        split="even" if replica_slots else "water_filling",
    )
    model.train()
    for step in range(2):
        order(lambda ids: model(input_ids=ids, labels=ids).loss, rank, step, balancer, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    state = eplb.logical_state_dict(model, optimizer)
    balancer.close()
    return {"losses": [0.0], "norms": [0.0], "state": state}


def train_in_all_orders(rank: int) -> list[list[dict]]:
    return [[train_in_order(rank, order, slots) for slots in (0, 1)] for order in ORDERS]


@pytest.fixture(scope="module")
def in_orders() -> list[list[list[dict]]]:
    return run_ranks(2, train_in_all_orders)


@pytest.mark.parametrize("number", range(len(ORDERS)), ids=[order.__name__ for order in ORDERS])
def test_whatever_the_order_of_forwards_and_backwards(in_orders: list[list[list[dict]]], number: int) -> None:
    whole, with_copies = zip(*(of_rank[number] for of_rank in in_orders), strict=True)
    assert 0 < largest_difference(whole, with_copies) < 1e-12
