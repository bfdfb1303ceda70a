"""Two batches of a rank at once: the same results, counts and gradients as one after the other, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.shuffle import wait_until_compiled
from torch import Tensor, nn

import eplb_runtime as eplb


def attached(replica_slots: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    model = make_model("qwen3_moe", experts=8, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    balancer = training.attach(model, optimizer, interval=1, replica_slots=replica_slots, lag=0, moving=True)
    wait_until_compiled(balancer)
    return model, optimizer, balancer


def in_turn(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    return first(), second()


def train_and_evaluate(rank: int, at_once: bool, replica_slots: int) -> dict[str, Any]:
    model, optimizer, balancer = attached(replica_slots)
    both = balancer.at_once if at_once else in_turn
    seen: dict[str, Any] = {"counts": [], "losses": [], "logits": [], "generated": []}
    for step in range(2):
        halves = [batch_of(rank, step, seed=seed) for seed in (1, 2)]
        masks = [torch.ones_like(ids) for ids in halves]
        masks[1][:, -3:] = 0
        model.train()

        def loss_of(half: int, halves: list[Tensor] = halves, masks: list[Tensor] = masks) -> Tensor:
            return model(input_ids=halves[half], labels=halves[half], attention_mask=masks[half]).loss

        losses = both(lambda: loss_of(0), lambda: loss_of(1))
        for loss in losses:
            loss.backward()
        seen["losses"].append([loss.item() for loss in losses])
        seen["counts"].append(balancer.runtime.counter.counts.tolist())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen["logits"] += both(lambda: model(halves[0]).logits, lambda: model(halves[1]).logits)  # noqa: B023
            options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
            seen["generated"] += both(
                lambda: model.generate(halves[0], **options),  # noqa: B023
                lambda: model.generate(halves[1], **options),  # noqa: B023
            )
    seen["state"] = eplb.logical_state_dict(model, optimizer)
    seen["epoch"] = balancer.placement.epoch
    balancer.close()
    return seen


def both_ways(rank: int, replica_slots: int) -> list[str]:
    alone = train_and_evaluate(rank, False, replica_slots)
    together = train_and_evaluate(rank, True, replica_slots)
    assert together["epoch"] == alone["epoch"] == 2
    assert sum(map(sum, alone["counts"][0])) == 2 * 2 * (2 * 12 + 2 * 9)
    wrong = [name for name in ("counts", "losses") if alone[name] != together[name]]
    for name in ("logits", "generated"):
        wrong += [name for a, b in zip(alone[name], together[name], strict=True) if not torch.equal(a, b)]
    return wrong + [name for name, tensor in alone["state"].items() if not torch.equal(tensor, together["state"][name])]


@pytest.mark.parametrize("replica_slots", [0, 1])
def test_two_batches_at_once_change_no_bit(replica_slots: int) -> None:
    assert run_ranks(2, both_ways, replica_slots) == [[], []]


def under_way(rank: int) -> bool:
    """Both wait for each other in the middle of a forward."""
    model, _, balancer = attached()
    barrier = threading.Barrier(2, timeout=60)

    def meet(*_: Any) -> None:
        barrier.wait()

    handle = model.model.layers[1].register_forward_pre_hook(meet)
    model.eval()
    ids = batch_of(rank, 0)

    def forward() -> bool:
        with torch.no_grad():
            return bool(model(ids).logits.isfinite().all())

    met = balancer.at_once(forward, forward)
    handle.remove()
    with pytest.raises(RuntimeError, match="already"):
        balancer.at_once(lambda: balancer.at_once(forward, forward), lambda: None)
    balancer.close()
    return all(met)


def test_both_are_under_way_at_once_and_a_third_is_refused() -> None:
    assert run_ranks(2, under_way) == [True, True]


def backward_inside(rank: int, recompute: str) -> list[str]:
    """What each half says; and losses afterwards, which are those that each has by itself."""
    model, _, balancer = attached()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    model.train()
    halves = [batch_of(rank, 0, seed=seed) for seed in (1, 2)]

    def loss_of(half: int) -> Tensor:
        loss: Tensor = model(input_ids=halves[half], labels=halves[half]).loss
        return loss

    said = []
    for first, second in (
        (lambda: loss_of(0).backward(), lambda: loss_of(1)),
        (lambda: loss_of(0), lambda: loss_of(1).backward()),
        (lambda: loss_of(0).backward(), lambda: loss_of(1).backward()),
    ):
        with pytest.raises(RuntimeError) as refused:
            balancer.at_once(first, second)
        said.append(str(refused.value))
    alone, together = (
        in_turn(lambda: loss_of(0), lambda: loss_of(1)),
        balancer.at_once(lambda: loss_of(0), lambda: loss_of(1)),
    )
    assert [loss.item() for loss in alone] == [loss.item() for loss in together]
    for loss in together:
        loss.backward()
    balancer.close()
    return said


@pytest.mark.parametrize("recompute", ["", "reentrant", "non-reentrant"])
def test_a_backward_pass_inside_is_refused_and_training_goes_on(recompute: str) -> None:
    for said in run_ranks(2, backward_inside, recompute):
        assert all("backward pass inside at_once" in line and "when at_once has ended" in line for line in said), said
