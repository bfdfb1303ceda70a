"""Two batches of a rank at once: the same results, counts and gradients as one after the other, to the bit."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.job import Job, Run, moved
from support.moe_models import batch_of
from support.ranks import run_ranks
from support.seen import differing, said_by
from torch import Tensor


def attached(rank: int, replica_slots: int = 0, recompute: str = "") -> Run:
    settings = {"replica_slots": replica_slots}
    return Run(rank, moved(Job("qwen3_moe", recompute=recompute, settings=settings))).attach()


def in_turn(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    return first(), second()


def train_and_evaluate(rank: int, at_once: bool, replica_slots: int) -> dict[str, Any]:
    """What is seen in each step, with a moved placement, and the state afterwards."""
    job = attached(rank, replica_slots)
    model, balancer = job.model, job.balancer
    both = balancer.at_once if at_once else in_turn
    seen: dict[str, Any] = {}
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
        seen |= {f"loss {step} {half}": loss.item() for half, loss in enumerate(losses)}
        seen[f"counts {step}"] = balancer.runtime.counter.counts.clone()
        assert seen[f"counts {step}"].sum() == 2 * 2 * (2 * 12 + 2 * 9)
        job.update()
        model.eval()
        options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "pad_token_id": 0}

        def of_half(half: int, halves: list[Tensor] = halves, options: Any = options) -> tuple[Tensor, Tensor]:
            return model(halves[half]).logits, model.generate(halves[half], **options)

        with torch.no_grad():
            found = both(lambda of=of_half: of(0), lambda of=of_half: of(1))
        seen |= {f"{step} {half} {what}": one for half in (0, 1) for what, one in enumerate(found[half])}
    assert balancer.placement.epoch == 2
    return seen | job.end().state


def both_ways(rank: int, replica_slots: int) -> list[str]:
    return differing(*(train_and_evaluate(rank, at_once, replica_slots) for at_once in (False, True)))


@pytest.mark.parametrize("replica_slots", [0, 1])
def test_two_batches_at_once_change_no_bit(replica_slots: int) -> None:
    assert run_ranks(2, both_ways, replica_slots) == [[], []]


def under_way(rank: int) -> None:
    """Both wait for each other in the middle of a forward."""
    job = attached(rank)
    model, balancer = job.model, job.balancer
    barrier = threading.Barrier(2, timeout=60)

    def meet(*_: Any) -> None:
        barrier.wait()

    handle = model.model.layers[1].register_forward_pre_hook(meet)
    model.eval()

    def forward() -> bool:
        with torch.no_grad():
            return bool(model(batch_of(rank, 0)).logits.isfinite().all())

    assert all(balancer.at_once(forward, forward))
    handle.remove()
    said = said_by(lambda: balancer.at_once(lambda: balancer.at_once(forward, forward), lambda: None))
    assert "already" in said
    balancer.close()


def test_both_are_under_way_at_once_and_a_third_is_refused() -> None:
    run_ranks(2, under_way)


def backward_inside(rank: int, recompute: str) -> None:
    """Each half or both; losses afterwards are those that each has by itself."""
    job = attached(rank, recompute=recompute)
    model, balancer = job.model, job.balancer
    halves = [batch_of(rank, 0, seed=seed) for seed in (1, 2)]

    def loss_of(half: int) -> Tensor:
        loss: Tensor = model(input_ids=halves[half], labels=halves[half]).loss
        return loss

    for first, second in (
        (lambda: loss_of(0).backward(), lambda: loss_of(1)),
        (lambda: loss_of(0), lambda: loss_of(1).backward()),
        (lambda: loss_of(0).backward(), lambda: loss_of(1).backward()),
    ):
        said = said_by(lambda first=first, second=second: balancer.at_once(first, second))
        assert "backward pass inside at_once" in said and "when at_once has ended" in said, said
    alone, together = (both(lambda: loss_of(0), lambda: loss_of(1)) for both in (in_turn, balancer.at_once))
    assert [loss.item() for loss in alone] == [loss.item() for loss in together]
    for loss in together:
        loss.backward()
    balancer.close()


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["", "reentrant", "layers"])
def test_a_backward_pass_inside_is_refused_and_training_goes_on(recompute: str) -> None:
    run_ranks(2, backward_inside, recompute)
