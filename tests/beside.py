"""A small job whose experts migrate while it trains, and places to break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from support import training
from support.seen import same
from support.shuffle import plan_by, plan_shuffle

import eplb_runtime as eplb
from eplb_runtime.events import BalancingPaused, BalancingResumed, RebalanceAborted, RebalanceCommitted
from eplb_runtime.migration.engine import Phase

RANKS, EXPERTS, LAYERS, INTERVAL = 3, 6, 3, 2


class Job:
    """A small training job on one rank; with ``overlap`` every expert moves at every decision."""

    def __init__(
        self,
        rank: int,
        overlap: bool,
        *,
        dtype: torch.dtype = torch.float32,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        ep_group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        self.rank, self.steps, self.losses = rank, 0, []
        self._alike = {"dtype": dtype, "optimizer": optimizer, "ep_group": ep_group}
        self.model = make_model("olmoe", experts=EXPERTS, layers=LAYERS, top_k=2).to(dtype)
        if dtype == torch.float64:
            self.model.set_experts_implementation("eager")
        self.optimizer = optimizer(self.model.parameters(), lr=3e-3)
        policy = "incremental" if overlap or settings.get("replica_slots") else "static"
        settings = {"interval": INTERVAL, "timeout_seconds": 15.0, "policy": policy, **settings}
        self.balancer = training.attach(self.model, self.optimizer, ep_group=ep_group, overlap=overlap, **settings)
        self.background = self.balancer.rebalancer.overlapped
        self.engine = self.balancer.rebalancer._engine
        if overlap:
            plan_by(self.balancer, plan_shuffle)
        self.model.train()

    def step(self) -> None:
        ids = batch_of(self.rank, self.steps % 7)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.balancer.clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.steps += 1

    def until(self, kind: type, most: int = 60) -> Any:
        """Train until something of this kind happens."""
        before = len(self.balancer.events.of_type(kind))
        for _ in range(most):
            self.step()
            if len(self.balancer.events.of_type(kind)) > before:
                return self.balancer.events.of_type(kind)[-1]
        raise AssertionError(f"no {kind.__name__} in {most} steps")

    def until_sent(self, most: int = 60) -> None:
        """Train until experts are on their way; they are when this returns, and tokens are counted that no decision has
        taken: on a slow machine they leave a step later, in which one is due."""
        for _ in range(most):
            self.step()
            if self.background._flights and self.steps % INTERVAL:
                return
        raise AssertionError("nothing was sent")

    def until_committed_anew(self) -> None:
        """Train until connections stand, if they broke, and experts have moved again."""
        heard = self.balancer.events
        while len(heard.of_type(BalancingPaused)) > len(heard.of_type(BalancingResumed)):
            self.step()
        self.until(RebalanceCommitted)

    def causes(self, since: int = 0) -> list[str]:
        """Of rebalances that came to nothing, but for the first ones."""
        return [event.cause for event in self.balancer.events.of_type(RebalanceAborted)[since:]]

    def state(self) -> dict[str, torch.Tensor]:
        return eplb.logical_state_dict(self.model, self.optimizer)

    def still(self, of: type[Job] | None = None) -> Job:
        """A job like this one, or of this class, whose experts stay, after as many steps."""
        still = (of or type(self))(self.rank, overlap=False, timeout_seconds=30.0, **self._alike)
        while still.steps < self.steps:
            still.step()
        return still

    def equals(self, still: Job) -> bool:
        """End both: whether no bit of losses, weights and optimizer state differs."""
        there = {name: tensor for name, tensor in self.state().items() if "/average" not in name}
        equal = self.losses == still.losses and same(there, still.state())
        self.balancer.close()
        still.balancer.close()
        return equal


@contextmanager
def at(job: Job, rank: int, phase: Phase, do: Callable[[Any], None]) -> Iterator[None]:
    """Inside, on one rank, wherever the protocol comes to this point with something in its hands."""

    def probe(reached: Phase, subject: Any) -> None:
        if job.rank == rank and reached is phase and (phase is Phase.PREPARED or subject):
            do(subject)

    job.engine.probe = probe
    try:
        yield
    finally:
        job.engine.probe = lambda phase, subject: None


def fail(subject: Any) -> None:
    raise MemoryError("no memory on one rank")


def flip_a_bit(staged: Any) -> None:
    staged[0].record[3] ^= 1
