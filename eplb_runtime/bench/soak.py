"""Train for minutes while a rebalance after another is broken in a random way, beside a twin that nobody disturbs.

After each step the losses of both are compared bit by bit; all the while threads, descriptors and memory are watched.
What is broken stands in `soak_faults.py`.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..balancer import Balancer
from ..config import BalancerConfig
from ..events import BalancingPaused, BalancingResumed, Event, RebalanceAborted, RebalanceCommitted
from ..hosts import attach
from ..planner.shuffle import plan_shuffle
from .soak_faults import FAULTS, Faults
from .train import NEVER, MoEStack, Workload, choices

INTERVAL = 2
STEPS_BETWEEN_CLOCKS = 8
"""Ranks agree on the time as often, and go on or end together."""
REPORT_SECONDS = 10.0
HEALTHY_SHARE = 0.3
"""Of decisions that nobody disturbs."""
RECOVERY_SECONDS = 60.0
"""After the last fault a rebalance must have committed within."""


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    threads: int
    descriptors: int
    resident_mib: float

    @classmethod
    def now(cls) -> Held:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        )


class _Job:
    """A model in training."""

    def __init__(self, work: Workload, config: BalancerConfig) -> None:
        torch.manual_seed(0)
        self._work = work
        self._model = MoEStack(work)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self.balancer: Balancer = attach(self._model, self._optimizer, config=config)
        self._model.train()

    def step(self, number: int) -> torch.Tensor:
        """The loss of a step, on this rank."""
        work = self._work
        generator = torch.Generator().manual_seed(number * 1009 + dist.get_rank())
        hidden_TD = torch.randn(work.tokens, work.hidden, generator=generator)
        ids_LTK = torch.stack([choices(work, work.skew, generator) for _ in range(work.layers)])
        loss: torch.Tensor = self._model(hidden_TD, ids_LTK, torch.full((work.tokens, work.top_k), 1 / work.top_k))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def run(
    device: torch.device,
    minutes: float,
    *,
    seed: int = 0,
    timeout_seconds: float = 3.0,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Collective over the world.

    Args:
        device: the CPU; faults of a device are not made here.
        minutes: of training.
        seed: of the faults.
        timeout_seconds: of the disturbed balancer; stalls are a little longer.
        say: hears a line of progress, on rank 0.

    Returns:
        JSON-able: ``passed`` (on all ranks ``identical``, ``bounded``, and ``alive``: rebalances commit again once
        nothing is broken any more), ``minutes``, ``ranks``, ``steps``, ``committed``, ``aborted``, ``paused``,
        ``resumed``, ``faults`` (how often each was made), and of the rank that holds most ``threads``, ``descriptors``,
        ``resident_mib``: the most of the first half, the most of the second, and the least of the last quarter.
    """
    logging.getLogger("eplb_runtime").setLevel(logging.CRITICAL)  # each fault warns
    work = Workload(experts=4 * dist.get_world_size(), hidden=32, width=64, tokens=64)
    twin = _Job(work, BalancerConfig(policy="static", interval=NEVER, guard="off"))
    config = BalancerConfig(interval=INTERVAL, gate="always", timeout_seconds=timeout_seconds, guard="warn")
    job = _Job(work, config)
    job.balancer._wait_until_compiled()
    job.balancer._plan_with(plan_shuffle)
    seen: Counter[type[Event]] = Counter()  # the log keeps the newest events only
    job.balancer.events.subscribe(lambda event: seen.update([type(event)]))
    faults, chance = Faults(job.balancer, timeout_seconds), random.Random(seed)
    made: Counter[str] = Counter()
    held: list[Held] = []
    began, reported, step, same = time.monotonic(), time.monotonic(), 0, True
    while not _on_any(step, time.monotonic() - began > 60 * minutes):
        if step % INTERVAL == INTERVAL - 1:
            # The same on every rank: which fault, and whose.
            name = "none" if chance.random() < HEALTHY_SHARE else chance.choice(sorted(FAULTS))
            faults.make(name, chance.randrange(dist.get_world_size()))
            made[name] += 1
        loss, undisturbed = job.step(step), twin.step(step)
        same = same and torch.equal(loss, undisturbed)
        step += 1
        if step % STEPS_BETWEEN_CLOCKS == 0:
            held.append(Held.now())
        if dist.get_rank() == 0 and time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            say(_progress(step, time.monotonic() - began, seen, held[-1], same))
    faults.make("none", 0)
    ended, committed = time.monotonic(), seen[RebalanceCommitted]
    alive = False
    while not (alive or _on_any(step, time.monotonic() - ended > RECOVERY_SECONDS)):
        same = torch.equal(job.step(step), twin.step(step)) and same
        step += 1
        alive = _on_any(step, seen[RebalanceCommitted] > committed)
    result = {**_result(seen, held, same, alive), "steps": step, "minutes": (time.monotonic() - began) / 60}
    job.balancer.close()
    twin.balancer.close()
    return {**result, "ranks": dist.get_world_size(), "faults": dict(sorted(made.items()))}


def _on_any(step: int, holds: bool) -> bool:
    """Whether it holds on any rank, as all see it; asked now and then only."""
    if step % STEPS_BETWEEN_CLOCKS:
        return False
    anywhere = torch.tensor([holds], dtype=torch.int64)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    return bool(anywhere.item())


def _progress(step: int, seconds: float, seen: Mapping[type[Event], int], held: Held, same: bool) -> str:
    return (
        f"{seconds / 60:5.1f} min   step {step:>6}   committed {seen[RebalanceCommitted]:>5}   "
        f"aborted {seen[RebalanceAborted]:>5}   threads {held.threads}   descriptors {held.descriptors}   "
        f"{held.resident_mib:.0f} MiB   losses {'identical' if same else 'DIFFER'}"
    )


def _result(seen: Mapping[type[Event], int], held: list[Held], same: bool, alive: bool) -> dict[str, Any]:
    half, quarter = max(1, len(held) // 2), max(1, len(held) // 4)
    names = ("threads", "descriptors", "resident_mib")
    first, second = ([max(getattr(one, name) for one in part) for name in names] for part in (held[:half], held[half:]))
    least = [min(getattr(one, name) for one in held[-quarter:]) for name in names]
    # New connections stand beside the old ones for a moment, so the most says little. What leaks is more at the end,
    # even where it is least, than it ever was in the first half. Memory has caches that fill, and pages that stay.
    bounded = all(now <= before + 2 for now, before in zip(least[:2], first[:2], strict=True))
    bounded = bounded and second[2] <= 1.1 * first[2] + 16
    most = torch.tensor([first, second, least], dtype=torch.float64)
    verdict = torch.tensor([int(same), int(bounded), int(alive)])
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return {
        "passed": bool(verdict.all()),
        "identical": bool(verdict[0]),
        "bounded": bool(verdict[1]),
        "alive": bool(verdict[2]),
        "committed": seen[RebalanceCommitted],
        "aborted": seen[RebalanceAborted],
        "paused": seen[BalancingPaused],
        "resumed": seen[BalancingResumed],
        "threads": most[:, 0].long().tolist(),
        "descriptors": most[:, 1].long().tolist(),
        "resident_mib": [round(value, 1) for value in most[:, 2].tolist()],
    }
