"""Experts that migrate while training goes on: the very bits of training without, whatever goes wrong on the way.

Each job runs once without migrations and once with ``overlap=True`` and a planner that moves every expert at every
decision; on the way, experts come too late, are written by the user, arrive with a flipped bit, or a rank fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from beside import RANKS, Job, at, fail, flip_a_bit
from moe_models import batch_of
from ranks import run_ranks
from support.seen import same

from eplb_runtime.events import BalancingPaused, BalancingResumed, RebalanceAborted, RebalanceCommitted
from eplb_runtime.migration import overlapped
from eplb_runtime.migration.engine import Phase
from eplb_runtime.migration.overlapped import Overlapped


@contextmanager
def late_in(job: Job, layer: int) -> Iterator[None]:
    """One rank finds, before anybody can have voted, that it waits no longer for the experts of a layer."""
    open_gate = Overlapped._open_gate

    def impatient(self: Overlapped) -> None:
        if self is job.background and job.rank == 1 and not self._gate.is_set():
            for flight in self._flights:
                if flight.layer == layer:
                    self._refuse(
                        flight, overlapped.Verdict(False, f"layer {layer}: a test says so", kind=overlapped.LATE)
                    )
        open_gate(self)

    Overlapped._open_gate = impatient
    try:
        yield
    finally:
        Overlapped._open_gate = open_gate


def what_happens_on_the_way(rank: int) -> dict[str, Any]:
    """One job through all of it; the losses, and what was said."""
    job, said = Job(rank, overlap=True, staging_bytes=40_000), {}
    balancer = job.balancer
    for _ in range(3):
        job.until(RebalanceCommitted)
    said["prompt"] = len(balancer.events.of_type(RebalanceAborted))

    with late_in(job, layer=1):
        late = job.background.late_rounds
        while job.background.late_rounds < late + 2:
            job.step()
    said["late bytes"] = job.background.late_bytes
    said["after late"] = job.until(RebalanceCommitted).moved_experts > 0

    with at(job, 2, Phase.VERIFIED, fail):
        said["one rank fails"] = job.until(RebalanceAborted).cause
    with at(job, 2, Phase.STAGED, flip_a_bit):
        said["flipped bit"] = job.until(RebalanceAborted).cause
    with at(job, 1, Phase.PREPARED, fail):
        said["cannot prepare"] = job.until(RebalanceAborted).cause
    job.until(RebalanceCommitted)

    job.until_sent()
    with balancer.quiesce():  # what is on its way is not committed inside
        epoch = balancer.placement.epoch
        job.step()
        job.step()
        said["quiet"] = balancer.placement.epoch == epoch
    job.until(RebalanceCommitted)

    job.until_sent()
    state = balancer.state_dict()  # all ranks compare something while experts are on their way
    said["state"] = state["placement"] == balancer.placement.to_json()
    job.until_sent()
    job.model.eval()
    with torch.no_grad():  # an evaluation is a forward like others
        ids = batch_of(rank, 3)
        said["evaluated"] = float(job.model(input_ids=ids, labels=ids).loss)
    job.model.train()
    said["told of what an evaluation committed"] = ended_by_an_evaluation(job)
    job.until_sent()
    said["decided now"] = balancer.rebalance()
    balancer.load_state_dict(balancer.state_dict())
    job.until(RebalanceCommitted)

    said["paused so far"] = len(balancer.events.of_type(BalancingPaused))
    with at(job, 0, Phase.STAGED, lambda staged: balancer.runtime.groups.hang_up()):
        said["lost"] = bool(job.until(BalancingPaused).cause)
    job.until(BalancingResumed, most=2000)
    job.until(RebalanceCommitted)

    # A registered average is written where the user likes: then experts migrate between steps.
    name = next(iter(balancer.layer_of_parameter))
    average = torch.zeros_like(dict(job.model.named_parameters())[name])
    balancer.register(name, "average", average)
    job.until_sent()
    while balancer.rebalancer._overlaps:
        average.data.add_(1.0)  # leaves no version
        job.step()
    job.until(RebalanceCommitted)
    said["written"] = job.background.in_flight
    said["average"] = sorted({float(value) for value in average.flatten()[:1]})

    still = Job(rank, overlap=False)
    while still.steps < job.steps:
        still.step()
    there, here = ({n: t for n, t in one.state().items() if "/average" not in n} for one in (job, still))
    said["same"] = job.losses == still.losses and same(there, here)
    said["digest"] = balancer.placement.digest()
    for each in (job, still):
        each.balancer.close()
    return said


def ended_by_an_evaluation(job: Job) -> bool:
    """Whether an event tells of experts that moved in an evaluation, after which the migration was dropped."""
    balancer = job.balancer
    epoch = balancer.placement.epoch
    while balancer.placement.epoch == epoch:
        job.until_sent()
        epoch = balancer.placement.epoch
        with torch.no_grad():
            job.model(input_ids=batch_of(job.rank, 3))
    told = len(balancer.events.of_type(RebalanceCommitted))
    balancer.rebalancer.drain()
    new = balancer.events.of_type(RebalanceCommitted)[told:]
    return [event.digest for event in new] == [balancer.placement.digest()] and new[0].moved_experts > 0


def test_training_has_the_very_bits_of_training_without_whatever_happens_on_the_way() -> None:
    moved = run_ranks(RANKS, what_happens_on_the_way)
    assert all(there["same"] for there in moved)
    first = moved[0]
    assert len({result["digest"] for result in moved}) == 1
    assert first["prompt"] == 0
    assert sum(result["late bytes"] for result in moved) > 0 and first["after late"]
    assert "rank 2" in first["one rank fails"] and "no memory" in first["one rank fails"]
    assert "checksum" in first["flipped bit"]
    assert "rank 1" in first["cannot prepare"] and "no memory" in first["cannot prepare"]
    assert first["quiet"] and first["state"] and first["decided now"] and first["told of what an evaluation committed"]
    assert first["paused so far"] == 0 and first["lost"]
    assert not first["written"]


def with_copies(rank: int) -> dict[str, Any]:
    """A job with copies until experts have moved twice beside training, and then one without."""
    job = Job(rank, overlap=True, dtype=torch.float64, replica_slots=1)
    for _ in range(2):
        job.until(RebalanceCommitted)
    job.step()
    still = Job(rank, overlap=False, dtype=torch.float64)
    while still.steps < job.steps:
        still.step()
    found = {"losses": job.losses, "state": job.state(), "without": (list(still.losses), still.state())}
    for each in (job, still):
        each.balancer.close()
    return found


def test_copies_follow_a_layer_that_is_committed_during_a_step() -> None:
    for there in run_ranks(2, with_copies):
        losses, state = there["without"]
        torch.testing.assert_close(there["losses"], losses, rtol=1e-12, atol=1e-12)
        for name, tensor in state.items():
            torch.testing.assert_close(there["state"][name], tensor, rtol=1e-9, atol=1e-11)


class Decaying(Job):
    """A job whose user decays experts' weights between two steps, once the experts that leave are packed."""

    def __init__(self, rank: int, overlap: bool) -> None:
        super().__init__(rank, overlap)
        self.changed, self.posted = threading.Condition(), 0
        self.engine.probe = self.count_posted

    def count_posted(self, phase: Phase, subject: Any) -> None:
        if phase is Phase.POSTED:
            with self.changed:
                self.posted += 1
                self.changed.notify()

    def step(self) -> None:
        super().step()
        with self.changed:
            flights = self.background._flights if self.background is not None else []
            assert self.changed.wait_for(lambda: self.posted >= len(flights), timeout=30.0)
            self.posted = 0
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "experts" in name:
                    parameter.data.mul_(0.99)


def losses_until_experts_have_moved(rank: int) -> list[float]:
    """Losses of ten steps and more: on a busy machine rounds are late, and experts move some steps later."""
    job = Decaying(rank, overlap=True)
    job.until(RebalanceCommitted)
    for _ in range(max(2, 10 - job.steps)):
        job.step()
    job.balancer.close()
    return job.losses


def written_between_steps(rank: int) -> tuple[list[float], list[float]]:
    losses, still = losses_until_experts_have_moved(rank), Decaying(rank, overlap=False)
    while still.steps < len(losses):
        still.step()
    still.balancer.close()
    return losses, still.losses


def test_weights_that_a_user_writes_between_steps_are_not_overwritten() -> None:
    for moved, static in run_ranks(2, written_between_steps):
        assert moved == static
