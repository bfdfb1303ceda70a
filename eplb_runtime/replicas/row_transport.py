"""The contract of transports that move rows between replicas and their homes, and no messages here.

A stage is built once for each placement and posted step after step. All ranks of the group post the same stages of the
same layers in the same order, also those that have no rows in one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """A row of one tensor on its way between a replica and its parent: the other end's rank, contiguous memory here,
    and memory here that lies as the replica's does there."""

    rank: int
    local: Tensor
    at_copy: Tensor


class Waiting(Protocol):
    """Rows on their way."""

    def wait(self) -> object:
        """From here on what arrives is there, and what leaves may be written: for the host, or for what the current
        stream does next."""


class TransferStage(ABC):
    """Rows that travel together."""

    @abstractmethod
    def post(self) -> Sequence[Waiting]:
        """Begin; what leaves has been computed by the current stream."""

    @abstractmethod
    def __len__(self) -> int:
        """Rows that begin or end on this rank."""


class RowChannel(ABC):
    """The stages of one layer, weights or gradients, as one placement has them."""

    @abstractmethod
    def stage(self, sends: Sequence[Row], receives: Sequence[Row]) -> TransferStage:
        """The next one; both ends list the rows between them in the same order."""


class RowTransport(ABC):
    """One way between the ranks that have each row of an expert tensor once."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for rows of copies and for their gradients, on this rank: where `Row.at_copy` lies."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def open(self) -> None:  # noqa: B027 (not all have anything to open)
        """Open all memory. Collective."""

    @abstractmethod
    def channel(self, layer: int, down: bool) -> RowChannel:
        """Return what carries a layer's weights to replicas (``down``), or their gradients back."""
