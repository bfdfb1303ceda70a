"""Faults of one rank, of the planner and of connections end one rebalance each, never the balancing; nothing hangs, and
nothing is left behind. Training goes on to the very bits that it reaches without a balancer's help."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import beside, training
from support.moe_models import batch_of
from support.ranks import run_ranks
from support.seen import said_by
from support.shuffle import plan_by, plan_shuffle

import eplb_runtime as eplb
from eplb_runtime.balancer import decision
from eplb_runtime.balancer.planner_process import PlannerProcess
from eplb_runtime.distributed.consensus import Phase, Probe, unobserved
from eplb_runtime.events import (
    BalancingEnded,
    BalancingPaused,
    BalancingResumed,
    RebalanceAborted,
    RebalanceCommitted,
    RebalancePlanned,
)
from eplb_runtime.migration.engine import MigrationBroken
from eplb_runtime.planner import plan

RANKS = 3
ABORTED = 24


class Run(beside.Run):
    """With experts that move at every decision between steps."""

    def __init__(self, rank: int, timeout_seconds: float, **settings: Any) -> None:
        settings |= {"policy": "incremental", "gate": "always", "timeout_seconds": timeout_seconds}
        super().__init__(rank, overlap=False, **settings)
        self.decisions = self.balancer.rebalancer.decisions
        plan_by(self.balancer, plan_shuffle)

    def until_next(self, *kinds: type) -> Any:
        """Train until something of these kinds happens, which is at the same step on all ranks."""
        return self.until(kinds, most=100_000)

    def shift(self) -> eplb.Placement:
        """The placement in which each expert is where another was."""
        old = self.balancer.placement
        rotated = (old.physical_to_logical + 2) % 6
        return eplb.Placement(rotated, 6, RANKS, rotated.argsort(axis=1), old.epoch + 1)


def at(phase: Phase, action: Callable[[Any], None]) -> Probe:
    """At this point of the protocol, wherever it has something in its hands."""
    return lambda now, subject: action(subject) if now is phase and subject else None


def raising(kind: type[Exception], text: str) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise kind(text)  # a new one each time: an old one keeps alive what was on its way when it was raised

    return fail


def one_fault_after_another(rank: int) -> dict[str, Any]:
    decision.PlannerProcess = PlannerProcess  # type: ignore[misc] # the real one
    job = Run(rank, timeout_seconds=training.DEADLINE)
    balancer, said = job.balancer, {}

    process = job.decisions.process
    plan_by(balancer, plan if process is None else process.plan)
    if process is not None:
        assert process.is_ready(300.0)
        os.kill(process.process.pid, signal.SIGKILL)
    said["died"] = job.until_next(RebalanceAborted).cause
    job.until_next(RebalancePlanned)  # by the next one
    plan_by(balancer, plan_shuffle)
    job.until_next(RebalanceCommitted)

    compare = balancer.guard.compare
    if rank == 1:
        balancer.guard.compare = raising(MemoryError, "in the middle of the collectives")
    said["paused"] = bool(job.until_next(BalancingPaused).cause)
    balancer.guard.compare = compare
    said["while paused"] = said_by(balancer.rebalance)
    said["resumed"] = job.until_next(BalancingResumed).step
    said["committed at"] = job.until_next(RebalanceCommitted).step

    # This rank alone does not come to a decision in time: the others have waited for it, and so has training here.
    gone = threading.Event()
    if rank == 0:
        balancer.rebalancer.control.worker.submit(gone.wait)
    said["late"] = job.until_next(RebalanceAborted).phase
    gone.set()
    job.until_next(BalancingResumed)
    job.until_next(RebalanceCommitted)
    said["same"] = job.equals(job.still())
    said["ended"] = [event.cause for event in balancer.events.of_type(BalancingEnded)]
    return said


def test_each_fault_ends_one_rebalance_and_the_next_ones_work() -> None:
    results = run_ranks(RANKS, one_fault_after_another)
    first = results[0]
    assert first["died"] == "the planner process ended with status -9"
    assert "connect again" in first["while paused"]
    assert first["committed at"] > first["resumed"]
    assert first["late"] == "planned"
    assert first["ended"] == ["closed"]
    for result in results:
        assert result["same"]
        assert {**result, "while paused": ""} == {**first, "while paused": ""}


def parted(rank: int) -> str:
    job = Run(rank, timeout_seconds=20.0)
    job.until_next(RebalanceCommitted)
    rebalancer = job.balancer.rebalancer
    if rank == 2:
        rebalancer._placement = rebalancer._initial
    rebalancer._pause("a test wants it")
    with pytest.raises(MigrationBroken) as broken:
        job.until_next(RebalanceAborted)
    return str(broken.value)


def test_ranks_with_different_placements_do_not_go_on_once_they_are_connected_again() -> None:
    for said in run_ranks(RANKS, parted):
        assert said.startswith("rank 2 has another placement than rank 0") and "load a checkpoint" in said


# -- many of them ------------------------------------------------------------------------------------------------------


def held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def faults(job: Run) -> Iterator[None]:
    """Each way to break a rebalance in turn, set up before ``yield`` and taken back after it."""
    engine, rank = job.engine, job.rank

    def flip(staged: Any) -> None:
        staged[0].record[3] ^= 1

    def garble(message: bytearray) -> None:
        message[-20:] = b"#" * 20

    while True:
        plan_by(job.balancer, raising(ZeroDivisionError, "a planner's bug"))
        yield
        plan_by(job.balancer, plan_shuffle)
        if rank == 1:
            engine.probe = at(Phase.PLANNED, raising(KeyError, "one rank's own trouble"))
        yield
        engine.probe = at(Phase.PLANNED, garble) if rank == 1 else unobserved
        yield
        engine.probe = unobserved
        if rank == 1:
            engine.probe = at(Phase.PREPARED, raising(MemoryError, "no memory for staging"))
        yield
        engine.probe = at(Phase.STAGED, flip) if rank == 0 else unobserved
        yield
        wrong = at(Phase.VERIFIED, raising(OSError, "the device went away"))
        engine.probe = wrong if rank == 1 else unobserved
        yield
        engine.probe = unobserved


FOUND_AT = [
    ("planned", "ZeroDivisionError: a planner's bug"),
    ("planned", "rank 1: KeyError"),
    ("planned", "rank 1"),
    ("prepared", "rank 1: MemoryError: no memory for staging"),
    ("staged", ""),
    ("staged", "rank 1: OSError: the device went away"),
]


def break_many(rank: int) -> dict[str, Any]:
    logging.getLogger("eplb_runtime").setLevel(logging.CRITICAL)  # a warning each, some with a traceback
    job = Run(rank, timeout_seconds=20.0)
    job.until_next(RebalanceCommitted)
    holding, placement, fault = [], job.balancer.placement, faults(job)
    for number in range(ABORTED):
        next(fault)
        if number % 12 == 7:
            job.balancer.rebalancer._pause("a test wants it")
            job.until_next(BalancingResumed)
        job.until_next(RebalanceAborted)
        holding.append(held())
    whole = job.balancer.placement is placement
    job.engine.probe = unobserved
    plan_by(job.balancer, plan_shuffle)
    committed = job.until_next(RebalanceCommitted).step
    reconnected = len(job.balancer.events.of_type(BalancingResumed))
    aborted = [(event.phase, event.cause) for event in job.balancer.events.of_type(RebalanceAborted)]
    return {
        "holding": holding,
        "whole": whole,
        "aborted": aborted[:6],
        "committed": committed == job.steps,
        "reconnected": reconnected,
        "same": job.equals(job.still()),
    }


def test_many_aborted_rebalances_leave_nothing_behind() -> None:
    """And a fault that all ranks hear of needs no new connections."""
    for result in run_ranks(2, break_many):
        assert result["whole"] and result["committed"] and result["same"] and result["reconnected"] == 2
        for (phase, cause), (found_at, words) in zip(result["aborted"], FOUND_AT, strict=True):
            assert phase == found_at and words in cause, (phase, cause)
        early = [max(held) for held in zip(*result["holding"][:12], strict=True)]
        late = [min(held) for held in zip(*result["holding"][-4:], strict=True)]  # a thread may take a while to end
        assert all(b <= a for a, b in zip(early, late, strict=True)), (early, late)


def half_way(rank: int) -> dict[str, Any]:
    """A round takes one expert: the first is committed and the second fails; the next rebalance starts from there."""
    job, rounds = Run(rank, 20.0, staging_bytes=1), {"committed": 0, "failed": False}

    def fail(phase: Phase, subject: Any) -> None:
        rounds["committed"] += phase is Phase.COMMITTED
        if phase is Phase.VERIFIED and rounds["committed"] == 1 and not rounds["failed"] and rank == 2:
            rounds["failed"] = True
            raise OSError("the device went away")

    job.engine.probe = fail
    aborted, after = job.until_next(RebalanceAborted), job.balancer.placement
    committed = job.until_next(RebalanceCommitted).digest
    return {"aborted": aborted, "epoch": after.epoch, "committed": committed, "same": job.equals(job.still())}


def test_a_rebalance_that_stops_half_way_says_so_and_training_goes_on_with_what_was_committed() -> None:
    results = run_ranks(RANKS, half_way)
    for result in results:
        aborted = result["aborted"]
        assert (aborted.phase, aborted.cause) == ("staged", "rank 2: OSError: the device went away")
        assert aborted.committed_layers and aborted.left_layers and result["epoch"] == 1
        assert result["same"] and result["committed"] == results[0]["committed"]


def waited_in_vain(rank: int) -> bool:
    """Rank 1 does not send its experts before the others have dropped the rebalance."""
    job, store = Run(rank, timeout_seconds=training.DEADLINE), dist.distributed_c10d._get_default_store()
    if rank == 1:
        job.engine.probe = at(Phase.PREPARED, lambda subject: store.wait(["gave up 0", "gave up 2"]))
    job.until_next(RebalanceAborted, BalancingPaused)
    store.set(f"gave up {rank}", "1")  # is there from now on
    job.until_next(RebalanceCommitted)
    return job.equals(job.still())


def test_ranks_that_waited_in_vain_find_together_again() -> None:
    assert all(run_ranks(RANKS, waited_in_vain))


def dies_while_staging(rank: int) -> tuple[str, bool]:
    """Where the others' rebalance broke off, and whether they are whole."""
    job = Run(rank, timeout_seconds=training.DEADLINE)
    before, old = [parameter.detach().clone() for parameter in job.model.parameters()], job.balancer.placement
    if rank == 2:
        job.engine.probe = at(Phase.STAGED, lambda staged: os._exit(1))
    job.balancer.rebalancer._migrate(job.shift())
    whole = job.balancer.placement == old and all(map(torch.equal, before, job.model.parameters()))
    return job.balancer.events.of_type(RebalanceAborted)[0].phase, whole


def test_a_rank_that_dies_while_staging_leaves_the_old_placement() -> None:
    assert run_ranks(RANKS, dies_while_staging, expect_exit=[0, 1, 2])[:2] == [("staged", True)] * 2


def fails_after_the_vote(rank: int) -> list[str]:
    """Rank 1 runs out of memory in a commit; a loop that catches errors goes on. What it hears at each call after."""
    job = Run(rank, 20.0)
    if rank == 1:
        job.engine.probe = at(Phase.COMMITTED, raising(MemoryError, "out of memory"))
    target = job.shift()
    calls: list[Callable[[], object]] = [lambda: job.balancer.rebalancer._migrate(target)]
    if rank == 1:
        calls += [lambda: job.model(input_ids=batch_of(rank, 0)), job.optimizer.step, job.balancer.rebalance]
    return [said_by(call) for call in calls]


def test_a_rank_that_fails_in_a_commit_does_not_train_on() -> None:
    first, second, third = run_ranks(RANKS, fails_after_the_vote)
    assert first == third == [""]
    assert len(second) == 4 and all("go back to a checkpoint" in line and "out of memory" in line for line in second)
