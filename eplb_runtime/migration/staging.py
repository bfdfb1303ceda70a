"""Preallocated memory for experts on their way, and the messages that a record travels in."""

from __future__ import annotations

import torch
from torch import Tensor

from ..experts.record import RecordFormat, RowField
from .transports.base import Transport

DIRECT_BYTES = 1 << 20
"""A row of at least so many bytes is sent from where it lives; smaller ones are packed (measured on gloo: packing
loses from 1 MiB on)."""


class Arena:
    """One growing uint8 buffer on the transport's device, cut into pieces anew for each round."""

    def __init__(self, transport: Transport, nbytes: int) -> None:
        self._transport = transport
        self._memory = transport.empty(nbytes)
        self._used = 0

    @property
    def nbytes(self) -> int:
        return self._memory.shape[0]

    def reserve(self, nbytes: int) -> None:
        """Make sure that a round of so many bytes fits; allocates only when it does not fit yet."""
        if nbytes > self.nbytes:
            self._memory = self._transport.empty(nbytes)

    def restart(self) -> None:
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        piece = self._memory[self._used : self._used + nbytes]
        if piece.shape[0] != nbytes:
            raise RuntimeError(f"the staging buffer of {self.nbytes} bytes is too small for this round")
        self._used += nbytes
        return piece


def runs_of(record_format: RecordFormat, device: torch.device) -> list[tuple[int, int, RowField | None]]:
    """The messages that carry one record: ``(first byte, end, field)``; ``field`` names a row sent from its place."""
    runs: list[tuple[int, int, RowField | None]] = []
    packed_from = None
    for field in record_format.fields:
        tensor = field.source.tensor
        if field.nbytes >= DIRECT_BYTES and tensor.device == device and field.live_row(0).is_contiguous():
            if packed_from is not None:
                runs.append((packed_from, field.offset, None))
                packed_from = None
            runs.append((field.offset, field.offset + field.nbytes, field))
        elif packed_from is None:
            packed_from = field.offset
    if packed_from is not None:
        runs.append((packed_from, record_format.nbytes, None))
    return runs
