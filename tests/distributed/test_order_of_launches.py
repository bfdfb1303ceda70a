"""With overlap over a device backend, experts and training's collectives are launched in one order on all ranks.

A device backend's kernels wait for their peers on the device. Two ranks that launch them in different orders may wait
for each other without end, so the record of a group that is no GPU's says whether they could."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.beside import RANKS, Run
from support.ranks import run_ranks

from eplb_runtime.distributed import process_groups
from eplb_runtime.events import RebalanceCommitted
from eplb_runtime.migration import overlapped

pytestmark = pytest.mark.long

STAGING_BYTES = 40_000
"""So that a migration takes several rounds."""


class Launch(NamedTuple):
    """A call on a group: its description, the call's kind, its peer's global rank (-1: none), its thread."""

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

    def __init__(self, work: Any, is_message: bool) -> None:
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


class RecordedGroup(dist.ProcessGroup):
    """A device backend's group over gloo's: each call is recorded where it is launched, and nothing waits in it."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store = store

    def get_group_store(self) -> dist.Store:
        return self._store

    def name(self) -> str:
        return "recorded"

    def abort(self) -> None:
        """gloo ends with the process."""


def _recorded(kind: str) -> Callable[..., Any]:
    """A call by the name that gloo has for it."""

    def launch(self: RecordedGroup, *arguments: Any, **named: Any) -> RecordedWork:
        is_message = kind in ("send", "recv")
        peer = dist.get_global_rank(self, arguments[1]) if is_message else -1
        launches.append(Launch(self.group_desc, kind, peer, threading.current_thread().name))
        return RecordedWork(getattr(self._get_backend(torch.device("cpu")), kind)(*arguments, **named), is_message)

    return launch


for name in ("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "alltoall_base", "broadcast"):
    setattr(RecordedGroup, name, _recorded(name))
for name in ("barrier", "gather", "reduce", "scatter", "send", "recv"):
    setattr(RecordedGroup, name, _recorded(name))
RecordedGroup.all_gather_single = _recorded("_allgather_base")
RecordedGroup.all_to_all_single = _recorded("alltoall_base")


def begin_recording() -> None:
    """The balancer's own groups but for control are of a backend that is no gloo."""
    make = process_groups.make_group

    def made(store: Any, name: str, ranks: Any, rank: int, backend: str, *more: Any) -> dist.ProcessGroup:
        with patch.object(dist, "ProcessGroup", dist.ProcessGroup if backend == "gloo" else RecordedGroup):
            return make(store, name, ranks, rank, "gloo", *more)

    process_groups.make_group, process_groups.backend_for = made, lambda device: "recorded"


@contextmanager
def transfers_that_last(job: Run, said: dict[str, Any]) -> Iterator[None]:
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
    job = Run(rank, overlap=True, staging_bytes=STAGING_BYTES)
    launches.clear()
    with transfers_that_last(job, said):
        for _ in range(2):
            job.until(RebalanceCommitted)
    said["trained"], said["late rounds"] = list(launches), job.background.late_rounds
    said["same"] = job.equals(job.still())
    return said


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


def in_one_order(of_ranks: Sequence[Sequence[Launch]]) -> bool:
    """Whether all ranks launch the same collectives, and each message between the same two of them at both its ends."""
    sent = [messages(launched) for launched in of_ranks]
    return all(collectives(launched) == collectives(of_ranks[0]) for launched in of_ranks) and all(
        found == sent[peer].get(("recv" if kind == "send" else "send", rank))
        for rank, of_rank in enumerate(sent)
        for (kind, peer), found in of_rank.items()
    )


def test_experts_and_collectives_are_launched_in_one_order_on_all_ranks() -> None:
    """Whatever moved when, training has the bits of experts that stay."""
    results = run_ranks(RANKS, jobs)
    of_ranks = [result["trained"] for result in results]
    assert in_one_order(of_ranks)
    assert {one.thread for launched in of_ranks for one in launched} == {"MainThread"}
    assert all({"send", "recv"} <= {one.kind for one in of_rank if "migration" in one.group} for of_rank in of_ranks)
    assert all(result["same"] and result["waited"] == 1 and result["late rounds"] > 0 for result in results)
