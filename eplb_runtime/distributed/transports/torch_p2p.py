"""torch.distributed point to point: gloo through host memory, NCCL (or another device backend) from the device."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.text import one_line
from ...utils.worker import Worker
from .base import Message, Pending, Transport, TransportError

_CLOSING = timedelta(milliseconds=1)
_TAGS = 1 << 15


class TorchPointToPoint(Transport):
    """Batched isend/irecv on the balancer's migration group, which nothing else uses."""

    def __init__(self, group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float) -> None:
        super().__init__(group, backend, device, timeout_seconds)
        self._pinned = backend == "gloo" and device.type == "cuda"
        self.device, self.in_order = self._group_device, backend != "gloo"
        self._tags: Counter[tuple[int, Any]] = Counter()

    def warm_up(self, deadline: float) -> None:
        # One call that every rank of the group makes: NCCL builds the communicator of the whole group in it.
        self._try_out(deadline)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        operations, (out, into) = list[dist.P2POp](), self._to_others(sends, receives)
        try:
            for kind, message in (*((dist.irecv, one) for one in into), *((dist.isend, one) for one in out)):
                # A tag per message of a pair: gloo matches by tag, NCCL by order, and both agree.
                peer = dist.get_global_rank(self._group, message.peer)
                tag = self._tags[peer, kind] % _TAGS
                self._tags[peer, kind] += 1
                operations.append(dist.P2POp(kind, message.data, peer, self._group, tag=tag))
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise _failed(error) from error
        if not works:
            return Pending()
        return _OnDevice(works, self._group) if self.in_order else _OnHost(works, time.monotonic() + self._timeout)


class _OnHost(Pending):
    """Works of gloo, which tells of their end only to a thread that waits."""

    def __init__(self, works: Sequence[dist.Work], end: float) -> None:
        def watch() -> None:
            for work in works:
                work.wait(timedelta(seconds=max(end - time.monotonic(), _CLOSING.total_seconds())))

        self._works, self._given_up = works, ""
        self._ended = Worker("eplb_runtime transport").submit(watch)

    def poll(self) -> bool:
        if self._ended.done() and (error := self._ended.exception()) is not None:
            raise TransportError(self._given_up) if self._given_up else _failed(error)
        return self._ended.done()

    def wait(self, deadline: float) -> None:
        if not wait([self._ended], max(0.0, deadline - time.monotonic())).done:
            self._give_up("point-to-point messages were not through in time")
        self.poll()

    def abort(self) -> None:
        self._give_up("point-to-point messages were aborted")

    def _give_up(self, reason: str) -> None:
        """gloo cannot cancel one operation: a wait that expires closes its group's connections, and the thread ends."""
        if not self._ended.done():
            with contextlib.suppress(Exception):
                for work in self._works:
                    work.wait(_CLOSING)
            wait([self._ended])
            self._given_up = reason


class _OnDevice(Pending):
    """Works of a device backend. Their own waits hold a stream, not the host, or end the process on a timeout; so ask
    until they are done, and abort the group when that takes too long."""

    def __init__(self, works: Sequence[dist.Work], group: dist.ProcessGroup) -> None:
        self._works, self._group, self._aborted = works, group, False

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


def _failed(error: BaseException) -> TransportError:
    return TransportError(f"point-to-point messages failed: {one_line(error)}")
