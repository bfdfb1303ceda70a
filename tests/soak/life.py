"""Train while rebalances are broken at every point of the protocol, beside a twin that nobody disturbs.

A life of the job takes some bouts: faults are drawn (`faults.py`), the job trains until they have happened and
experts have moved anew, and everything is compared. In the end a rank is killed, and the others are looked at. Lives
follow each other in `__main__.py`.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eplb_runtime.balancer.balancer import Balancer
from eplb_runtime.checkpoint.state import logical_state_dict
from eplb_runtime.config import BalancerConfig, MigrationConfig
from eplb_runtime.distributed.consensus import all_equal
from eplb_runtime.distributed.points import Phase
from eplb_runtime.events import BalancingResumed, Event, RebalanceAborted, RebalanceCommitted
from eplb_runtime.hosts import attach
from eplb_runtime.migration.engine import MigrationBroken
from eplb_runtime.tools.bench.train import MoEStack, Workload, choices
from tests.support.shuffle import plan_by, plan_shuffle, wait_until_compiled

from .faults import ALL_RANKS, Deck, Draw, Faults

INTERVAL = 2
TIMEOUT_SECONDS = 3.0
"""Of the disturbed balancer."""
MOST_STEPS = 14
"""A fault that has not happened in so many steps needs connections that break."""
CONNECTING_SECONDS = 30.0
"""Then it has as many steps again, and so long."""
RECOVERY_SECONDS = 90.0
"""After the faults of a bout a rebalance must have committed within."""
HANG_SECONDS = 120.0
"""A step takes less, however busy the machine is."""
LEAST_SAMPLES = 12
"""Of what a process holds; with fewer nothing is said."""
STALE_COPIES = "are of experts as they were"
TOLERANCE = 1e-10
"""Relative, with copies, in float64."""


@dataclass(frozen=True)
class Life:
    """What one life of a job is to be.

    Args:
        settings: a name in `SETTINGS`.
        bouts: of faults.
        first: bouts in the lives before.
        kill: whether a rank is killed in the end.
        ends: by `time.monotonic`; no bout begins later.
    """

    number: int
    seed: int
    settings: str
    bouts: int
    first: int
    kill: bool
    ends: float


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "overlap": {"overlap": True},
    "plain": {},
    "overlap+copies": {"overlap": True, "replica_slots": 1},
    "copies": {"replica_slots": 1},
}


class SoakFailed(RuntimeError):
    """Something did not hold; the same on every rank."""


def held() -> list[float]:
    """Threads, descriptors and resident MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, descriptors = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    return [threads, descriptors, pages * os.sysconf("SC_PAGE_SIZE") / 2**20]


