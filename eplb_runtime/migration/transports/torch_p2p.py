"""torch.distributed point to point: gloo through host memory, NCCL (or another device backend) from the device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Message, Transport, TransportError


class TorchPointToPoint(Transport):
    """Batched isend/irecv on the balancer's migration group.

    Args:
        group: the migration group, used by nobody else.
        backend: its backend's name.
        device: the model's device.
        timeout_seconds: bound of one exchange.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float) -> None:
        self._group = group
        self._timeout = timeout_seconds
        self._on_host = backend == "gloo"
        self._pinned = self._on_host and device.type == "cuda"
        self.device = torch.device("cpu") if self._on_host else device

    def warm_up(self) -> None:
        size, rank = self._group.size(), self._group.rank()
        if size == 1:
            return
        peers = [peer for peer in range(size) if peer != rank]
        out, arrived = self.empty(1).zero_(), self.empty(size)
        self.exchange(
            [Message(peer, out) for peer in peers], [Message(peer, arrived[peer : peer + 1]) for peer in peers]
        )

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if not sends and not receives:
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        operations = [*self._operations(dist.isend, sends), *self._operations(dist.irecv, receives)]
        try:
            works = dist.batch_isend_irecv(operations)
            if self._on_host:
                for work in works:
                    work.wait()  # bounded by the group's timeout
            else:
                self._wait_on_device(works)
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            text = str(error).strip().splitlines()
            raise TransportError(f"point-to-point exchange failed: {text[0] if text else error}") from error

    def _operations(self, kind: Callable[..., Any], messages: Sequence[Message]) -> list[dist.P2POp]:
        # A tag per message of a pair: gloo matches by tag, NCCL by order, and both agree.
        next_tag: Counter[int] = Counter()
        operations = []
        for message in messages:
            peer = dist.get_global_rank(self._group, message.peer)
            operations.append(dist.P2POp(kind, message.data, peer, self._group, tag=next_tag[peer]))
            next_tag[peer] += 1
        return operations

    def _wait_on_device(self, works: Sequence[dist.Work]) -> None:
        # Device backends do not raise on a timeout but end the process; so ask, and abort the group ourselves.
        deadline = time.monotonic() + self._timeout
        while not all(work.is_completed() for work in works):
            if time.monotonic() > deadline:
                self._group.abort()
                raise TransportError(f"point-to-point exchange did not finish in {self._timeout:g} s")
            time.sleep(0.0002)
        for work in works:
            work.wait()
