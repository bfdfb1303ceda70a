"""What the engine asks of a carrier of bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class TransportError(RuntimeError):
    """Bytes did not arrive: a peer is gone or too slow. The groups behind the transport may be unusable now."""


@dataclass(frozen=True)
class Message:
    """Bytes to or from a peer. Messages between two ranks are matched in order; both sides know the sizes.

    Args:
        peer: rank within the EP group.
        data: contiguous uint8, on the transport's ``device``; a message received is written into it.
    """

    peer: int
    data: Tensor


class Transport(ABC):
    """One way to move bytes between the ranks of an EP group."""

    device: torch.device
    """Where messages have to be: the model's device, or the CPU when the carrier needs host memory."""

    @abstractmethod
    def warm_up(self) -> None:
        """Open the connections now, so that the first rebalance does not pay for them."""

    @abstractmethod
    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive everything; returns when all of it is done, on every backend.

        Raises:
            TransportError: it did not finish within the timeout.
        """

    @abstractmethod
    def empty(self, nbytes: int) -> Tensor:
        """Uninitialised uint8 memory that messages may live in (pinned where that is faster)."""
