"""The contract of transports: they post messages and return a `Pending` to poll, wait for or abort."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..consensus import TransportError as TransportError


@dataclass(frozen=True)
class Message:
    """Bytes to or from a peer. Messages between two ranks are matched in order; both sides know the sizes.

    Args:
        peer: rank within the EP group; this rank's own number is allowed.
        data: contiguous uint8, on the transport's ``device``, may be empty; a message received is written into it.
    """

    peer: int
    data: Tensor


class Pending(ABC):
    """Messages on their way. Until it is done or aborted, their memory belongs to the transport: sent rows are not
    written, rows to come are neither read nor written."""

    @abstractmethod
    def poll(self) -> bool:
        """Return whether all of it is done, without waiting; TransportError: it has failed."""

    def has(self, index: int) -> bool:
        """Return whether this one of the messages received is here; transports that cannot tell wait for all."""
        return self.poll()

    @abstractmethod
    def wait(self, deadline: float) -> None:
        """Until all of it is done, seen by the host and not only by a device's stream. May run on any thread.

        Args:
            deadline: a time of `time.monotonic`, in seconds.

        Raises:
            TransportError: it has failed, or the deadline passed and it was aborted.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give it up; afterwards nothing is written any more. What is done stays done. May run on any thread."""


class PendingGroup(Pending):
    """Several as one. Where one has failed, the others are given up too: who has an error may use the memory again."""

    def __init__(self, *parts: Pending) -> None:
        self._parts = list(parts)

    def add(self, part: Pending) -> None:
        self._parts.append(part)

    def poll(self) -> bool:
        return self._on_all(lambda part: part.poll())

    def wait(self, deadline: float) -> None:
        self._on_all(lambda part: part.wait(deadline))

    def abort(self) -> None:
        for part in self._parts:
            part.abort()

    def _on_all(self, ask: Callable[[Pending], bool | None]) -> bool:
        try:
            answers = [ask(part) for part in self._parts]  # of all, also after one that is not done
            return all(answers)
        except BaseException:
            self.abort()
            raise


class Transport(ABC):
    """One way to move bytes between the ranks of an EP group. A table in this package's ``__init__`` names them all.

    After a `TransportError` or an abort the owner makes a new one; the owner also destroys the groups it was made on.
    """

    device: torch.device
    """Where messages have to be: the model's device, or the CPU when the transport needs host memory."""
    one_by_one: bool = False
    """Whether what two ranks send each other may be posted at different times: all of what comes first, then bit by bit
    what goes. Others want both in one call."""

    in_order: bool = False
    """True if its messages are kernels that wait for their peers on the device. Those and the host's collectives must
    be launched in one order on all ranks, or each may keep the other from a device: `post` is called by the thread
    that trains, at the same place of a step on every rank."""

    _timeout: float

    def wait_at_most(self, seconds: float) -> None:
        """Give what is posted from here on so long, whatever the deadline, in the place of what it was made with."""
        self._timeout = seconds

    @abstractmethod
    def warm_up(self, deadline: float) -> None:
        """Open the connections to all peers, unless they are; so that the first rebalance does not pay for them.
        Collective."""

    @abstractmethod
    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Begin to send and receive. What is sent has been computed by the current stream; nothing waits here."""

    @abstractmethod
    def empty(self, nbytes: int) -> Tensor:
        """Uninitialised uint8 memory that messages may live in (pinned where that is faster)."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is the transport's own; nothing may be pending."""
