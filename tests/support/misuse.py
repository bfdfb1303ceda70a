"""A training loop on a model of one's own that is right, and cases that make it wrong, or keep it right, in one thing:
``torchrun --nproc-per-node 2 tests/support/misuse.py CASE`` (a docstring says what is wrong; `RIGHT` names the others).
What a running job is told of itself is in `test_guard` and `test_layers_tried`: these are left to `verify`.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import eplb_runtime as eplb

HIDDEN, EXPERTS, TOP_K, LAYERS, VOCABULARY, STEPS = 64, 8, 2, 2, 96, 14


def expert(up: Tensor, down: Tensor, rows: Tensor) -> Tensor:
    return functional.linear(functional.gelu(functional.linear(rows, up)), down)


class Stack(nn.Module):
    """Experts in tensors ``[E, ...]``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5)

    def __iter__(self) -> Iterator[Callable[[Tensor], Tensor]]:
        return (partial(expert, up, down) for up, down in zip(self.up, self.down, strict=True))


def listed() -> nn.ModuleList:
    """Experts in a list."""
    shape = lambda: (nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))  # noqa: E731
    return nn.ModuleList(nn.Sequential(*shape()) for _ in range(EXPERTS))


class MoE(nn.Module):
    """Residual; the runtime takes the place of ``run_experts``."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = experts

    def forward(self, tokens: Tensor) -> Tensor:
        weights, ids = self.router(tokens).softmax(-1).topk(TOP_K)
        return tokens + self.run_experts(tokens, ids, weights)

    def run_experts(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        of_choices = tokens.unsqueeze(1).expand(-1, TOP_K, -1)
        results = torch.zeros_like(of_choices)
        for number, one in enumerate(self.experts):
            chosen = ids == number
            results = results.masked_scatter(chosen.unsqueeze(-1), one(of_choices[chosen]))
        return (results * weights.unsqueeze(-1)).sum(dim=1)


class Model(nn.Module):
    def __init__(self, make_experts: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(MoE(make_experts()) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def nothing(*_: Any) -> None:
    """Do nothing: what a right loop does where a case has something to say."""


class Loop:
    """A right loop; a case sets one of its attributes, ahead of attach. ``before_step`` and ``after_step`` are called
    with the number of the step around the optimizer's."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.model = Model(listed)
        self.layers = [eplb.MoE(f"layers.{number}.experts", run="run_experts") for number in range(LAYERS)]
        eplb.stack_experts(self.model, self.layers)
        self.settings: dict[str, Any] = {"interval": 2, "gate": "always", "dense_gradients": "allreduce"}
        self.make_optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=3e-3)
        self.penalty: Callable[[], Any] = lambda: 0.0
        self.backward: Callable[[Tensor], object] = lambda loss: loss.backward()
        self.before_step: Callable[[int], object] = nothing
        self.after_step: Callable[[int], object] = nothing

    def experts(self) -> list[nn.Parameter]:
        """The experts' parameters, as the model has them now."""
        return [p for name, p in self.model.named_parameters() if ".experts." in name]

    def dense(self) -> list[nn.Parameter]:
        return [p for name, p in self.model.named_parameters() if ".experts." not in name]

    def loss(self, step: int) -> Tensor:
        """Of 64 tokens; small numbers come often."""
        generator = torch.Generator().manual_seed(1009 * self.rank + step)
        ids = (VOCABULARY * torch.rand(64, generator=generator) ** 3).long()
        return functional.cross_entropy(self.model(ids[:-1]), ids[1:]) + self.penalty()

    def run(self) -> None:
        self.optimizer = self.make_optimizer(self.model.parameters())
        config = eplb.BalancerConfig(**self.settings)
        self.balancer = eplb.attach(self.model, self.optimizer, layers=self.layers, config=config)
        self.model.train()
        for step in range(STEPS):
            self.backward(self.loss(step))
            self.before_step(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.after_step(step)
        self.balancer.close()

    def computed_by(self, change: Callable[[int, Tensor], Tensor]) -> None:
        """Have experts in tensors, and a ``compute`` that changes what comes out of each slot."""

        def compute(rows: Tensor, counts: Any, parameters: Mapping[str, Tensor]) -> Tensor:
            parts = zip(rows.split(list(counts.known())), parameters["up"], parameters["down"], strict=True)
            return torch.cat([change(slot, expert(up, down, part)) for slot, (part, up, down) in enumerate(parts)])

        self.model = Model(Stack)
        names = [f"layers.{number}.experts" for number in range(LAYERS)]
        self.layers = [eplb.MoE(name, run="run_experts", compute=compute) for name in names]


# -- clipping, losses and gradients ------------------------------------------------------------------------------------


def clip_what_attach_has_replaced(loop: Loop) -> None:
    """torch's clipping of a list of parameters from before attach, which has no gradients of experts any more"""
    parameters = list(loop.model.parameters())
    loop.before_step = lambda step: clip_grad_norm_(parameters, 0.1)


def penalty_that_couples(loop: Loop) -> None:
    """a penalty in the loss pulls the experts' norms together, over those that a rank holds"""
    loop.penalty = lambda: sum(p.flatten(1).norm(dim=1).var() for p in loop.experts())


def reduced_by_the_loop(loop: Loop, weight: float) -> None:
    """Leave gradients outside the experts to the loop, which adds them up over ranks, each with a weight."""
    loop.settings["dense_gradients"] = "host"
    loop.before_step = lambda step: [dist.all_reduce(p.grad.mul_(weight)) for p in loop.dense()]


def summed_by_the_loop(loop: Loop) -> None:
    """a loop that divides its loss by the number of ranks and sums the gradients that the balancer leaves to it"""
    loop.backward = lambda loss: (loss / dist.get_world_size()).backward()
    reduced_by_the_loop(loop, 1.0)


def summed_as_made(loop: Loop) -> None:
    """the same in hooks, as backward passes make them"""
    summed_by_the_loop(loop)
    loop.before_step = nothing
    for parameter in loop.dense():
        parameter.register_post_accumulate_grad_hook(lambda one: dist.all_reduce(one.grad))


def weighed_by_rank(loop: Loop) -> None:
    """a loop weighs ranks where it averages the gradients that the balancer leaves to it; experts' are not weighed"""
    reduced_by_the_loop(loop, (0.9, 0.1)[loop.rank])


# -- optimizers --------------------------------------------------------------------------------------------------------


class InClosure(torch.optim.Optimizer):
    """Momentum, which a function alone has for experts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        kept: dict[Tensor, Tensor] = {}
        self.change = lambda p: kept.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.sub_(self.change(parameter) if parameter.ndim == 3 else parameter.grad, alpha=0.1)


def state_in_closure(loop: Loop) -> None:
    """an optimizer keeps momentum where a function alone has it"""
    loop.make_optimizer = InClosure


class WritesNothing(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter].setdefault("master", parameter.clone()).sub_(parameter.grad, alpha=0.1)


def writes_nothing(loop: Loop) -> None:
    """an optimizer steps weights of its own, which the model never reads"""
    loop.make_optimizer = partial(WritesNothing, defaults={})


# -- what a loop keeps -------------------------------------------------------------------------------------------------


def ema_in_generator(loop: Loop) -> None:
    """an average of weights in a generator that waits"""

    def averaging() -> Iterator[None]:
        kept = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
        while True:
            for name, parameter in loop.model.named_parameters():
                kept[name].lerp_(parameter.detach(), 0.1)
            yield

    average = averaging()
    loop.after_step = lambda step: next(average)


def ema_as_vector(loop: Loop) -> None:
    """an average of all weights in one vector"""
    kept: list[Tensor] = []

    def average(step: int) -> None:
        vector = parameters_to_vector(loop.model.parameters()).detach()
        kept[:] = [kept[0].lerp(vector, 0.1) if kept else vector]

    loop.after_step = average


def lookahead(loop: Loop) -> None:
    """slow weights, in a list, to which the weights return every third step"""
    kept: list[Tensor] = []

    @torch.no_grad()
    def look(step: int) -> None:
        kept[:] = kept or [p.detach().clone() for p in loop.model.parameters()]
        for slow, parameter in zip(kept, loop.model.parameters(), strict=True):
            if step % 3 == 2:
                parameter.copy_(slow.lerp_(parameter, 0.5))

    loop.after_step = look


# -- `compute` ---------------------------------------------------------------------------------------------------------


def compute_by_index(loop: Loop) -> None:
    """`compute` scales by the number of a slot"""
    loop.computed_by(lambda slot, out: out * (1 + 0.1 * slot))


# -- right -------------------------------------------------------------------------------------------------------------


def averaged_by_the_loop(loop: Loop) -> None:
    """The loop averages the gradients that the balancer leaves to it; a part of a bias has none but rounding."""
    bias = loop.model.bias = nn.Parameter(torch.zeros(2))
    loop.model.head.register_forward_hook(lambda *given: given[2] * (1 + bias[0]) + bias[1])
    loop.backward = lambda loss: (64 * loss).backward()
    reduced_by_the_loop(loop, 1 / dist.get_world_size())


def clip_each(loop: Loop) -> None:
    for parameter in loop.experts():
        norms = parameter.grad.flatten(1).norm(dim=1)
        parameter.grad.mul_((1e-3 / (norms + 1e-6)).clamp(max=1).view(-1, *[1] * (parameter.ndim - 1)))


def each_expert_clipped(loop: Loop) -> None:
    """Each expert is clipped by its own norm, with a penalty on each by itself, and replicas."""
    loop.settings["replica_slots"] = 1
    loop.penalty = lambda: 0.01 * sum(p.square().sum() for p in loop.model.parameters())
    loop.before_step = lambda step: (loop.balancer.reduce_gradients(), clip_each(loop))


def two_losses(loop: Loop) -> None:
    """Two forwards, then a backward pass of each, and each expert is clipped by its own norm."""
    loss = loop.loss
    loop.loss = lambda step: (loss(step), loss(step + STEPS))
    loop.backward = lambda losses: [one.backward() for one in losses]
    loop.before_step = lambda step: clip_each(loop)


def compute(loop: Loop) -> None:
    """Experts in tensors, with a ``compute``."""
    loop.computed_by(lambda slot, out: out)


WRONG = (
    *(clip_what_attach_has_replaced, penalty_that_couples, summed_by_the_loop, summed_as_made, weighed_by_rank),
    *(state_in_closure, writes_nothing, ema_in_generator, ema_as_vector, lookahead, compute_by_index),
)
RIGHT = (averaged_by_the_loop, each_expert_clipped, two_losses, compute)
CASES = {case.__name__: case for case in (*WRONG, *RIGHT)}


def main(name: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    loop = Loop()
    CASES[name](loop)
    loop.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
