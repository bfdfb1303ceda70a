"""Train while rebalances are broken at every point of the protocol, beside a twin that nobody disturbs.

A life of the job takes some bouts: faults are drawn (`faults.py`), the job trains until they have happened and experts
have moved again, and everything is compared. In the end a rank is killed, and the others are looked at.
"""

import faulthandler
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eplb_runtime.balancer.balancer import Balancer
from eplb_runtime.checkpoint.state import logical_state_dict
from eplb_runtime.config import BalancerConfig, MigrationConfig
from eplb_runtime.distributed.consensus import Phase, all_equal
from eplb_runtime.events import BalancingResumed, Event, RebalanceAborted, RebalanceCommitted
from eplb_runtime.hosts import attach
from eplb_runtime.migration.engine import MigrationBroken
from eplb_runtime.tools.bench.train import MoEStack, Workload, choices
from tests.support.shuffle import plan_by, plan_shuffle

from .faults import KILL, Draw, Faults, draw_of, draws

INTERVAL, TIMEOUT_SECONDS = 2, 3.0
"""Of the disturbed balancer."""
MOST_STEPS, CONNECTING_SECONDS = 14, 30.0
"""A fault that has not happened in so many steps needs connections that break, then as many again."""
RECOVERY_SECONDS = 90.0
"""After the faults of a bout a rebalance must have committed within."""
HANG_SECONDS = 120.0
"""A step takes less, however busy the machine is."""
LEAST_SAMPLES = 12
"""Of what a process holds; with fewer nothing is said."""
STALE_COPIES = "still have their old weights"
TOLERANCE = 1e-10
"""Relative, with copies, in float64."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "overlap": {"overlap": True},
    "plain": {},
    "overlap+copies": {"overlap": True, "replica_slots": 1},
    "copies": {"replica_slots": 1},
}


@dataclass(frozen=True)
class Life:
    """One life of a job under `SETTINGS` of this name, of so many bouts of faults, none of which begins after ``ends``
    (by `time.monotonic`)."""

    number: int
    seed: int
    settings: str
    bouts: int
    ends: float

    @property
    def chance(self) -> random.Random:
        return random.Random(f"{self.seed}/{self.number}")


def victim_of(life: Life, ranks: int) -> int:
    """The rank that is killed in the end."""
    return life.chance.randrange(ranks)


def live(rank: int, life: Life) -> dict[str, Any]:
    """The life of one rank; JSON-able."""
    return Soak(life).run()


class SoakFailed(RuntimeError):
    """Something did not hold; the same on every rank."""


class _SoakJob:
    """A model in training."""

    def __init__(self, work: Workload, config: BalancerConfig, exact: bool) -> None:
        torch.manual_seed(0)
        self._work = work
        self._dtype = torch.float32 if exact else torch.float64
        self.model = MoEStack(work, "grouped_mm" if exact else "eager").to(self._dtype)
        # Adam would make large differences of those that copies make in rounding.
        make = partial(torch.optim.AdamW, lr=1e-4) if exact else partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
        self.optimizer = make(self.model.parameters())
        self.balancer: Balancer = attach(self.model, self.optimizer, config=config)
        self.model.train()
        self.steps = 0

    def step(self) -> Tensor:
        """The loss of a step, on this rank."""
        work = self._work
        generator = torch.Generator().manual_seed(self.steps * 1009 + dist.get_rank())
        hidden_TD = torch.randn(work.tokens, work.hidden, generator=generator).to(self._dtype)
        ids_LTK = torch.stack([choices(work, work.skew, generator) for _ in range(work.layers)])
        weights_TK = torch.full((work.tokens, work.top_k), 1 / work.top_k, dtype=self._dtype)
        loss: Tensor = self.model(hidden_TD, ids_LTK, weights_TK)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.detach()

    def state(self) -> dict[str, Tensor]:
        return logical_state_dict(self.model, self.optimizer)


class Soak:
    """One life of a job, on one rank. Collective over the world."""

    def __init__(self, life: Life) -> None:
        self._life, self._rank, ranks = life, dist.get_rank(), dist.get_world_size()
        self._exact = not SETTINGS[life.settings].get("replica_slots")
        work = Workload(layers=3, experts=4 * ranks, hidden=32, width=64, tokens=64)
        static = BalancerConfig(policy="static", interval=None, guard="off")
        self._twin = _SoakJob(work, static, self._exact)
        moving = {"interval": INTERVAL, "gate": "always", "timeout_seconds": TIMEOUT_SECONDS, "guard": "raise"}
        moving |= {"migration": MigrationConfig(staging_bytes=1 << 18), **SETTINGS[life.settings]}
        self._job = _SoakJob(work, BalancerConfig(**moving), self._exact)
        plan_by(self._job.balancer, plan_shuffle)
        self._seen: Counter[type[Event]] = Counter()  # the log keeps the newest events only
        self._job.balancer.events.subscribe(lambda event: self._seen.update([type(event)]))
        self._faults = Faults(self._job.balancer, self._rank, TIMEOUT_SECONDS)
        self._draws = draws(life.chance, ranks, 37 * life.seed + life.bouts * life.number)
        points = [point for point in Phase if point is not Phase.AWAITED or "overlap" in life.settings]
        self._last = draw_of(life.chance, KILL, points[life.number % len(points)], victim_of(life, ranks))
        self._held: list[list[float]] = []
        self._drawn: list[tuple[str, str, bool]] = []
        self._right: dict[int, dict[str, Tensor]] = {}

    def run(self) -> dict[str, Any]:
        """``counts``; ``drawn``: points, faults, and whether each happened; and the ``digest`` of `_outlive`."""
        try:
            self._until_committed()
            for drawn in self._draws:
                self._bout(drawn)
                gc.collect()  # errors keep what they passed through, connections too
                self._held.append(held())
                if len(self._held) == self._life.bouts or self._anywhere(time.monotonic() > self._life.ends):
                    break
            digest = self._outlive()
            if grew := grown(self._held):
                raise SoakFailed("; ".join(grew))
        except Exception as error:
            error.add_note(f"the last faults: {self._drawn[-2:]}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        kinds = {"committed": RebalanceCommitted, "aborted": RebalanceAborted, "resumed": BalancingResumed}
        counts = {"steps": self._job.steps, **{name: self._seen[kind] for name, kind in kinds.items()}}
        return {"digest": digest, "drawn": self._drawn, "counts": counts}

    def _bout(self, drawn: Sequence[Draw]) -> None:
        """Faults, what becomes of them, and whether all is as it was."""
        self._reach(drawn)
        left = [self._anywhere(self._faults.waits_for(draw)) for draw in drawn]
        self._drawn += [(draw.point.value, draw.fault, not one) for draw, one in zip(drawn, left, strict=True)]
        self._faults.arm([])
        self._until_committed()
        own, right = self._job.state(), self._twin.state()
        differ = [name for name in own.keys() | right.keys() if not self._equal(own[name], right[name])]
        if differ:
            raise SoakFailed(f"the state differs from the twin's: {', '.join(differ[:4])}")

    def _reach(self, drawn: Sequence[Draw]) -> None:
        """Train until all has happened; after some steps by breaking the connections of who has to act."""
        self._faults.arm(drawn)
        for seconds in (0.0, CONNECTING_SECONDS):
            if self._steps_until(lambda: not any(map(self._faults.waits_for, drawn)), seconds):
                return
            if any(draw.is_on(self._rank) for draw in drawn):
                self._faults.groups.close_connections()
            self._faults.hurry()

    def _outlive(self) -> str:
        """A rank is killed. What the others hold then: whole experts, of one placement, whose digest this is; empty
        where a refresh of copies was broken off, and this rank says so and commits no more."""
        self._right = {self._job.steps: self._twin.state()}
        self._drawn.append((self._last.point.value, KILL, True))
        try:
            try:
                self._reach([self._last])
                self._steps_until(lambda: False, CONNECTING_SECONDS)
            except (MigrationBroken, SoakFailed):
                raise
            except RuntimeError:
                faulthandler.cancel_dump_traceback_later()
                self._job.balancer.rebalancer.drain()
            else:
                raise SoakFailed(f"rank {self._last.victim} never came to where it was to be killed")
        except MigrationBroken as error:
            if STALE_COPIES in str(error):
                return ""
            raise
        # The step that broke off may have broken off behind the optimizer's, where copies are refreshed.
        if wrong := min((self._wrong_rows(right) for right in self._right.values()), key=len):
            raise SoakFailed(f"rows are not whole: {', '.join(wrong[:4])}")
        return self._job.balancer.placement.digest()

    def _step(self, holds: bool) -> bool:
        """Both train a step and are compared, on all ranks. Whether it held on all ranks before."""
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        expected = self._twin.step()
        if self._right:
            self._right = {self._job.steps: self._right[self._job.steps], self._twin.steps: self._twin.state()}
        loss, placement = self._job.step(), self._job.balancer.placement
        differs = self._anywhere(not self._equal(loss, expected))
        if differs:
            raise SoakFailed(f"step {self._job.steps}: the loss differs from the twin's (here {loss}, {expected})")
        if parted := all_equal(bytes.fromhex(placement.digest()), "placement", dist.group.WORLD):
            raise SoakFailed(f"step {self._job.steps}: {parted} (here epoch {placement.epoch})")
        return not self._anywhere(not holds)

    def _steps_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Whether it came to hold on all ranks within some steps, and within so many seconds."""
        began, steps = time.monotonic(), 0
        while not self._step(holds()):
            steps += 1
            if steps >= MOST_STEPS and self._anywhere(time.monotonic() - began > seconds):
                return False
        return True

    def _until_committed(self) -> None:
        before = self._seen[RebalanceCommitted]
        if not self._steps_until(lambda: self._seen[RebalanceCommitted] > before, RECOVERY_SECONDS):
            raise SoakFailed(f"step {self._job.steps}: no rebalance came within {RECOVERY_SECONDS:g} s")

    def _anywhere(self, holds: bool) -> bool:
        """Whether it holds on any rank, as all see it."""
        most = torch.tensor([int(holds)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return bool(most.item())

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        return torch.equal(one, other) if self._exact else torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)

    def _wrong_rows(self, right: Mapping[str, Tensor]) -> list[str]:
        """Tensors of which this rank's live rows are others than these whole ones'."""
        balancer, wrong = self._job.balancer, []
        for name, parameter in self._job.model.named_parameters():
            ids = balancer.logical_expert_ids(balancer.layer_of_parameter[name])
            rows = {f"model.{name}": parameter.detach()}
            for key, state in self._job.optimizer.state[parameter].items():
                if torch.is_tensor(state) and state.dim():
                    rows[f"optimizer.{name}.{key}"] = state
            wrong += [key for key, own in rows.items() if not self._equal(own, right[key][ids])]
        return wrong


def held() -> list[float]:
    """Threads, descriptors and resident MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, descriptors = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    return [threads, descriptors, pages * os.sysconf("SC_PAGE_SIZE") / 2**20]


def grown(samples: list[list[float]]) -> list[str]:
    """What a process holds more of at the end, at least, than there ever was in the first half."""
    half, quarter, grew = len(samples) // 2, len(samples) // 4, []
    for at, name in enumerate(("threads", "descriptors", "resident MiB") if len(samples) >= LEAST_SAMPLES else ()):
        before, now = max(one[at] for one in samples[:half]), min(one[at] for one in samples[-quarter:])
        if now > before + (16 + 0.1 * before if at == 2 else 2):  # memory has caches that fill
            grew.append(f"{name}: {before} at most, then {now} at least")
    return grew
