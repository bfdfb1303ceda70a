"""torch.distributed point to point: gloo through host memory, NCCL (or another device backend) from the device."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.errors import one_line
from .base import Message, Pending, Transport, TransportError

_POLL_SECONDS = 0.0002
_CLOSING = timedelta(milliseconds=1)
_TAGS = 1 << 15


class TorchPointToPoint(Transport):
    """Batched isend/irecv on the balancer's migration group.

    Args:
        group: the migration group, used by nobody else.
        backend: its backend's name.
        device: the model's device.
        timeout_seconds: nothing that was posted is waited for longer, whatever the deadline.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float) -> None:
        self._group = group
        self._rank = group.rank()
        self._timeout = timeout_seconds
        self._on_host = backend == "gloo"
        self._pinned = self._on_host and device.type == "cuda"
        self.device = torch.device("cpu") if self._on_host else device
        self.one_by_one = self._on_host
        self._tags: Counter[tuple[int, bool]] = Counter()

    def warm_up(self, deadline: float) -> None:
        size = self._group.size()
        peers = [peer for peer in range(size) if peer != self._rank]
        out, arrived = self.empty(1).zero_(), self.empty(size)
        # One call that every rank of the group makes: NCCL builds the communicator of the whole group in it.
        self.post(
            [Message(peer, out) for peer in peers], [Message(peer, arrived[peer : peer + 1]) for peer in peers]
        ).wait(deadline)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self._copy_own(sends, receives)
        try:
            operations = [*self._operations(dist.irecv, receives), *self._operations(dist.isend, sends)]
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise _failed(error) from error
        if self._on_host:
            return _OnHost(works, self._timeout, [bool(m.peer != self._rank and m.data.numel()) for m in receives])
        return _OnDevice(works, self._group)

    def seconds(self, sends: Sequence[Message], receives: Sequence[Message], deadline: float) -> float:
        if self.device.type != "cuda":
            return super().seconds(sends, receives, deadline)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # A stream of its own: if a peer never comes, training's stream does not wait for it.
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            began.record(stream)
            pending = self.post(sends, receives)
            assert isinstance(pending, _OnDevice)
            pending.hold_stream()
            ended.record(stream)
            pending.wait(deadline)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def close(self) -> None:
        """Nothing is ours: the group belongs to who made it."""

    def _operations(self, kind: Callable[..., Any], messages: Sequence[Message]) -> list[dist.P2POp]:
        # A tag per message of a pair: gloo matches by tag, NCCL by order, and both agree.
        operations, sent = [], kind is dist.isend
        for message in messages:
            if message.peer == self._rank or message.data.numel() == 0:
                continue
            peer = dist.get_global_rank(self._group, message.peer)
            tag = self._tags[peer, sent] % _TAGS
            operations.append(dist.P2POp(kind, message.data, peer, self._group, tag=tag))
            self._tags[peer, sent] += 1
        return operations

    def _copy_own(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """torch.distributed does not send to the own rank."""
        own = ([message.data for message in messages if message.peer == self._rank] for messages in (receives, sends))
        for arrived, sent in zip(*own, strict=True):
            arrived.copy_(sent)


class _OnHost(Pending):
    """Works of gloo, which tells of their end only to a thread that waits.

    Args:
        works: what is received first, in its order.
        seconds: that it takes at most.
        from_others: of each message received, whether there is a work for it.
    """

    def __init__(self, works: Sequence[dist.Work], seconds: float, from_others: Sequence[bool]) -> None:
        self._works = works
        self._needed = list(accumulate(from_others))
        self._through = 0
        self._seconds = seconds
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        if works:
            threading.Thread(target=self._watch, daemon=True, name="eplb_runtime transport").start()
        else:
            self._done.set()

    def poll(self) -> bool:
        if not self._done.is_set():
            return False
        self._raise_if_failed()
        return True

    def has(self, index: int) -> bool:
        return self.poll() or self._through >= self._needed[index]

    def wait(self, deadline: float) -> None:
        if not self._done.wait(max(0.0, deadline - time.monotonic())):
            self.abort()
            raise TransportError("point-to-point messages were not through in time")
        self._raise_if_failed()

    def abort(self) -> None:
        # gloo cannot cancel one operation. A wait that expires closes all connections of its group, which ends the
        # waiting thread too.
        try:
            for work in self._works if not self._done.is_set() else ():
                work.wait(_CLOSING)
        except RuntimeError:
            pass
        self._done.wait()

    def _watch(self) -> None:
        end = time.monotonic() + self._seconds
        try:
            for work in self._works:
                work.wait(timedelta(seconds=max(end - time.monotonic(), _CLOSING.total_seconds())))
                self._through += 1
        except RuntimeError as error:
            self._error = error
        finally:
            self._done.set()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise _failed(self._error) from self._error


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

    def wait(self, deadline: float) -> None:
        while not self.poll():
            if time.monotonic() > deadline:
                self.abort()
                raise TransportError("point-to-point messages were not through in time")
            time.sleep(_POLL_SECONDS)

    def abort(self) -> None:
        if not self._aborted and not all(work.is_completed() for work in self._works):
            self._group.abort()
        self._aborted = True

    def hold_stream(self) -> None:
        """Let the current stream go on only when all has arrived; the host does not wait."""
        for work in self._works:
            work.synchronize()


def _failed(error: RuntimeError) -> TransportError:
    return TransportError(f"point-to-point messages failed: {one_line(error)}")
