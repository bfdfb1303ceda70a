"""A loop on a hand-written mixture of experts, named by `eplb_runtime.MoE`, that is wrong, or right, in one thing:
``torchrun --nproc-per-node 2 tests/support/misuse/own.py --case NAME`` (``--list`` has the names)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from job import Job, Table, main
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import eplb_runtime as eplb

HIDDEN, EXPERTS, TOP_K, LAYERS, VOCABULARY = 64, 8, 2, 2, 96
CASES = Table()
found, right = CASES.found, CASES.is_right
Rows = Callable[[Tensor], Tensor]


def expert(up: Tensor, down: Tensor, rows: Tensor) -> Tensor:
    return functional.linear(functional.gelu(functional.linear(rows, up)), down)


class Stack(nn.Module):
    """The experts in tensors ``[E, ...]``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5)

    def __iter__(self) -> Iterator[Rows]:
        return (partial(expert, up, down) for up, down in zip(self.up, self.down, strict=True))


def listed() -> nn.ModuleList:
    """The experts in a list."""
    shape = lambda: (nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))  # noqa: E731
    return nn.ModuleList(nn.Sequential(*shape()) for _ in range(EXPERTS))


class MoE(nn.Module):
    """Residual; the runtime takes the place of ``run_experts``.

    Args:
        change: of tokens and what the experts gave, at the end of ``run_experts``; where a user has more in it than
            that.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = experts
        self.change: Callable[[Tensor, Tensor], Tensor] = lambda tokens, result: result

    def forward(self, tokens: Tensor) -> Tensor:
        weights, ids = self.router(tokens).softmax(-1).topk(TOP_K)
        return tokens + self.run_experts(tokens, ids, weights)

    def run_experts(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        of_choices = tokens.unsqueeze(1).expand(-1, TOP_K, -1)
        results = torch.zeros_like(of_choices)
        for number, one in enumerate(self.experts):
            chosen = ids == number
            results = results.masked_scatter(chosen.unsqueeze(-1), one(of_choices[chosen]))
        return self.change(tokens, (results * weights.unsqueeze(-1)).sum(dim=1))


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


def make(options: argparse.Namespace) -> Job:
    """The right loop, with experts in a list."""
    model = Model(listed).to(getattr(torch, options.dtype))

    def loss(ids: Tensor) -> Tensor:
        return functional.cross_entropy(job.trained(ids.flatten()[:-1]), ids.flatten()[1:])

    job = Job(options, model, loss)
    layers = [eplb.MoE(f"layers.{number}.experts", run="run_experts") for number in range(LAYERS)]
    eplb.stack_experts(model, layers)
    job.layers = layers
    return job


# -- `run` that does more than running experts -------------------------------------------------------------------------


def changed(job: Job, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    for layer in job.model.layers:
        layer.change = change


def in_tensors(job: Job, compute: Callable[..., Tensor]) -> None:
    """Experts in tensors ``[E, ...]``, computed by ``compute(rows, counts, parameters)``."""
    job.model = Model(Stack).to(getattr(torch, job.options.dtype))
    layers = [eplb.MoE(f"layers.{number}.experts", run="run_experts", compute=compute) for number in range(LAYERS)]
    job.layers = layers


def by_expert(change: Callable[[int, Tensor], Tensor] = lambda slot, out: out) -> Callable[..., Tensor]:
    """A ``compute`` that sends each slot's rows through its expert, and changes what comes out."""

    def compute(rows: Tensor, counts: Any, parameters: Mapping[str, Tensor]) -> Tensor:
        parts = zip(rows.split(list(counts.known())), parameters["up"], parameters["down"], strict=True)
        return torch.cat([change(slot, expert(up, down, part)) for slot, (part, up, down) in enumerate(parts)])

    return compute


@found("live")
def run_with_shared_expert(job: Job) -> None:
    """`run` adds a shared expert, which is replaced along with it"""
    in_tensors(job, by_expert())
    shared = nn.Linear(HIDDEN, HIDDEN)
    job.model.shared = shared
    changed(job, lambda tokens, result: result + shared(tokens))


@found("live")
def run_with_factor(job: Job) -> None:
    """`run` multiplies by a factor"""
    in_tensors(job, by_expert())
    changed(job, lambda tokens, result: 2.5 * result)


@found("live")
def run_with_factor_of_list(job: Job) -> None:
    """`run` multiplies by a factor, with experts in a list"""
    changed(job, lambda tokens, result: 2.5 * result)


@found("live")
def run_with_norm(job: Job) -> None:
    """`run` normalizes what the experts give"""
    in_tensors(job, by_expert())
    changed(job, lambda tokens, result: functional.layer_norm(result, (HIDDEN,)))


@found("live")
def run_with_residual(job: Job) -> None:
    """`run` adds its input"""
    in_tensors(job, by_expert())
    changed(job, lambda tokens, result: tokens + result)


