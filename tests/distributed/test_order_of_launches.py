"""With overlap over a device backend, experts and training's collectives are launched in one order on all ranks.

A device backend's kernels wait for their peers on the device. Two ranks that launch them in different orders may wait
for each other without end, so the record of a group that is no GPU's says whether they could.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import recorded_group
from beside import RANKS, Job
from ranks import run_ranks
from recorded_group import Launch
from support.shuffle import plan_by, plan_shuffle

from eplb_runtime.events import BalancingResumed, RebalanceCommitted
from eplb_runtime.migration import overlapped

pytestmark = pytest.mark.long

STAGING_BYTES = 40_000
"""So that a migration takes several rounds."""


def train(job: Job, migrations: int) -> tuple[list[float], list[Launch]]:
    """Losses, and what was launched."""
    recorded_group.launches.clear()
    for _ in range(migrations):
        job.until(RebalanceCommitted)
    launched = list(recorded_group.launches)
    job.balancer.close()
    return job.losses, launched


@contextmanager
def transfers_that_last(job: Job, said: dict[str, Any]) -> Iterator[None]:
    """The first rounds of this rank are under way when the step after them has ended."""
    background, post_here = job.background, job.background._post_here
    said["waited"] = 0

    def released(*arguments: Any) -> Any:
        said["waited"] += recorded_group.held.is_set()
        recorded_group.held.clear()
        return wait(*arguments)

    def posting(*arguments: Any) -> None:
        with patch.object(overlapped, "wait", released):
            post_here(*arguments)

    background._post_here = posting
    recorded_group.held.set()
    yield
    recorded_group.held.clear()


def jobs(rank: int) -> dict[str, Any]:
    recorded_group.begin_recording()
    said: dict[str, Any] = {}
    job = Job(rank, overlap=True, staging_bytes=STAGING_BYTES)
    with transfers_that_last(job, said):
        said["trained"] = train(job, 2)
    said["late rounds"] = job.background.late_rounds
    said["connected again"] = connected_anew(rank)
    fixed = Job(rank, overlap=False, interval=None)
    for _ in said["trained"][0]:
        fixed.step()
    said["fixed"] = fixed.losses
    fixed.balancer.close()
    return said


def connected_anew(rank: int) -> list[Launch]:
    """What is launched from the moment where connections are lost until experts move over new ones."""
    job = Job(rank, overlap=False)
    plan_by(job.balancer, plan_shuffle)
    job.until(RebalanceCommitted)
    recorded_group.launches.clear()
    job.balancer.rebalancer._pause("a test wants it")
    job.until(BalancingResumed, most=400)
    job.until(RebalanceCommitted)
    launched = list(recorded_group.launches)
    job.balancer.close()
    return launched


def collectives(launched: Sequence[Launch]) -> list[tuple[str, str]]:
    return [(one.group, one.kind) for one in launched if one.peer < 0]


def messages(launched: Sequence[Launch]) -> dict[tuple[str, int], list[int]]:
    """Of each kind and peer: how many collectives were launched before each message."""
    before, found = 0, defaultdict(list)
    for one in launched:
        if one.peer < 0:
            before += 1
        else:
            found[one.kind, one.peer].append(before)
    return dict(found)


def of_migration(launched: Sequence[Launch]) -> list[Launch]:
    return [one for one in launched if one.group == "eplb_runtime migration"]


def in_one_order(of_ranks: Sequence[Sequence[Launch]]) -> bool:
    """Whether all ranks launch the same collectives, and each message between the same two of them at both its ends."""
    sent = [messages(launched) for launched in of_ranks]
    return all(collectives(launched) == collectives(of_ranks[0]) for launched in of_ranks) and all(
        found == sent[peer].get(("recv" if kind == "send" else "send", rank))
        for rank, of_rank in enumerate(sent)
        for (kind, peer), found in of_rank.items()
    )


def test_experts_and_collectives_are_launched_in_one_order_on_all_ranks() -> None:
    results = run_ranks(RANKS, jobs)
    of_ranks = [result["trained"][1] for result in results]
    assert all(any(one.peer >= 0 for one in launched) for launched in of_ranks)
    assert in_one_order(of_ranks)
    assert {one.thread for launched in of_ranks for one in launched} == {"MainThread"}
    # Whatever moved when, the losses are those of experts that stay.
    assert all(result["trained"][0] == result["fixed"] for result in results)
    assert all(result["waited"] == 1 and result["late rounds"] > 0 for result in results)
    # So are those that make new connections, of groups that were not there before.
    anew = [result["connected again"] for result in results]
    assert all({"allreduce", "send", "recv"} <= {one.kind for one in of_migration(launched)} for launched in anew)
    assert in_one_order(anew)
    assert {one.thread for launched in anew for one in launched} == {"MainThread"}