class _SoakJob:
    """A model in training."""

    def __init__(self, work: Workload, config: BalancerConfig, exact: bool) -> None:
        torch.manual_seed(0)
        self._work = work
        self._dtype = torch.float32 if exact else torch.float64
        self.model = MoEStack(work, "grouped_mm" if exact else "eager").to(self._dtype)
        parameters = self.model.parameters()
        # Adam would make large differences of those that copies make in rounding.
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, lr=1e-4) if exact else torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
        )
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
    """One life of a job, on one rank. Collective over the world.

    Args:
        life: its faults and settings.
    """

    def __init__(self, life: Life) -> None:
        self._life, self._rank = life, dist.get_rank()
        self._exact = not SETTINGS[life.settings].get("replica_slots")
        work = Workload(layers=3, experts=4 * dist.get_world_size(), hidden=32, width=64, tokens=64)
        static = BalancerConfig(policy="static", interval=None, guard="off")
        self._twin = _SoakJob(work, static, self._exact)
        config = BalancerConfig(
            interval=INTERVAL,
            gate="always",
            timeout_seconds=TIMEOUT_SECONDS,
            guard="raise",
            migration=MigrationConfig(staging_bytes=1 << 18),
            **SETTINGS[life.settings],
        )
        self._job = _SoakJob(work, config, self._exact)
        wait_until_compiled(self._job.balancer)
        plan_by(self._job.balancer, plan_shuffle)
        self._seen: Counter[type[Event]] = Counter()  # the log keeps the newest events only
        self._job.balancer.events.subscribe(lambda event: self._seen.update([type(event)]))
        self._faults = Faults(self._job.balancer, self._rank, TIMEOUT_SECONDS)
        self._deck = Deck(random.Random(f"{life.seed}/{life.number}"), dist.get_world_size(), life.first)
        self._held: list[list[float]] = []
        self._drawn: list[dict[str, Any]] = []
        self._right: dict[int, dict[str, Tensor]] = {}
        self._keeps_states = False
        self._longest = 0.0

    def run(self) -> dict[str, Any]:
        """JSON-able: of this life, as `__main__` adds it up. ``error``: what did not hold."""
        result: dict[str, Any] = {"error": "", "killed": False}
        try:
            self._until("a first rebalance", self._has_committed(), RECOVERY_SECONDS)
            while len(self._drawn) < self._life.bouts and not self._anywhere(time.monotonic() > self._life.ends):
                self._bout(self._deck.draw())
                gc.collect()  # errors keep what they passed through, connections too
                self._held.append(held())
            if self._life.kill:
                points = [p for p in Phase if p is not Phase.AWAITED or "overlap" in self._life.settings]
                result.update(self._outlive(self._deck.kill(points)))
            else:
                self._job.balancer.close()
                self._twin.balancer.close()
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
        faulthandler.cancel_dump_traceback_later()
        return {**result, **self._result()}

    def _bout(self, draws: Sequence[Draw]) -> None:
        """Faults, what becomes of them, and whether all is as it was."""
        drawn = [_named(draw) for draw in draws]
        self._drawn += drawn
        self._faults.arm(draws)
        if not self._steps_until(lambda: self._faults.over, 0.0):
            if any(draw.is_on(self._rank) for draw in draws):
                self._faults.cut()
            self._faults.hurry()
            self._steps_until(lambda: self._faults.over, CONNECTING_SECONDS)
        reached = [self._anywhere(self._faults.reached(draw)) for draw in draws]
        self._faults.arm([])
        self._until("a rebalance after the faults", self._has_committed(), RECOVERY_SECONDS)
        differ = [name for name, is_right in self._compared() if not is_right]
        if differ:
            raise SoakFailed(f"the state differs from the twin's: {', '.join(differ[:4])}")
        for one, was_reached in zip(drawn, reached, strict=True):
            one.update(reached=was_reached, held=True)

    def _outlive(self, draw: Draw) -> dict[str, Any]:
        """A rank is killed. What the others hold then: whole experts, of one placement."""
        self._drawn.append(_named(draw))
        self._keeps_states = True
        self._right[self._job.steps] = self._twin.state()
        self._faults.arm([draw])
        try:
            if not self._steps_until(lambda: False, 0.0) and draw.victim == self._rank:
                self._faults.cut()
                self._faults.hurry()
            self._steps_until(lambda: False, CONNECTING_SECONDS)
        except MigrationBroken as error:
            if STALE_COPIES not in str(error):
                raise
            return self._with_stale_copies(error)
        except SoakFailed:
            raise
        except RuntimeError as error:
            faulthandler.cancel_dump_traceback_later()
            try:
                self._job.balancer.rebalancer.drain()
            except MigrationBroken as broken:
                if STALE_COPIES not in str(broken):
                    raise
                return self._with_stale_copies(broken)
            self._drawn[-1].update(reached=True, held=True)
            # The step that broke off may have broken off behind the optimizer's, where copies are refreshed.
            wrong = min((self._wrong_rows(right) for right in self._right.values()), key=len)
            return {
                "killed": True,
                "said": str(error)[:200],
                "digest": self._job.balancer.placement.digest(),
                "error": f"rows are not whole: {', '.join(wrong[:4])}" if wrong else "",
            }
        raise SoakFailed(f"rank {draw.victim} never came to where it was to be killed")

    def _with_stale_copies(self, error: MigrationBroken) -> dict[str, Any]:
        """A peer died in the midst of a refresh of copies beside training: this rank says so, and commits no more."""
        self._drawn[-1].update(reached=True, held=True)
        return {"killed": True, "said": str(error)[:200], "error": ""}

    def _step(self, holds: bool = False) -> bool:
        """Both train a step and are compared, on all ranks. Whether it held on all ranks before."""
        began = time.monotonic()
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        expected = self._twin.step()
        if self._keeps_states:
            self._right = {self._job.steps: self._right[self._job.steps], self._twin.steps: self._twin.state()}
        loss = self._job.step()
        placement = self._job.balancer.placement
        most = torch.tensor([int(not self._equal(loss, expected)), int(not holds)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        parted = all_equal(bytes.fromhex(placement.digest()), "placement", dist.group.WORLD)
        self._longest = max(self._longest, time.monotonic() - began)
        if most[0]:
            raise SoakFailed(f"step {self._job.steps}: the loss differs from the twin's (here {loss}, {expected})")
        if parted:
            raise SoakFailed(f"step {self._job.steps}: {parted} (here epoch {placement.epoch})")
        return not most[1]

    def _steps_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Whether it came to hold on all ranks within some steps, and within so many seconds."""
        began, steps = time.monotonic(), 0
        while not self._step(holds()):
            steps += 1
            if steps >= MOST_STEPS and self._anywhere(time.monotonic() - began > seconds):
                return False
        return True

    def _until(self, what: str, holds: Callable[[], bool], seconds: float) -> None:
        began = time.monotonic()
        while not self._step(holds()):
            if self._anywhere(time.monotonic() - began > seconds):
                raise SoakFailed(f"step {self._job.steps}: {what} did not come within {seconds:g} s")

    def _has_committed(self) -> Callable[[], bool]:
        """Whether a rebalance has since."""
        before = self._seen[RebalanceCommitted]
        return lambda: self._seen[RebalanceCommitted] > before

    def _anywhere(self, holds: bool) -> bool:
        """Whether it holds on any rank, as all see it."""
        most = torch.tensor([int(holds)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return bool(most.item())

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        return torch.equal(one, other) if self._exact else torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)

    def _compared(self) -> list[tuple[str, bool]]:
        """Each tensor, experts in logical order: whether it is the twin's."""
        own, right = self._job.state(), self._twin.state()
        if own.keys() != right.keys():
            return [("names of tensors", False)]
        return [(name, self._equal(own[name], right[name])) for name in own]

    def _wrong_rows(self, right: Mapping[str, Tensor]) -> list[str]:
        """Tensors of which this rank's live rows are others than these whole ones'."""
        balancer, wrong = self._job.balancer, []
        for name, parameter in self._job.model.named_parameters():
            ids = balancer.logical_expert_ids(balancer.layer_of_parameter[name])
            held = {f"model.{name}": parameter.detach()}
            for key, state in self._job.optimizer.state[parameter].items():
                if torch.is_tensor(state) and state.dim():
                    held[f"optimizer.{name}.{key}"] = state
            wrong += [key for key, rows in held.items() if not self._equal(rows, right[key][ids])]
        return wrong

    def _result(self) -> dict[str, Any]:
        """Counts, and what grew: a leak is more at the end, at least, than there ever was in the first half."""
        half, quarter = len(self._held) // 2, len(self._held) // 4
        grew, most = [], [max((one[at] for one in self._held), default=0.0) for at in range(3)]
        if len(self._held) >= LEAST_SAMPLES:
            for at, name in enumerate(("threads", "descriptors", "resident MiB")):
                before, now = max(one[at] for one in self._held[:half]), min(one[at] for one in self._held[-quarter:])
                if now > before + (16 + 0.1 * before if at == 2 else 2):  # memory has caches that fill
                    grew.append(f"{name}: {before} at most, then {now} at least")
        return {
            "steps": self._job.steps,
            "longest_step_seconds": round(self._longest, 1),
            "grew": grew,
            "drawn": self._drawn,
            "committed": self._seen[RebalanceCommitted],
            "aborted": self._seen[RebalanceAborted],
            "resumed": self._seen[BalancingResumed],
            "held": most,
        }


def _named(draw: Draw) -> dict[str, Any]:
    victim = "all" if draw.victim == ALL_RANKS else draw.victim
    return {"point": draw.point.value, "fault": draw.fault, "victim": victim, "reached": False, "held": False}
