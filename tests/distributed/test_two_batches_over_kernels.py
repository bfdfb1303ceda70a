"""Two batches at once over DeepEP's double: in evaluation, in training, and a forward beside a
backward pass. The same bits as one after the other. On GPUs: `tests/gpu/test_two_batches_on_cuda.py`.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import deepep_double
import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.distributed.transports import deepep_package
from eplb_runtime.moe.dispatch import choosing
from eplb_runtime.planner.shuffle import plan_shuffle

pytestmark = pytest.mark.long

KINDS = [("deepep", order) for order in ("logical", "by_rank")]
MICRO_BATCHES = 3


def attached(
    kind: tuple[str, str], replica_slots: int, recompute: bool
) -> tuple[Any, torch.optim.Optimizer, eplb.Balancer]:
    choosing.lacks = lambda *_: ""
    deepep_package.imported = deepep_double.imported
    carrier, order = kind
    model = make_model("olmoe", experts=8, top_k=2, layers=2).bfloat16()
    if recompute:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = eplb.BalancerConfig(
        interval=1,
        dense_gradients="allreduce",
        replica_slots=replica_slots,
        dispatch=eplb.DispatchConfig(carrier, combine_order=order, split_least_tokens=0 if replica_slots else 64),
        migration=eplb.MigrationConfig(lag=0),
    )
    balancer = eplb.attach(model, optimizer, config=config)
    balancer._plan_with(plan_shuffle)
    return model, optimizer, balancer


def train_and_evaluate(
    rank: int, kind: tuple[str, str], replica_slots: int, recompute: bool, at_once: bool, calls: list[list[str]]
) -> dict[str, Any]:
    deepep_double.CALLS.clear()
    model, optimizer, balancer = attached(kind, replica_slots, recompute)
    channels = balancer._open_second_channel()
    both = balancer.at_once if at_once else lambda first, second: (first(), second())
    pair = channels.both if at_once else lambda first, second: (first(), second())
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
    calls.append([call for call in deepep_double.CALLS if call != "handle"])  # one that serves again saves some
    seen |= eplb.logical_state_dict(model, optimizer)
    seen["moved"] = torch.tensor(balancer.placement.epoch)
    del losses, loss, halves
    balancer.close()
    assert len(threads) == 1 + at_once
    return seen


def both_ways(rank: int, kinds: list[tuple[str, str]], replica_slots: int, recompute: bool) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind in kinds:
        calls: list[list[str]] = []
        in_turn, at_once = (
            train_and_evaluate(rank, kind, replica_slots, recompute, way, calls) for way in (False, True)
        )
        wrong = [name for name in in_turn if not torch.equal(in_turn[name], at_once[name])]
        learns = in_turn["loss", 0].tolist() != in_turn["loss", 1].tolist()
        found[kind] = {"wrong": wrong, "moved": int(at_once["moved"]), "learns": learns, "calls": calls}
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Any, Any]]:
    return run_ranks(2, both_ways, KINDS, 0, False)


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


def test_four_ranks_with_copies_and_recompute_too() -> None:
    kinds = [("deepep", "logical"), ("deepep", "by_rank")]
    for found in run_ranks(4, both_ways, kinds, 1, True):
        for kind in kinds:
            assert not found[kind]["wrong"] and found[kind]["moved"] == 2 and found[kind]["learns"]


def small_batches(rank: int, in_float8: bool) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Outputs in evaluation by the low-latency kernels, in turn and at once, and what was called at once."""
    deepep_package.no_infiniband = lambda: ""
    choosing.lacks = lambda *_: ""
    deepep_package.imported = deepep_double.imported
    config = eplb.BalancerConfig(
        dispatch=eplb.DispatchConfig(
            "deepep", combine_order="by_rank", low_latency_tokens=32, dtype="float8" if in_float8 else "model"
        )
    )
    model = make_model("olmoe", experts=8, top_k=2, layers=2, width=2048).bfloat16().eval()
    balancer = eplb.attach(model, None, config=config)

    def logits(number: int) -> Tensor:
        out: Tensor = model(batch_of(rank, number)).logits
        return out

    halves = partial(logits, 0), partial(logits, 1)
    with torch.inference_mode():
        in_turn = [half() for half in halves]
        deepep_double.CALLS.clear()
        at_once = list(balancer.at_once(*halves))
        calls = list(deepep_double.CALLS)
        again = list(balancer.at_once(*halves))
    balancer.close()
    assert all(map(torch.equal, at_once, again))
    return in_turn, at_once, calls


@pytest.mark.parametrize("in_float8", [False, True])
def test_small_batches_at_once_are_received_when_the_other_has_computed(in_float8: bool) -> None:
    sends = {"low latency dispatch", "low latency combine"}
    for in_turn, at_once, calls in run_ranks(2, small_batches, in_float8):
        assert all(map(torch.equal, in_turn, at_once))
        of_them = [call for call in calls if call.startswith("low latency")]
        assert len(of_them) == 2 * 2 * 2 * 2 and set(of_them[::2]) == sends
        assert set(of_them[1::2]) == {"low latency receive"}
