"""Expert work of a model that is only watched: the calls of its experts are marked, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eplb_runtime.hosts.attaching.expert_spans import mark_calls
from eplb_runtime.load.expert_clock import ExpertClock


class FakeClock(ExpertClock):
    now = 0.0

    def mark(self) -> float:
        return self.now


class Slow(torch.autograd.Function):
    """Takes 1 s of the clock forward and 2 s backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: FakeClock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, backward
        clock.now += forward
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now += ctx.seconds
        return gradient * 1.5, None, None, None


class Experts(nn.Module):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, hidden_states: Tensor) -> Tensor:
        return Slow.apply(hidden_states, self.clock, 1.0, 2.0)


class Block(nn.Module):
    """Attention of 10 s and 20 s, and experts."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock, self.experts = clock, Experts(clock)
        self.by_name = False

    def forward(self, x: Tensor) -> Tensor:
        x = Slow.apply(x, self.clock, 10.0, 20.0)
        return x + (self.experts(hidden_states=x) if self.by_name else self.experts(x))


def gradient(block: Block, checkpointing: bool = False) -> Tensor:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    out = checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
    out.square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("checkpointing, seconds", [(False, 3.0), (True, 4.0)])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_call_and_its_backward_pass_count_and_nothing_around_them(
    checkpointing: bool, seconds: float, by_name: bool
) -> None:
    clock = FakeClock()
    block = Block(clock)
    block.by_name = by_name
    undo = mark_calls(block.experts, "hidden_states", clock)
    plain = gradient(block, checkpointing)
    assert clock.take() == (), "off: nothing is recorded"
    before = clock.now
    clock.begin_step()
    marked = gradient(block, checkpointing)
    clock.end_step()
    assert torch.equal(plain, marked)
    (step,) = clock.take()
    assert step.time() == (clock.now - before, seconds)
    undo()
    clock.begin_step()
    gradient(block)
    clock.end_step()
    assert clock.take() == (), "undone"


def test_evaluation_is_not_measured() -> None:
    clock = FakeClock()
    experts = Experts(clock).eval()
    mark_calls(experts, "hidden_states", clock)
    clock.begin_step()
    experts(torch.ones(2))
    clock.end_step()
    assert clock.take() == ()
