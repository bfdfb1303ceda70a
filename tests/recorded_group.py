"""A device backend's groups over gloo, on a CPU: each call is recorded where it is launched, and nothing waits in it.

What our code does with NCCL it does with these groups: one communicator a group for all kinds of calls, works that are
asked whether they are done, groups that are aborted. The order of the record is the order in which NCCL's kernels
would be launched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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