@found("live")
def run_with_capacity(job: Job) -> None:
    """`run` drops what is beyond an expert's capacity, of 4 choices"""
    in_tensors(job, by_expert())

    class Capped(MoE):
        def run_experts(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            chosen = functional.one_hot(ids.flatten(), EXPERTS)
            place = (chosen.cumsum(0) * chosen).sum(1).view_as(ids)
            return super().run_experts(tokens, ids, weights * (place <= 4))

    for layer in job.model.layers:
        layer.__class__ = Capped


@found("live")
def run_with_normalized_weights(job: Job) -> None:
    """`run` divides router weights by their sum"""
    in_tensors(job, by_expert())

    class Normalized(MoE):
        def run_experts(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return super().run_experts(tokens, ids, weights / weights.sum(-1, keepdim=True))

    for layer in job.model.layers:
        layer.__class__ = Normalized


# -- `compute` that does not go by expert and row ----------------------------------------------------------------------


@found("either")
def compute_by_index(job: Job) -> None:
    """`compute` scales by the number of a slot"""
    in_tensors(job, by_expert(lambda slot, out: out * (1 + 0.1 * slot)))


@found("either")
def compute_with_table(job: Job) -> None:
    """`compute` has a scale for each slot, which it does not get as a parameter"""
    table = torch.linspace(0.5, 1.5, EXPERTS)
    in_tensors(job, by_expert(lambda slot, out: out * table[slot]))


@found("either")
def compute_normalizes_experts(job: Job) -> None:
    """`compute` subtracts the mean over an expert's rows"""
    in_tensors(job, by_expert(lambda slot, out: out - out.mean(0) if len(out) else out))


@found("either")
def compute_normalizes_rows(job: Job) -> None:
    """`compute` divides by a norm over all rows of a rank"""

    def compute(rows: Tensor, counts: Any, parameters: Mapping[str, Tensor]) -> Tensor:
        out = by_expert()(rows, counts, parameters)
        return out / (out.norm() / max(len(out), 1) ** 0.5 + 1e-3)

    in_tensors(job, compute)


@found("either")
def compute_normalizes_weights(job: Job) -> None:
    """`compute` divides weights by their norm over the experts of a rank"""

    def compute(rows: Tensor, counts: Any, parameters: Mapping[str, Tensor]) -> Tensor:
        scaled = {name: 8 * tensor / tensor.norm() for name, tensor in parameters.items()}
        return by_expert()(rows, counts, scaled)

    in_tensors(job, compute)


@found("either")
def compute_with_capacity(job: Job) -> None:
    """`compute` gives nothing for rows beyond an expert's 16th"""
    in_tensors(job, by_expert(lambda slot, out: torch.cat([out[:16], torch.zeros_like(out[16:])])))


@found("either")
def compute_with_dropout(job: Job) -> None:
    """experts draw random numbers"""
    job.after_attach = lambda: torch.manual_seed(job.rank)
    in_tensors(job, by_expert(lambda slot, out: functional.dropout(out, 0.2)))


@found("either")
def compute_with_running_mean(job: Job) -> None:
    """`compute` keeps a running mean for each slot in a dict, and subtracts it"""
    means: dict[tuple[int, int], Tensor] = {}

    def change(slot: int, out: Tensor, layer: int) -> Tensor:
        if len(out):
            mean = means.setdefault((layer, slot), torch.zeros(HIDDEN, dtype=out.dtype))
            mean.lerp_(out.detach().mean(0), 0.1)
            out = out - mean
        return out

    in_tensors(job, by_expert())
    for number, layer in enumerate(job.layers or ()):
        object.__setattr__(layer, "compute", by_expert(partial(change, layer=number)))


@found("live")
def experts_that_differ(job: Job) -> None:
    """a list of experts with other settings"""
    model = Model(listed)
    for layer in model.layers:
        layer.experts[3][1] = nn.GELU(approximate="tanh")
    eplb.stack_experts(model, job.layers or ())
    job.model = model


# -- the loop around it ------------------------------------------------------------------------------------------------


@found("either")
def clip_by_torch(job: Job) -> None:
    """each rank clips by the norm of its own gradients"""
    job.before_step = lambda step: clip_grad_norm_(job.model.parameters(), 0.05)


@found("either")
def counts_by_row(job: Job) -> None:
    """decay grows with the age of an expert, which is kept in a list by row"""
    ages: dict[str, list[int]] = {}

    @torch.no_grad()
    def decay(step: int) -> None:
        for name, parameter in job.experts().items():
            kept = ages.setdefault(name, [0] * len(parameter))
            for row, gradient in enumerate(parameter.grad if parameter.grad is not None else ()):
                kept[row] += int(gradient.norm() > gradient.numel() ** 0.5 * 1e-3)
                parameter[row].mul_(0.99 ** kept[row])

    job.before_step = decay


@found("either")
def clip_value_unreached(job: Job) -> None:
    """each rank's own gradients are clipped at a value that none of the first steps reaches"""
    job.before_step = lambda step: clip_grad_value_(job.model.parameters(), 10.0)


@found("either")
def decay_of_before(job: Job) -> None:
    """the loop decays parameters that it has listed before attach"""
    listed_before = list(job.model.parameters())

    @torch.no_grad()
    def decay(step: int) -> None:
        for parameter in listed_before:
            parameter.mul_(0.99)

    job.after_step = decay


@found("either")
def decay_of_a_list(job: Job) -> None:
    """the same, of the parameters of lists that it has stacked since"""
    job.model = Model(listed)
    decay_of_before(job)
    eplb.stack_experts(job.model, job.layers or ())


@found("either")
def ema_in_forward(job: Job) -> None:
    """an average that the model's forward makes new, of the one before"""
    kept: dict[str, Tensor] = {}

    def average(model: nn.Module, *_: Any) -> None:
        for name, parameter in model.named_parameters():
            kept[name] = 0.9 * kept.get(name, 0) + 0.1 * parameter.detach()

    job.after_attach = lambda: job.model.register_forward_pre_hook(average)


@found("either")
def critic_alone(job: Job) -> None:
    """a critic with an optimizer of its own, whose gradients nobody averages"""
    critic = nn.Linear(VOCABULARY, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (critic(job.model(job.batch(number).flatten()).detach()) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    job.before_step = step


# -- right -------------------------------------------------------------------------------------------------------------


@right
def sharpness_aware(job: Job) -> None:
    """Gradients at weights that are moved up the slope first; what is added to them is made new in each step."""
    added: dict[str, Tensor] = {}

    def climb(step: int) -> None:
        norm = job.balancer.clip_grad_norm_(1e9)
        with torch.no_grad():
            for name, parameter in job.model.named_parameters():
                added[name] = parameter.grad * (0.5 / norm).to(parameter.dtype)
                parameter.add_(added[name])
        job.optimizer.zero_grad()
        job.loss(job.batch(step)).backward()
        with torch.no_grad():
            for name, parameter in job.model.named_parameters():
                parameter.sub_(added[name])

    job.before_step = climb


@right
def gradients_taken_by_hooks(job: Job) -> None:
    """Gradients in buffers of the loop's own, which the parameters are given ahead of the step."""
    sums: dict[Tensor, Tensor] = {}

    def take(parameter: Tensor) -> None:
        sums[parameter], parameter.grad = sums.get(parameter, 0) + parameter.grad, None

    def give(step: int) -> None:
        while sums:
            parameter, parameter.grad = sums.popitem()

    job.after_attach = lambda: [p.register_post_accumulate_grad_hook(take) for p in job.model.parameters()]
    job.before_step = give


@right
def plain(job: Job) -> None:
    """Experts in a list, stacked."""


@right
def compute(job: Job) -> None:
    """Experts in tensors, with a ``compute``."""
    in_tensors(job, by_expert())


@right
def shared_expert(job: Job) -> None:
    """A shared expert, a factor and a norm outside `run`."""
    in_tensors(job, by_expert())
    shared = job.model.shared = nn.Linear(HIDDEN, HIDDEN)

    class Whole(MoE):
        def forward(self, tokens: Tensor) -> Tensor:
            tokens = functional.layer_norm(tokens, (HIDDEN,))
            return shared(tokens) + 2.5 * super().forward(tokens)

    for layer in job.model.layers:
        layer.__class__ = Whole


@right
def noise_in_the_router(job: Job) -> None:
    """Every rank draws noise for its own tokens' logits."""
    job.after_attach = lambda: torch.manual_seed(job.rank)
    for layer in job.model.layers:
        layer.router.register_forward_hook(lambda module, args, out: out + 0.1 * torch.randn_like(out))


@right
def router_bias(job: Job) -> None:
    """A bias on the choice of experts goes against their load, which all ranks add up."""
    for layer in job.model.layers:
        bias = torch.zeros(EXPERTS)
        layer.router.register_forward_hook(lambda module, args, out, bias=bias: out + bias.to(out.dtype))
        load = lambda module, args, out: functional.one_hot(out.topk(TOP_K).indices, EXPERTS).sum((0, 1))  # noqa: E731

        def balance(module: nn.Module, args: Any, out: Tensor, bias: Tensor = bias, load: Any = load) -> None:
            dist.all_reduce(tokens := load(module, args, out))
            bias.sub_(1e-2 * (tokens - tokens.float().mean()).sign())

        layer.router.register_forward_hook(balance)


@right
def ddp(job: Job) -> None:
    """In DistributedDataParallel."""
    job.settings["dense_gradients"] = "host"
    job.after_attach = lambda: setattr(job, "trained", DistributedDataParallel(job.model))


@right
def replicas(job: Job) -> None:
    """A replica slot on each rank."""
    job.settings["replica_slots"] = 1
    in_tensors(job, by_expert())


@right
def overlap(job: Job) -> None:
    """Experts move while training goes on."""
    job.settings["overlap"] = True


if __name__ == "__main__":
    main(make, CASES)
