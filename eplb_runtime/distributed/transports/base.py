"""The contract of transports: they post messages and return a `Pending` to poll, wait for or abort. Parts that several
share: a stream next to the training one, and waits with a deadline."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.worker import Worker
from ..consensus import POLL_SECONDS, gather_json
from ..consensus import TransportError as TransportError


@dataclass(frozen=True)
class Message:
    """Bytes to or from a peer, a rank of the EP group or this one itself: contiguous uint8 on the transport's device,
    may be empty; what is received is written into them. Those of two ranks are matched in order, of known sizes."""

    peer: int
    data: Tensor


class Pending:
    """Messages on their way; of this class itself: none. Until they are done or aborted, rows sent are not written, and
    rows to come neither read nor written. What a transport does without a thread goes on while somebody polls."""

    def poll(self) -> bool:
        """Return whether all messages are done, without waiting; TransportError: some failed."""
        return True

    def wait(self, deadline: float) -> None:
        """Wait until all messages are done, seen by the host and not only by a device's stream. May run on any thread.
        TransportError: some failed, or the deadline (of `time.monotonic`) passed and `abort` was called."""
        while not self.poll():
            if time.monotonic() > deadline:
                self.abort()
                raise TransportError("messages were not through in time")
            time.sleep(POLL_SECONDS)

    def abort(self) -> None:
        """Give up messages that are not done; their memory is not written any more. May run on any thread."""


class Transport(ABC):
    """One way to move bytes between the ranks of an EP group. After a `TransportError` or an abort the owner makes
    another, and destroys the groups this one was made on.

    Args:
        group: its ranks; ``backend`` is its backend's name.
        device: the model's. The attribute is where messages have to be, the CPU if the transport needs host memory.
        timeout_seconds: for what is posted to a library that ends it itself, whatever the deadline.
        package: used in the place of the transport's library.
    """

    in_order: bool = False
    """True if its messages are kernels that wait for their peers on the device. They and the host's collectives must be
    launched in one order on all ranks: `post` is called by the thread that trains, at the same place of a step."""

    def __init__(
        self, group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float, package: Any = None
    ) -> None:
        self.device = device
        self._group, self._rank, self._num_ranks = group, group.rank(), group.size()
        self._group_device = torch.device("cpu") if backend == "gloo" else device
        self._timeout, self._package = timeout_seconds, package

    def wait_at_most(self, seconds: float) -> None:
        """Set the timeout, in seconds, of what is posted from here on."""
        self._timeout = seconds

    @abstractmethod
    def warm_up(self, deadline: float) -> None:
        """Open the connections to all peers, ahead of the first `post`. Collective. TransportError: it failed."""

    @abstractmethod
    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Begin to send and receive, after the current stream's work so far; return what is pending without a wait."""

    def empty(self, nbytes: int) -> Tensor:
        """Return uninitialised uint8 memory that messages may live in (pinned where that is faster)."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def close(self) -> None:  # noqa: B027 (it may have nothing of its own)
        """Release what only this transport uses; the base class has nothing. Nothing may be pending."""

    def _gather(self, mine: Any, deadline: float) -> list[Any]:
        """Return what each rank says, in JSON. Collective."""
        return gather_json(mine, self._group, self._group_device, deadline)

    def _to_others(self, *both: Sequence[Message]) -> list[list[Message]]:
        """Return the messages to other ranks, and those from them, that are not empty; copy this rank's own."""
        own = ([message.data for message in messages if message.peer == self._rank] for messages in both)
        for sent, arrived in zip(*own, strict=True):
            arrived.copy_(sent)
        return [[one for one in messages if one.peer != self._rank and one.data.numel()] for messages in both]

    def _try_out(self, deadline: float) -> None:
        """Send a byte to each other rank, and receive one from each, in one call."""
        out, arrived = self.empty(1).zero_(), self.empty(self._num_ranks)
        others = [peer for peer in range(self._num_ranks) if peer != self._rank]
        receives = [Message(peer, arrived[peer : peer + 1]) for peer in others]
        self.post([Message(peer, out) for peer in others], receives).wait(deadline)


LEFT_SECONDS = 5.0
"""Longest wait for work that is still on a device's stream, as when a rank gives up."""


class SideStream:
    """Where writes and copies run in order; on a CPU they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.pointer = 0 if self._stream is None else self._stream.cuda_stream

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def after_current(self) -> None:
        """Let later work of this stream wait for what is queued on the current stream now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def mark(self) -> Callable[[], bool]:
        """Return a function that says, without waiting, whether all work given to this stream so far is done."""
        if self._stream is None:
            return lambda: True
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.query


def wait_until(done: Callable[[], bool], deadline: float, what: str) -> None:
    """Poll ``done`` until it returns True. TransportError, which names ``what``: the deadline passed."""
    while not done():
        if time.monotonic() > deadline:
            raise TransportError(f"{what} was not done in time")
        time.sleep(POLL_SECONDS)


def synchronize(device: torch.device, deadline: float) -> None:
    """Wait, on a thread of its own, for all work queued on a GPU. TransportError: the deadline passed."""
    if device.type == "cuda":
        worker, seconds = Worker("eplb_runtime transport"), max(0.0, deadline - time.monotonic())
        try:
            worker.do(lambda: torch.cuda.synchronize(device), seconds)
        except TimeoutError as error:
            raise TransportError("the device's work did not end in time") from error
