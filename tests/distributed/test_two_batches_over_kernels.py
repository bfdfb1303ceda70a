"""Two batches at once over the doubles of DeepEP and `nccl.ep`: in evaluation, in training, and a forward beside a
backward pass. The same bits as one after the other. On GPUs: `tests/gpu/test_two_batches_on_cuda.py`.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import product
from typing import Any

import deepep_double
import nccl_ep_double
import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.dispatch import choosing
from eplb_runtime.planner.shuffle import plan_shuffle

DOUBLES: dict[str, Any] = {"deepep": deepep_double, "deepep_elastic": deepep_double, "nccl_ep": nccl_ep_double}
CARRIERS = choosing.CARRIERS
KINDS = list(product(CARRIERS, ("logical", "by_rank")))
MICRO_BATCHES = 3


def attached(kind: tuple[str, str], replica_slots: int) -> tuple[Any, torch.optim.Optimizer, eplb.Balancer]:
    choosing.lacks = lambda *_: ""
    choosing.CARRIERS = {name: partial(make, package=DOUBLES[name]) for name, make in CARRIERS.items()}
    carrier, order = kind
    model = make_model("olmoe", experts=8, top_k=2, layers=2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = eplb.BalancerConfig(
        interval=1,
        lag=0,
        dense_gradients="allreduce",
        dispatch=carrier,
        combine_order=order,
        replica_slots=replica_slots,
        split_least_tokens=0,
    )
    balancer = eplb.attach(model, optimizer, config=config)
    balancer._plan_with(plan_shuffle)
    return model, optimizer, balancer


def train_and_evaluate(
    rank: int, kind: tuple[str, str], replica_slots: int, at_once: bool, calls: list[list[str]]
) -> dict[str, Any]:
    DOUBLES[kind[0]].CALLS.clear()
    model, optimizer, balancer = attached(kind, replica_slots)
    lanes = balancer._open_second_lane()
    both = balancer.at_once if at_once else lambda first, second: (first(), second())
    pair = lanes.both if at_once else lambda first, second: (first(), second())
    seen: dict[str, Any] = {}
    threads = set()

    def loss_of(step: int, number: int) -> Tensor:
        threads.add(threading.get_ident())
        ids = batch_of(rank, step, length=12 - 3 * (rank == 1) - number % 2, seed=number) % 12
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    for step in range(2):
        model.train()
        losses = list(both(lambda: loss_of(step, 0), lambda: loss_of(step, 1)))  # noqa: B023
        losses[0].backward()
        for number in range(2, MICRO_BATCHES):  # as DualPipeV: a forward beside the backward of the batch before
            loss, _ = pair(lambda: loss_of(step, number), losses[-1].backward)  # noqa: B023
            losses.append(loss)
        losses[-1].backward()
        seen["loss", step] = torch.stack([loss.detach() for loss in losses])
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        halves = both(lambda: loss_of(step, 5), lambda: loss_of(step, 6))
        seen["evaluated"] = torch.stack(halves)
    calls.append([call for call in DOUBLES[kind[0]].CALLS if call != "handle"])  # one that serves again saves some
    seen |= eplb.logical_state_dict(model, optimizer)
    seen["moved"] = torch.tensor(balancer.placement.epoch)
    del losses, loss, halves
    balancer.close()
    assert len(threads) == 1 + at_once
    return seen


def both_ways(rank: int, kinds: list[tuple[str, str]], replica_slots: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind in kinds:
        calls: list[list[str]] = []
        in_turn, at_once = (train_and_evaluate(rank, kind, replica_slots, way, calls) for way in (False, True))
        wrong = [name for name in in_turn if not torch.equal(in_turn[name], at_once[name])]
        learns = in_turn["loss", 0].tolist() != in_turn["loss", 1].tolist()
        found[kind] = {"wrong": wrong, "moved": int(at_once["moved"]), "learns": learns, "calls": calls}
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Any, Any]]:
    return run_ranks(2, both_ways, KINDS, 0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_two_at_once_change_no_bit(two_ranks: list, kind: tuple[str, str]) -> None:
    for found in two_ranks:
        assert not found[kind]["wrong"] and found[kind]["moved"] == 2 and found[kind]["learns"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_all_ranks_call_in_one_order_and_it_is_not_that_of_one_after_the_other(
    two_ranks: list, kind: tuple[str, str]
) -> None:
    (in_turn, at_once), other = (found[kind]["calls"] for found in two_ranks)
    assert other == [in_turn, at_once]
    assert sorted(in_turn) == sorted(at_once) and in_turn != at_once


def test_four_ranks_with_copies_too() -> None:
    kinds = [("deepep", "logical"), ("nccl_ep", "by_rank")]
    for found in run_ranks(4, both_ways, kinds, 1):
        for kind in kinds:
            assert not found[kind]["wrong"] and found[kind]["moved"] == 2 and found[kind]["learns"]
