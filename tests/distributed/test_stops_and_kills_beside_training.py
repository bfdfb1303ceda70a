"""A rank that stands still or dies at each point of the protocol while experts migrate beside training: all ranks
commit a layer or none does, live rows stay whole, and who lives goes on, in the very bits of training without."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from beside import RANKS, Job, at
from ranks import run_ranks
from support.seen import same

from eplb_runtime.events import BalancingPaused, BalancingResumed, RebalanceAborted, RebalanceCommitted
from eplb_runtime.migration.engine import Phase

DEADLINE, SHORTER, LONGER = 3.0, 0.3, 4.0
STOPPED = 2
"""The rank that stands still, or dies."""


def stand_still_once(seconds: float) -> Callable[[object], None]:
    """Stops this process, all threads of it, where it is called first; a child wakes it."""
    stopped = []

    def stop(subject: object) -> None:
        if not stopped:
            stopped.append(True)
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
            # To this very thread: sent to the process, another may take it, and this one goes on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    return stop


def interrupted(job: Job) -> int:
    """Rebalances and rounds that came to nothing so far."""
    heard = job.balancer.events
    return len(heard.of_type(RebalanceAborted)) + len(heard.of_type(BalancingPaused)) + job.background.late_rounds


def until_committed_anew(job: Job) -> None:
    """Train until connections stand, if they broke, and experts have moved again."""
    heard = job.balancer.events
    while len(heard.of_type(BalancingPaused)) > len(heard.of_type(BalancingResumed)):
        job.step()
    job.until(RebalanceCommitted)


def stopped_at_each_point(rank: int) -> dict[str, Any]:
    job = Job(rank, overlap=True, staging_bytes=40_000, timeout_seconds=DEADLINE)
    heard: dict[str, Any] = {}
    for phase, seconds in (
        (Phase.STAGED, SHORTER),
        (Phase.DECIDED, SHORTER),
        (Phase.VERIFIED, LONGER),
        (Phase.PREPARED, LONGER),
    ):
        until_committed_anew(job)
        before, reached = interrupted(job), []
        stop = stand_still_once(seconds)
        with at(job, STOPPED, phase, lambda subject, stop=stop, reached=reached: (reached.append(1), stop(subject))):
            for _ in range(8):
                job.step()
        heard[f"{phase.value} {seconds}"] = bool(reached), interrupted(job) - before
    until_committed_anew(job)
    still = Job(rank, overlap=False)
    while still.steps < job.steps:
        still.step()
    heard["same"] = job.losses == still.losses and same(job.state(), still.state())
    heard["digest"] = job.balancer.placement.digest()
    for each in (job, still):
        each.balancer.close()
    return heard


def test_a_rank_that_stands_still_shorter_or_longer_than_the_deadline() -> None:
    heard = run_ranks(RANKS, stopped_at_each_point)
    assert all(there["same"] for there in heard)
    assert len({there["digest"] for there in heard}) == 1
    for point in (name for name in heard[0] if " " in name):
        assert heard[STOPPED][point][0], f"never came to {point}"
        assert float(point.split()[1]) < DEADLINE or max(there[point][1] for there in heard) > 0


def killed(rank: int, phase: Phase) -> dict[str, Any]:
    """One rank is killed at a point of the protocol; a job without migrations, a step ahead, says what is right."""
    still = Job(rank, overlap=False)
    job = Job(rank, overlap=True, staging_bytes=40_000, timeout_seconds=DEADLINE)
    job.until(RebalanceCommitted)
    while still.steps < job.steps:
        still.step()
    states = {still.steps: still.state()}
    epoch, said = job.balancer.placement.epoch, {"error": ""}
    try:
        with at(job, STOPPED, phase, lambda subject: os.kill(os.getpid(), signal.SIGKILL)):
            for _ in range(8):
                still.step()
                states[still.steps] = still.state()
                job.step()
    except RuntimeError as error:
        said["error"] = str(error)
    right = states[job.steps]
    said["epochs"] = job.balancer.placement.epoch - epoch
    said["digest"] = job.balancer.placement.digest()
    said["whole"] = whole(job, right)
    with torch.no_grad():
        next(rows_of(job, right))[0].flatten()[0] += 1
    said["control"] = whole(job, right)
    return said


def rows_of(job: Job, right: dict[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's live rows of weights and optimizer state, each tensor with the rows that it should hold."""
    homes_LRH = torch.from_numpy(job.balancer.placement.homes_LRH.copy())
    for name, parameter in job.model.named_parameters():
        if name in job.balancer.layer_of_parameter:
            homes_H = homes_LRH[job.balancer.layer_of_parameter[name], job.rank]
            yield parameter.data, right[f"model.{name}"][homes_H]
            for key in ("exp_avg", "exp_avg_sq"):
                yield job.optimizer.state[parameter][key], right[f"optimizer.{name}.{key}"][homes_H]


def whole(job: Job, right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(rows, wanted) for rows, wanted in rows_of(job, right))


@pytest.mark.parametrize("phase", [Phase.STAGED, Phase.DECIDED], ids=lambda phase: phase.value)
def test_who_outlives_a_killed_rank_holds_whole_experts_of_one_placement(phase: Phase) -> None:
    results = run_ranks(RANKS, killed, phase, expect_exit=(STOPPED,))
    alive = [result for rank, result in enumerate(results) if rank != STOPPED]
    assert all(result["error"] for result in alive)
    assert len({(result["epochs"], result["digest"]) for result in alive}) == 1
    assert all(result["whole"] and not result["control"] for result in alive)
