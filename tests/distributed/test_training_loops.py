"""Loops that differ from the plain one and must give the same training: closures, clipping twice, closing midway."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks

import eplb_runtime as eplb

STEPS = 3


class Loop:
    """The plain loop, on two ranks: one EP group of both, or each with all experts (EDP 2)."""

    def __init__(self, rank: int, edp: bool) -> None:
        self.rank = rank
        self.model = make_model("olmoe", experts=8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        group = [dist.new_group([other]) for other in range(2)][rank] if edp else None
        config = eplb.BalancerConfig(
            interval=2, dense_gradients="allreduce", policy="static", migration=eplb.MigrationConfig(lag=1)
        )
        self.balancer = eplb.attach(self.model, self.optimizer, config=config, ep_group=group)
        self.model.train()

    def loss(self, step: int) -> torch.Tensor:
        ids = batch_of(self.rank, step)
        return self.model(input_ids=ids, labels=ids).loss

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.balancer.clip_grad_norm_(0.05)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            self.step(step)
        state = eplb.logical_state_dict(self.model, self.optimizer)
        self.balancer.close()
        return state


class WithClosure(Loop):
    def step(self, step: int) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(step)
            loss.backward()
            return loss

        self.optimizer.step(closure)


class WithoutClosure(Loop):
    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.optimizer.step()


class ClippedTwice(Loop):
    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.balancer.clip_grad_norm_(0.05)
        first = [p.grad.clone() for p in self.model.parameters()]
        norm = self.balancer.clip_grad_norm_(1e9)
        assert norm <= 0.0501
        assert all(torch.equal(p.grad, g) for p, g in zip(self.model.parameters(), first, strict=True))
        self.optimizer.step()
        self.optimizer.zero_grad()


class ForwardBeforeTheStep(Loop):
    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.balancer.clip_grad_norm_(0.05)
        self.loss(step + 100)
        self.optimizer.step()
        self.optimizer.zero_grad()


class BackwardAfterAReduction(Loop):
    """Gradients that come after a reduction count, too: clipped, then one micro-batch more."""

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.balancer.reduce_gradients()
        self.optimizer.zero_grad()
        super().step(step)


class ClosedMidway(Loop):
    """Within the guard's first steps."""

    def step(self, step: int) -> None:
        if step == 1:
            self.balancer.close()
        super().step(step)


LAYOUTS = {"EP 2": False, "EDP 2": True}
AS_PLAIN = (ClippedTwice, ForwardBeforeTheStep, BackwardAfterAReduction, ClosedMidway)
State = dict[str, torch.Tensor]


def run_all(rank: int) -> dict[tuple[str, str], State]:
    """The state that each loop comes to in each layout."""
    found = {}
    for layout, edp in LAYOUTS.items():
        for loop in (Loop, *AS_PLAIN, WithClosure, WithoutClosure):
            found[loop.__name__, layout] = loop(rank, edp).run()
    return found


def different(one: State, other: State) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, str], State]]:
    return run_ranks(2, run_all)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loop", AS_PLAIN)
def test_it_is_the_plain_loop(loop: type[Loop], layout: str, ranks: list[dict[tuple[str, str], State]]) -> None:
    for result in ranks:
        assert different(ranks[0]["Loop", layout], result[loop.__name__, layout]) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_closure_is_reduced_after_it_made_its_gradients(
    layout: str, ranks: list[dict[tuple[str, str], State]]
) -> None:
    assert different(ranks[0]["WithClosure", layout], ranks[0]["WithoutClosure", layout]) == []
