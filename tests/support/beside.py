"""A small job whose experts migrate while it trains, and places to break it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from support import job
from support.seen import same
from support.shuffle import plan_shuffle

from eplb_runtime.events import BalancingPaused, BalancingResumed, RebalanceAborted, RebalanceCommitted
from eplb_runtime.migration.engine import Phase

RANKS, EXPERTS, LAYERS, INTERVAL = 3, 6, 3, 2


OF_JOB = ("dtype", "implementation", "optimizer")
SETTINGS = {"interval": INTERVAL, "lag": 1, "timeout_seconds": 15.0}


class Run(job.Run):
    """A small training job on one rank; with ``overlap`` every expert moves at every decision."""

    def __init__(self, rank: int, overlap: bool, *, ep_group: Any = None, **settings: Any) -> None:
        policy = "incremental" if overlap or settings.get("replica_slots") else "static"
        of_job = {name: settings.pop(name) for name in OF_JOB if name in settings}
        sizes = {"experts": EXPERTS, "layers": LAYERS, "planner": plan_shuffle if overlap else None, "clip": 0.5}
        settings = {**SETTINGS, "policy": policy, "overlap": overlap, **settings}
        super().__init__(rank, job.Job(**sizes, settings=settings, batches=job.changing, **of_job))
        self._group = ep_group
        self.attach(ep_group=ep_group)
        self.background = self.balancer.rebalancer.overlapped
        self._came_on = threading.Condition()
        if overlap:
            for part, name in ((self.background, "_post_ahead"), (self.engine, "arrive")):
                setattr(part, name, self._noticed(getattr(part, name)))

    def _noticed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def then(*args: Any) -> Any:
            result = call(*args)
            with self._came_on:
                self._came_on.notify_all()
            return result

        return then

    def wait_for_all(self, come: Callable[[Any], bool]) -> None:
        """Wait until experts on their way have come so far."""
        with self._came_on:
            assert self._came_on.wait_for(lambda: all(map(come, self.flights)), 60.0)

    @property
    def flights(self) -> list[Any]:
        """Rounds that are on their way beside this step."""
        return self.background._flights

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
            if self.flights and self.steps % INTERVAL:
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

    def still(self, of: type[job.Run] = job.Run) -> job.Run:
        """A job like this one, or of this class, whose experts stay, after as many steps."""
        still = of(self.rank, replace(self.job, planner=None, settings={"timeout_seconds": 30.0}))
        return still.attach(ep_group=self._group).train(self.steps)

    def equals(self, still: job.Run) -> bool:
        """End both: whether no bit of losses, norms, weights and optimizer state differs."""
        here, there = self.end().bits, still.end().bits
        return same({name: one for name, one in here.items() if "/average" not in name}, there)


@contextmanager
def at(run: Run, rank: int, phase: Phase, do: Callable[[Any], None]) -> Iterator[None]:
    """Inside, on one rank, wherever the protocol comes to this point with something in its hands."""

    def probe(reached: Phase, subject: Any) -> None:
        if run.rank == rank and reached is phase and (phase is Phase.PREPARED or subject):
            do(subject)

    run.engine.probe = probe
    try:
        yield
    finally:
        run.engine.probe = lambda phase, subject: None


def fail(subject: Any) -> None:
    raise MemoryError("no memory on one rank")


def flip_a_bit(staged: Any) -> None:
    staged[0].record[3] ^= 1
