"""How one expert looks on the wire and in staging: its rows, one after another, each aligned."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .optimizer_state import OptimizerStateError
from .registry import ExpertTensor

ALIGNMENT = 64
"""Bytes; rows start at multiples, so that staging can be viewed in any dtype."""


def _digest(words: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(words).encode(), digest_size=16).digest()


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
        """Copy a row's values into the live row of a slot, and into all other memory that holds it."""
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
            # Each rank that has a range of it sends that by itself, in up to three parts.
            offset += 3 * len(tensor.ranges[0]) * ALIGNMENT if tensor.ranges else 0
        return cls(tuple(fields), offset)

    @property
    def payload_bytes(self) -> int:
        return sum(field.nbytes for field in self.fields)

    @property
    def is_divided(self) -> bool:
        """Whether ranks that hold the same experts each keep a range of their state: records travel in `pieces`."""
        return any(field.source.ranges for field in self.fields)

    def digest(self) -> bytes:
        """Equal on two ranks when their records can be exchanged. Of a divided one it is of weights and ranges alone:
        a rank whose ranges are empty does not know what others keep."""
        fields = [field.source for field in self.fields if field.source.part == "row"]
        words = [f"{one.name} {one.kind} {one.dtype} {tuple(one.row_shape)} {one.ranges or ''}" for one in fields]
        return _digest(words)

    def state_digest(self) -> bytes:
        """Return bytes that are equal on ranks whose ranges of state can be exchanged; empty: this rank keeps none."""
        kept: dict[str, list[str]] = {}
        for one in (field.source for field in self.fields if field.source.part != "row"):
            name, _, key = one.name.rpartition("/")
            kept.setdefault(name, []).append(f"{key} {one.dtype} {one.part}")
        if len(set(map(tuple, kept.values()))) > 1:
            raise OptimizerStateError(
                f"an optimizer that divides experts over ranks keeps other state for some of their tensors: {kept}"
            )
        return _digest(next(iter(kept.values()))) if kept else b""

    @torch.no_grad()
    def unpack(self, record: Tensor, local_slot: int) -> None:
        """Copy a record into the live rows of a slot, in place."""
        for field in self.fields:
            field.write(local_slot, field.in_bytes(record[field.offset : field.offset + field.nbytes]))


@dataclass(frozen=True)
class End:
    """Where a piece of a divided record leaves or arrives.

    Args:
        row: of the home, on its EP rank.
        part: the rank among those that hold it.
    """

    row: int
    part: int


@torch.no_grad()
def piece(record_format: RecordFormat, source: End, destination: End, *, here: End) -> RecordFormat:
    """Return what of a divided record goes from one rank to another, one of them ``here``: a record of one row of live
    memory. Weights go from the rank that steps them to all that hold the expert; state goes from the rank that keeps it
    to the one that will. What has no ranges is whole on each of them, and goes to the one at the same place."""
    tensors = []
    for one in (field.source for field in record_format.fields):
        if not one.ranges:
            if source.part == destination.part:
                rows, copied = (one.row(here.row).detach(),), one.copies_of_row(here.row)
                copied_along = (copied,) if copied else ()
                tensors.append(ExpertTensor(one.name, rows, one.kind, copied_along, one.varies_in_device))
            continue
        kept, will_keep = one.ranges[source.row][source.part], one.ranges[destination.row][destination.part]
        own = one.ranges[here.row][here.part]
        for first, end in _spans(kept, will_keep, whole=one.part == "row"):
            memory = one.row(here.row).detach()
            copies: tuple[Tensor, ...] = ()
            if one.part != "number":
                begin = 0 if one.part == "row" else own[0]
                memory = memory.view(-1)[first - begin : end - begin]
                if memory.numel() != end - first:
                    raise OptimizerStateError(f"{one.name}: elements {first} to {end} of an expert are not all here")
            if own[0] <= first and end <= own[1]:  # other memory has what is stepped here alone
                copies = tuple(copied.view(-1)[first - own[0] : end - own[0]] for copied in one.copies_of_row(here.row))
            copied_along = (copies,) if copies else ()
            tensors.append(ExpertTensor(one.name, (memory,), one.kind, copied_along, one.varies_in_device))
    return RecordFormat.of(tensors)


def _spans(kept: tuple[int, int], will_keep: tuple[int, int], *, whole: bool) -> list[tuple[int, int]]:
    """What of ``kept`` is in ``will_keep``; or all of it, parted at the ends of that."""
    first, end = (min(max(place, kept[0]), kept[1]) for place in will_keep)
    spans = [(kept[0], first), (first, end), (end, kept[1])] if whole else [(first, end)]
    return [(begin, stop) for begin, stop in spans if begin < stop]
