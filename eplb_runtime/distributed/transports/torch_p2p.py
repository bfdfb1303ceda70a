"""torch.distributed point to point: gloo through host memory, NCCL (or another device backend) from the device."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.text import one_line
from .base import Message, Pending, Transport, TransportError

_CLOSING = timedelta(milliseconds=1)
_TAGS = 1 << 15


class TorchPointToPoint(Transport):
    """Batched isend/irecv on the balancer's migration group, which nothing else uses."""

    def __init__(self, group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float) -> None:
        super().__init__(group, backend, device, timeout_seconds)
        self._on_host = backend == "gloo"
        self._pinned = self._on_host and device.type == "cuda"
        self.device = self._group_device
        self.in_order = not self._on_host
        self._tags: Counter[tuple[int, bool]] = Counter()

    def warm_up(self, deadline: float) -> None:
        # One call that every rank of the group makes: NCCL builds the communicator of the whole group in it.
        self._try_out(deadline)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        out, into = self._to_others(sends, receives)
        try:
            operations = [*self._operations(dist.irecv, into), *self._operations(dist.isend, out)]
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise _failed(error) from error
        if not works:
            return Pending()
        return _OnHost(works, time.monotonic() + self._timeout) if self._on_host else _OnDevice(works, self._group)

    def _operations(self, kind: Callable[..., Any], messages: Sequence[Message]) -> list[dist.P2POp]:
        # A tag per message of a pair: gloo matches by tag, NCCL by order, and both agree.
        operations, sent = [], kind is dist.isend
        for message in messages:
            peer = dist.get_global_rank(self._group, message.peer)
            tag = self._tags[peer, sent] % _TAGS
            operations.append(dist.P2POp(kind, message.data, peer, self._group, tag=tag))
            self._tags[peer, sent] += 1
        return operations


class _OnHost(Pending):
    """Works of gloo, which tells of their end only to a thread that waits."""

    def __init__(self, works: Sequence[dist.Work], end: float) -> None:
        self._works, self._end = works, end
        self._finished, self._problem = threading.Event(), ""
        threading.Thread(target=self._watch, daemon=True, name="eplb_runtime transport").start()

    def _watch(self) -> None:
        try:
            for work in self._works:
                work.wait(timedelta(seconds=max(self._end - time.monotonic(), _CLOSING.total_seconds())))
        except Exception as error:  # whatever it is: who waits for this must not wait without end
            self._problem = str(_failed(error))
        self._finished.set()

    def poll(self) -> bool:
        if self._finished.is_set() and self._problem:
            raise TransportError(self._problem)
        return self._finished.is_set()

    def wait(self, deadline: float) -> None:
        if not self._finished.wait(max(0.0, deadline - time.monotonic())):
            self._give_up("messages were not through in time")
        self.poll()

    def abort(self) -> None:
        self._give_up("messages were aborted")

    def _give_up(self, reason: str) -> None:
        """gloo cannot cancel one operation. A wait that expires closes all connections of its group, which ends the
        waiting thread too."""
        if not self._finished.is_set():
            with contextlib.suppress(Exception):
                for work in self._works:
                    work.wait(_CLOSING)
            self._finished.wait()
            self._problem = self._problem and f"point-to-point {reason}"


class _OnDevice(Pending):
    """Works of a device backend. Their own waits hold a stream, not the host, or end the process on a timeout; so ask
    until they are done, and abort the group when that takes too long."""

    def __init__(self, works: Sequence[dist.Work], group: dist.ProcessGroup) -> None:
        self._works = works
        self._group = group
        self._aborted = False

    def poll(self) -> bool:
        if self._aborted:
            raise TransportError("point-to-point messages were aborted")
        try:
            if not all(work.is_completed() for work in self._works):
                return False
            for work in self._works:
                work.wait()  # for its error, and so that the current stream knows of the end
        except RuntimeError as error:
            raise _failed(error) from error
        return True

    def abort(self) -> None:
        if not self._aborted and not all(work.is_completed() for work in self._works):
            self._group.abort()
        self._aborted = True


def _failed(error: Exception) -> TransportError:
    return TransportError(f"point-to-point messages failed: {one_line(error)}")
