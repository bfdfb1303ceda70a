"""Experts that migrate while training goes on: the very bits of training without, whatever goes wrong on the way.

Each job runs once without migrations and once with ``overlap=True`` and a planner that moves every expert at every
decision; on the way, experts come too late, are written by the user, arrive with a flipped bit, or a rank fails.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import support.job
import torch
from support.beside import RANKS, Run, at, fail, flip_a_bit
from support.moe_models import batch_of
from support.ranks import run_ranks
from support.transport_contract import hear, tell

from eplb_runtime.events import BalancingPaused, BalancingResumed, RebalanceAborted, RebalanceCommitted
from eplb_runtime.migration import overlapped
from eplb_runtime.migration.engine import Phase
from eplb_runtime.migration.overlapped import Overlapped


@contextmanager
def late_in(job: Run, layer: int) -> Iterator[None]:
    """One rank finds, before anybody can have voted, that it waits no longer for the experts of a layer."""
    open_gate = Overlapped._open_gate

    def impatient(self: Overlapped) -> None:
        if self is job.background and job.rank == 1 and not self._gate.is_set():
            for flight in self._flights:
                if flight.layer == layer:
                    self._refuse(flight, overlapped.Verdict(False, "a test says so", kind=overlapped.LATE))
        open_gate(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Overlapped, "_open_gate", impatient)
        yield


def what_happens_on_the_way(rank: int) -> dict[str, Any]:
    """One job through all of it; what was said."""
    job, said = Run(rank, overlap=True, staging_bytes=40_000, bytes_per_step=39_000), {}
    balancer = job.balancer
    for _ in range(3):
        job.until(RebalanceCommitted)
    said["prompt"] = job.causes() == [] and job.engine.bytes_per_step == 39_000

    with late_in(job, layer=1):
        late = job.background.late_rounds
        while job.background.late_rounds < late + 2:
            job.step()
    said["late bytes"] = job.background.late_bytes
    job.until(RebalanceCommitted)

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
        job.train(2)
        said["quiet"] = balancer.placement.epoch == epoch
    job.until(RebalanceCommitted)

    job.until_sent()
    state = balancer.state_dict()  # all ranks compare something while experts are on their way
    said["state"] = state["placement"] == balancer.placement.to_json()
    said["told of what an evaluation committed"] = ended_by_an_evaluation(job)
    job.until_sent()
    said["decided now"] = balancer.rebalance()
    balancer.load_state_dict(balancer.state_dict())
    job.until(RebalanceCommitted)

    said["never paused"] = not balancer.events.of_type(BalancingPaused)
    with at(job, 0, Phase.STAGED, lambda staged: balancer.runtime.groups.close_connections()):
        said["lost"] = bool(job.until(BalancingPaused).cause)
    job.until(BalancingResumed, most=2000)
    job.until(RebalanceCommitted)

    # A registered average is written where the user likes: then experts migrate between steps.
    name = next(iter(balancer.layer_of_parameter))
    average = torch.zeros_like(job.model.get_parameter(name))
    balancer.register(name, "average", average)
    while not any(flight.layer == 0 for flight in job.flights):
        job.step()
    average.data.add_(1.0)  # leaves no version
    loss = job.forward()
    job.backward(loss)
    with balancer.quiesce():  # the forward has noticed it
        epoch = balancer.placement.epoch
        job.update()
        said["still quiet"] = balancer.placement.epoch == epoch
    job.losses.append(loss.item())
    while balancer.rebalancer._overlaps:
        average.data.add_(1.0)
        job.step()
    job.until(RebalanceCommitted)
    said["between steps"] = not job.background.in_flight
    said["digest"] = balancer.placement.digest()
    return {**said, "same": job.equals(job.still())}


def ended_by_an_evaluation(job: Run) -> bool:
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
    first = moved[0]
    assert all(there["same"] for there in moved) and len({there["digest"] for there in moved}) == 1
    assert sum(there["late bytes"] for there in moved) > 0
    for what, part in {"one rank fails": "rank 2", "cannot prepare": "rank 1"}.items():
        assert part in first[what] and "no memory" in first[what]
    assert "checksum" in first["flipped bit"]
    others = ("prompt", "quiet", "state", "told of what an evaluation committed", "decided now", "never paused", "lost")
    assert all(first[what] for what in (*others, "still quiet", "between steps"))


def with_copies(rank: int) -> None:
    """A job with copies until experts have moved twice beside training, and then one without."""
    job = Run(rank, overlap=True, dtype=torch.float64, implementation="eager", replica_slots=1)
    for _ in range(2):
        job.until(RebalanceCommitted)
    job.step()
    still = job.still()
    torch.testing.assert_close(job.losses, still.losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(job.state(), still.state(), rtol=1e-9, atol=1e-11)
    job.balancer.close()
    still.balancer.close()


def test_copies_follow_a_layer_that_is_committed_during_a_step() -> None:
    run_ranks(2, with_copies)


def stands_still(rank: int) -> tuple[bool, list[Any]]:
    """Rank 0's training does not go on until its thread has given up what came, while rank 1's waits in the vote."""
    job = Run(rank, overlap=True, timeout_seconds=3.0)
    assert job.background.gate_seconds == 3.0
    job.background.gate_seconds /= 2  # as where stages are on other ranks
    vote = job.engine.vote
    job.engine.vote = lambda *of: (tell("in the vote"), vote(*of))[1]
    with at(job, 0, Phase.VERIFIED, lambda staged: hear("in the vote")):
        job.until_sent()
        assert rank or all(flight.ballot.wait(60.0) for flight in job.flights)
        job.step()
    job.until(RebalanceCommitted)
    return job.background.late_rounds > 0, job.balancer.events.of_type(BalancingPaused)


def test_rounds_are_late_where_training_stands_still_while_another_rank_waits_in_the_vote() -> None:
    assert run_ranks(2, stands_still) == [(True, [])] * 2


class Decayed(support.job.Run):
    """A job whose user decays experts' weights between two steps, once the experts that leave are packed."""

    def wait_for_all(self, come: Callable[[Any], bool]) -> None: ...

    def step(self) -> None:
        super().step()
        self.wait_for_all(lambda flight: flight.posted is not None)
        with torch.no_grad():
            for name in self.balancer.layer_of_parameter:
                self.model.get_parameter(name).data.mul_(0.99)


class Decaying(Decayed, Run):
    """The same, with experts that leave."""

    wait_for_all = Run.wait_for_all


def written_between_steps(rank: int) -> bool:
    """Ten steps and more: on a busy machine rounds are late, and experts move some steps later."""
    job = Decaying(rank, overlap=True)
    job.until(RebalanceCommitted)
    job.train(max(2, 10 - job.steps))
    return job.equals(job.still(Decayed))


@pytest.mark.long
def test_weights_that_a_user_writes_between_steps_are_not_overwritten() -> None:
    assert run_ranks(2, written_between_steps) == [True, True]
