"""How one expert looks on the wire and in staging: its rows, one after another, each aligned."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...utils.checksums import as_bytes
from ...utils.checksums_numba import copy
from .registry import ExpertTensor

ALIGNMENT = 64
"""Bytes; rows start at multiples, so that staging can be viewed in any dtype."""


@dataclass(frozen=True)
class RowField:
    """Where one tensor's row stands within the record of an expert."""

    source: ExpertTensor
    offset: int

    @property
    def nbytes(self) -> int:
        return self.source.row_bytes

    def live_row(self, local_slot: int) -> Tensor:
        """The row itself, in the live tensor."""
        return self.source.row(local_slot)

    @torch.no_grad()
    def write(self, local_slot: int, values: Tensor) -> None:
        """Copy a row's values into the live row of a slot, and into all other memory that holds it.

        Args:
            values: of the row's dtype and shape, on any device.
        """
        self.source.row(local_slot).copy_(values)
        self.write_copies(local_slot, values)

    def write_copies(self, local_slot: int, values: Tensor) -> None:
        """Copy a row's values into the other memory that holds it alone."""
        for copied in self.source.copies_of_row(local_slot):
            copied.copy_(values.reshape(copied.shape))

    def in_bytes(self, raw: Tensor) -> Tensor:
        """``nbytes`` of uint8, in the row's dtype and shape."""
        return raw.view(self.source.dtype).view(self.source.row_shape)


@dataclass(frozen=True)
class RecordFormat:
    """The record of one expert: fields in registry order; ``nbytes`` includes the padding between them."""

    fields: tuple[RowField, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[ExpertTensor]) -> RecordFormat:
        fields, offset = [], 0
        for tensor in tensors:
            fields.append(RowField(tensor, offset))
            offset += -(-tensor.row_bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields), offset)

    @property
    def payload_bytes(self) -> int:
        return sum(field.nbytes for field in self.fields)

    def digest(self) -> bytes:
        """Equal on two ranks when their records can be exchanged."""
        words = [f"{f.source.name} {f.source.kind} {f.source.dtype} {tuple(f.source.row_shape)}" for f in self.fields]
        return hashlib.blake2b("\n".join(words).encode(), digest_size=16).digest()

    @torch.no_grad()
    def unpack(self, record: Tensor, local_slot: int) -> None:
        """Copy a record into the live rows of a slot, in place."""
        for field in self.fields:
            row = field.live_row(local_slot)
            raw = record[field.offset : field.offset + field.nbytes]
            if row.device.type == record.device.type == "cpu" and row.is_contiguous() and not row.is_inference():
                copy(as_bytes(row), raw)
                increment_version(row)  # as torch's own copy does
                field.write_copies(local_slot, field.in_bytes(raw))
            else:
                field.write(local_slot, field.in_bytes(raw))
