"""A loop on a hand-written mixture of experts, named by `eplb_runtime.MoE`, that is wrong, or right, in one thing:
``torchrun --nproc-per-node 2 tests/support/misuse/own.py --case NAME`` (``--list`` has the names)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from job import Job, Table, main
from torch import Tensor, nn
from torch.nn import functional

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
def run_with_factor_of_list(job: Job) -> None:
    """`run` multiplies by a factor, with experts in a list"""
    changed(job, lambda tokens, result: 2.5 * result)


# -- `compute` that does not go by expert and row ----------------------------------------------------------------------


@found("either")
def compute_by_index(job: Job) -> None:
    """`compute` scales by the number of a slot"""
    in_tensors(job, by_expert(lambda slot, out: out * (1 + 0.1 * slot)))


@found("either")
def compute_with_dropout(job: Job) -> None:
    """experts draw random numbers"""
    job.after_attach = lambda: torch.manual_seed(job.rank)
    in_tensors(job, by_expert(lambda slot, out: functional.dropout(out, 0.2)))


# -- the loop around it ------------------------------------------------------------------------------------------------


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
def compute(job: Job) -> None:
    """Experts in tensors, with a ``compute``."""
    in_tensors(job, by_expert())


if __name__ == "__main__":
    main(make, CASES)
