"""A training job in a few words, taken by the step (`Run`) or to its end (`train`), and the trace by which two jobs are
compared: of the same bits are a job whose experts move and the same whose experts stay; near these are the same with EP
groups of one rank (`single`) and without a balancer in one process (`alone`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.moe_models import batch_of, make_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eplb_runtime as eplb
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted

from . import training
from .seen import digests
from .shuffle import plan_by, plan_shuffle, wait_until_compiled

ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)


def changing(rank: int, number: int) -> Tensor:
    """Text that changes every two steps, and with it the experts that it calls for."""
    return batch_of(rank, number) % 12 + 12 * ((number // 2) % 7)


def of_family(job: Job, **more: Any) -> Any:
    """A small model of a real family."""
    sizes = {"experts": job.experts, "layers": job.layers, "top_k": job.top_k, "width": job.width, "seed": job.seed}
    model: Any = make_model(job.family, **sizes, **more).to(job.dtype)
    model.set_experts_implementation(job.implementation)
    return model


def of_next_tokens(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@dataclass(frozen=True)
class Job:
    """A model, where its parts are, what trains it, settings of the balancer, and what happens in its steps.

    Args:
        model: makes it of the job.
        loss: of the model and a batch.
        ep: ranks of an EP group; None: all.
        sliced: each expert is cut over the EDP ranks, all else over all ranks, by `fully_shard`.
        planner: says where experts go at each decision; without one they stay.
        recompute: ``"layers"`` or ``"reentrant"``: of each layer; ``"model"``; ``"nested"``: of both.
        at_once: batches whose losses are added up before one backward pass.
        clip: norm of all gradients; 0: they are not clipped.
        overflow: the step in which one rank's gradients overflow; without a scaler nobody takes it.
    """

    family: str = "olmoe"
    model: Callable[[Job], Any] = of_family
    loss: Callable[[Any, Tensor], Tensor] = of_next_tokens
    seed: int = 0
    experts: int = 8
    layers: int = 2
    top_k: int = 2
    width: int = 32
    dtype: torch.dtype = torch.float32
    implementation: str = "grouped_mm"
    ep: int | None = None
    sliced: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] | None = ADAMW
    planner: Callable[..., eplb.Plan] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    batches: Callable[[int, int], Tensor] = batch_of
    at_once: int = 1
    recompute: str = ""
    compiled: bool = False
    autocast: bool = False
    averages: bool = False
    scaled: bool = False
    overflow: int = -1
    hold_back: bool = False
    clip: float = 0.0


@dataclass(frozen=True)
class Trace:
    """Losses and norms by step, digests of the state by logical expert, and how experts got to where they are."""

    losses: list[float]
    norms: list[float]
    state: dict[str, str]
    scale: float | None
    commits: int
    aborted: list[str]
    placement: str

    @property
    def bits(self) -> dict[str, Any]:
        """What does not depend on where experts are."""
        return {"losses": self.losses, "norms": self.norms, **self.state}


def moved(job: Job) -> Job:
    """All experts change places at each decision."""
    return replace(job, planner=plan_shuffle)


def static(job: Job) -> Job:
    return replace(job, planner=None)


def single(job: Job) -> Job:
    """Each rank has all experts, and nothing moves."""
    return replace(static(job), ep=1)


def alone(job: Job, ranks: int) -> Run:
    """The job in this process, without a balancer, on the batches of all ranks."""

    def mean_loss(model: Any, batches: Any) -> Tensor:
        return sum(job.loss(model, batch) for batch in batches) / ranks

    def of_all(_: int, number: int) -> Any:
        return [job.batches(rank, number) for rank in range(ranks)]

    return Run(0, replace(job, loss=mean_loss, batches=of_all))


def mean_over_ranks(numbers: list[float]) -> list[float]:
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


class Run:
    """A job on this rank: the model, perhaps in a wrapper (`module`), its optimizer, and after `attach` balancer."""

    balancer: eplb.Balancer

    def __init__(self, rank: int, job: Job) -> None:
        self.rank, self.job, self.steps = rank, job, 0
        self._averages: dict[str, Tensor] = {}
        self._scaler: eplb.GradScaler | None = None
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.model = self.module = job.model(job).train()
        if job.recompute in ("layers", "reentrant", "nested"):
            self.model.gradient_checkpointing_enable({"use_reentrant": job.recompute == "reentrant"})
        if job.recompute == "reentrant":
            self.model.enable_input_require_grads()
        policy = "incremental" if job.planner else "static"
        self._settings = {"interval": 1, "lag": 0, "gate": "always", "policy": policy, **job.settings}
        if job.sliced:
            ep = job.ep or dist.get_world_size()
            self._settings["dense_gradients"] = "host"
            training.shard(self.model, ep, dist.get_world_size() // ep, **self._settings)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: Any = job.optimizer(trained) if job.optimizer else None
        self.clip: Callable[[float], Tensor] = partial(nn.utils.clip_grad_norm_, trained)
        self._step = torch.compile(self._step_of, backend="aot_eager") if job.compiled else self._step_of

    def attach(self, **more: Any) -> Run:
        """With more settings, or groups."""
        job = self.job
        if job.ep:
            more["ep_group"] = training.meshes(job.ep, dist.get_world_size() // job.ep)[0]["ep"].get_group()
        self.balancer = training.attach(self.model, self.optimizer, **{**self._settings, **more})
        self.clip = self.balancer.clip_grad_norm_
        if job.planner:
            plan_by(self.balancer, job.planner)
            wait_until_compiled(self.balancer)
        if job.averages:
            names = self.balancer.layer_of_parameter
            self._averages = {name: self.model.get_parameter(name).detach().clone() for name in names}
            self.balancer.register_all("ema", self._averages)
        if job.scaled:
            self._scaler = eplb.GradScaler(self.balancer, init_scale=1024.0, growth_interval=1000)
        return self

    @property
    def engine(self) -> Any:
        """Where tests put faults: its `probe`."""
        return self.balancer.rebalancer._engine

    def forward(self) -> Tensor:
        """The loss of the next step's batches."""
        return sum(map(self._loss_of, range(self.job.at_once * self.steps, self.job.at_once * (self.steps + 1))))

    def _loss_of(self, number: int) -> Tensor:
        batch = self.job.batches(self.rank, number)

        def loss() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.job.autocast):
                return self.job.loss(self.module, batch)

        return checkpoint(loss, use_reentrant=False) if self.job.recompute in ("model", "nested") else loss()

    def backward(self, loss: Tensor) -> None:
        with self.balancer.no_sync() if self.job.hold_back else nullcontext():
            (self._scaler.scale(loss) if self._scaler else loss).backward()

    def update(self) -> None:
        """Step the optimizer, with all that is done before and after it."""
        job, overflows = self.job, self.steps == self.job.overflow
        if self._scaler:
            if overflows and self.rank == 1:
                self.model.model.layers[0].mlp.experts.down_proj.grad[0, 0, 0] = torch.inf
            self._scaler.step(self.optimizer)
            self._scaler.update()
        elif not overflows:
            if job.clip:
                self.norms.append(float(self.clip(job.clip)))
            self.optimizer.step()
        self.optimizer.zero_grad()
        for name, average in self._averages.items():
            average.lerp_(self.model.get_parameter(name).detach(), 0.1)
        self.steps += 1

    def _step_of(self) -> Tensor:
        loss = self.forward()
        self.backward(loss)
        self.update()
        return loss

    def step(self) -> None:
        self.losses.append(self._step().item())

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            self.step()
        return self

    def state(self) -> dict[str, Tensor]:
        return eplb.logical_state_dict(self.model, self.optimizer)

    def end(self) -> Trace:
        events = self.balancer.events
        trace = Trace(
            self.losses,
            self.norms,
            digests(self.state()),
            self._scaler.get_scale() if self._scaler else None,
            len(events.of_type(RebalanceCommitted)),
            [event.cause for event in events.of_type(RebalanceAborted)],
            self.balancer.placement.digest(),
        )
        self.balancer.close()
        return trace


def train(rank: int, job: Job) -> Trace:
    return Run(rank, job).attach().train(job.steps).end()


def train_all(rank: int, *jobs: Job) -> list[Trace]:
    return [train(rank, job) for job in jobs]
