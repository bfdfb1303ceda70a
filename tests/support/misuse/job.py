"""A training loop that is right, and whose parts a case replaces; arguments of the scripts that run it."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import eplb_runtime as eplb

Found = Literal["live", "verify", "either"]
"""What has to find a case: a line of the running job, the verdict of `eplb-runtime verify`, or one of both."""


def nothing(*_: Any) -> None:
    """Do nothing: what a right loop does where a case has something to say."""


@dataclass
class Job:
    """A right loop; a case sets one of its attributes, ahead of attach.

    Args:
        options: of the command line.
        model: whole, the same on every rank.
        loss: of one batch; asks ``trained``.
        layers: for attach.
        settings: of `eplb.BalancerConfig`.
        make_optimizers: called with the model ahead of attach.
        after_attach: called once, ahead of the first step; and ``trained`` is what it may wrap.
        backward: called with the loss.
        before_step, after_step: called with the number of the step, from 0, around the optimizers' steps.
        step: steps the optimizers.
    """

    options: argparse.Namespace
    model: Any
    loss: Callable[[Tensor], Tensor]
    layers: Sequence[eplb.MoE] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = lambda model: []
    after_attach: Callable[[], object] = nothing
    backward: Callable[[Tensor], object] = lambda loss: loss.backward()
    before_step: Callable[[int], object] = nothing
    step: Callable[[], object] = nothing
    after_step: Callable[[int], object] = nothing
    trained: Any = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    balancer: Any = None

    def __post_init__(self) -> None:
        self.rank = dist.get_rank()
        self.settings = {"interval": 2, "gate": "always", "dense_gradients": "allreduce"}
        self.make_optimizers = lambda model: [torch.optim.AdamW(model.parameters(), lr=3e-3)]
        self.step = lambda: [optimizer.step() for optimizer in self.optimizers]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first one."""
        return self.optimizers[0]

    def experts(self) -> dict[str, nn.Parameter]:
        """The experts' parameters by name, as the model has them now."""
        return {name: p for name, p in self.model.named_parameters() if ".experts." in name}

    def batch(self, step: int) -> Tensor:
        """int64 ``[4, 16]``: small numbers come often."""
        seed = (self.options.seed * 1009 + self.rank) * 1009 + step
        generator = torch.Generator().manual_seed(seed)
        return (96 * torch.rand(4, 16, generator=generator) ** 3).long()

    def from_step(self, first: int, change: Callable[[], object]) -> Callable[[int], object]:
        """What does nothing before the step of this number, counted from 1, and calls ``change`` from then on."""
        return lambda step: change() if step + 1 >= first else None

    def train(self) -> list[float]:
        """Attach, train, and return the losses of this rank."""
        optimizers = self.make_optimizers(self.model)
        config = eplb.BalancerConfig(**self.settings)
        self.balancer = eplb.attach(self.model, optimizers, layers=self.layers, config=config)
        self.trained, self.optimizers = self.model, optimizers
        self.model.train()
        self.after_attach()
        losses = []
        for step in range(self.options.steps):
            loss = self.loss(self.batch(step))
            self.backward(loss)
            self.before_step(step)
            self.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.after_step(step)
            losses.append(loss.item())
        self.balancer.close()
        return losses


Case = Callable[[Job], object]


class Table:
    """The cases of a script.

    Attributes:
        wrong: name -> (the case, what is wrong, what has to find it).
        right: name -> the case.
    """

    def __init__(self, wrong: dict[str, tuple[Case, str, Found]] | None = None) -> None:
        self.wrong = wrong or {}
        self.right: dict[str, Case] = {}

    def found(self, by: Found) -> Callable[[Case], Case]:
        """Put in a wrong case, whose first line of documentation says what is wrong."""

        def put(case: Case) -> Case:
            self.wrong[case.__name__] = case, (case.__doc__ or "").splitlines()[0], by
            return case

        return put

    def is_right(self, case: Case) -> Case:
        """Put in a right case."""
        self.right[case.__name__] = case
        return case


def with_penalty(job: Job, penalty: Callable[[], Any]) -> None:
    """Add something to the loss."""
    plain = job.loss
    job.loss = lambda ids: plain(ids) + penalty()


def clones(job: Job) -> dict[str, Tensor]:
    """The parameters as they are now, by name."""
    return {name: p.detach().clone() for name, p in job.model.named_parameters()}


@torch.no_grad()
def lerp(kept: dict[str, Tensor], job: Job) -> None:
    """Average the parameters into what is kept."""
    for name, parameter in job.model.named_parameters():
        kept[name].lerp_(parameter, 0.1)


def fork(ranks: int) -> None:
    """Return in each of so many children, as ranks; end with them, all of them once one has failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children = set()
    for rank in range(ranks):
        if not (child := os.fork()):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
            return
        children.add(child)
    while children:
        ended, status = os.wait()
        children.remove(ended)
        if status:
            for child in children:
                os.kill(child, signal.SIGTERM)
            sys.exit(1)
    sys.exit(0)


def main(make: Callable[[argparse.Namespace], Job], cases: Table) -> None:
    """Run one case, or list them."""
    wrong, right = cases.wrong, cases.right
    parser = argparse.ArgumentParser()
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--case", choices=wrong, metavar="NAME", help="a loop that is wrong in one thing")
    chosen.add_argument("--right", choices=right, metavar="NAME", help="a loop that is right")
    chosen.add_argument("--list", action="store_true", help="print all names as JSON, with what is wrong")
    parser.add_argument("--ranks", type=int, default=0, help="start so many here, after one import, without torchrun")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    if options.list:
        print(json.dumps({"wrong": {name: case[1:] for name, case in wrong.items()}, "right": list(right)}))
        return
    if options.ranks:
        fork(options.ranks)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(options.seed)
    job = make(options)
    if options.case or options.right:
        (wrong[options.case][0] if options.case else right[options.right])(job)
    losses = job.train()
    print(f"rank {job.rank}:", *(f"{loss:.6f}" for loss in losses), flush=True)
    dist.destroy_process_group()
