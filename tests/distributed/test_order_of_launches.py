"""With overlap over a device backend, experts and training's collectives are launched in one order on all ranks.

A device backend's kernels wait for their peers on the device. Two ranks that launch them in different orders may wait
for each other without end, so the record of a group that is no GPU's says whether they could."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from beside import RANKS, Job
from ranks import run_ranks
from support.shuffle import plan_by, plan_shuffle

from eplb_runtime.events import BalancingResumed, RebalanceCommitted
from eplb_runtime.migration import overlapped

# -- A device backend's groups over gloo, on a CPU: each call is recorded where it is launched, and nothing waits in i


BACKEND = "recorded"


@dataclass(frozen=True)
class Launch:
    """A call on a group.

    Args:
        group: its description.
        kind: of the call.
        peer: a global rank, of messages; -1: a collective.
        thread: name of the thread that has launched it.
    """

    group: str
    kind: str
    peer: int
    thread: str


launches: list[Launch] = []
"""Of this process, in order."""
held = threading.Event()
"""While it is set, no message of this process is seen to be done."""


class RecordedWork:
    """Done when the host may know, as an event of a device; gloo's own works say so to those who wait alone."""

    def __init__(self, work: Any, is_message: bool = False) -> None:
        self._work, self._is_message = work, is_message
        self._done, self._error = threading.Event(), None
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set() and not (self._is_message and held.is_set())

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._done.wait(None if timeout is None else timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return True

    synchronize = wait


def _collective(kind: str) -> Callable[..., Any]:
    """A call by the name that gloo has for it."""

    def launch(self: RecordedGroup, *arguments: Any, **named: Any) -> RecordedWork:
        self.record(kind)
        return RecordedWork(getattr(self.inner, kind)(*arguments, **named))

    return launch


class RecordedGroup(dist.ProcessGroup):
    """Over gloo's."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._store = store

    def get_group_store(self) -> dist.Store:
        return self._store

    def record(self, kind: str, peer: int = -1) -> None:
        if peer >= 0:
            peer = dist.get_global_rank(self, peer)
        launches.append(Launch(self.group_desc, kind, peer, threading.current_thread().name))

    allreduce = _collective("allreduce")
    allreduce_coalesced = _collective("allreduce_coalesced")
    allgather = _collective("allgather")
    _allgather_base = _collective("_allgather_base")
    all_gather_single = _allgather_base
    alltoall_base = _collective("alltoall_base")
    all_to_all_single = alltoall_base
    broadcast = _collective("broadcast")
    barrier = _collective("barrier")
    gather = _collective("gather")
    reduce = _collective("reduce")
    scatter = _collective("scatter")

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> RecordedWork:
        self.record("send", peer)
        return RecordedWork(self.inner.send(tensors, peer, tag), is_message=True)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> RecordedWork:
        self.record("recv", peer)
        return RecordedWork(self.inner.recv(tensors, peer, tag), is_message=True)

    def abort(self) -> None:
        """gloo ends with the process."""

    shutdown = abort

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner


def begin_recording() -> None:
    """Replace the world by one whose groups are recorded, on every rank."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, RecordedGroup, devices=["cpu"])
    dist.init_process_group(BACKEND, store=dist.PrefixStore("recorded", store), rank=rank, world_size=size)


# -- tests


pytestmark = pytest.mark.long

STAGING_BYTES = 40_000
"""So that a migration takes several rounds."""


def train(job: Job, migrations: int) -> tuple[list[float], list[Launch]]:
    """Losses, and what was launched."""
    launches.clear()
    for _ in range(migrations):
        job.until(RebalanceCommitted)
    launched = list(launches)
    job.balancer.close()
    return job.losses, launched


@contextmanager
def transfers_that_last(job: Job, said: dict[str, Any]) -> Iterator[None]:
    """The first rounds of this rank are under way when the step after them has ended."""
    background, post_here = job.background, job.background._post_here
    said["waited"] = 0

    def released(*arguments: Any) -> Any:
        said["waited"] += held.is_set()
        held.clear()
        return wait(*arguments)

    def posting(*arguments: Any) -> None:
        with patch.object(overlapped, "wait", released):
            post_here(*arguments)

    background._post_here = posting
    held.set()
    yield
    held.clear()


def jobs(rank: int) -> dict[str, Any]:
    begin_recording()
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
    launches.clear()
    job.balancer.rebalancer._pause("a test wants it")
    job.until(BalancingResumed, most=400)
    job.until(RebalanceCommitted)
    launched = list(launches)
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
