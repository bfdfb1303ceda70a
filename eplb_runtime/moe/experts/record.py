"""How one expert looks on the wire and in staging: its shards, one after another, each aligned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .optimizer_state import OptimizerStateError
from .registry import ExpertTensor

ALIGNMENT = 64
"""Bytes; shards start at multiples, so that staging can be viewed in any dtype."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class Shard:
    """Live memory of one expert on one rank that travels by itself: its row of a tensor, or a range of that; with the
    ``copies`` of it that are written along, and its ``offset`` in the record."""

    tensor: ExpertTensor
    memory: Tensor
    copies: tuple[Tensor, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.memory.nbytes

    def within(self, staged: Tensor, first: int = 0) -> Tensor:
        """Return its part of a record's bytes from ``first`` on, in its own dtype and shape."""
        return staged[self.offset - first : self.end - first].view(self.memory.dtype).view(self.memory.shape)

    def write(self, values: Tensor) -> None:
        """Copy values into the live memory, in place, and into all copies of it."""
        self.memory.copy_(values)
        for copied in self.copies:
            copied.copy_(values.reshape(copied.shape))


@dataclass(frozen=True, eq=False)
class Record:
    """Shards of one expert that travel together; ``nbytes`` includes the padding between them."""

    shards: tuple[Shard, ...]
    nbytes: int

    @classmethod
    def of(cls, parts: Iterable[tuple[ExpertTensor, Tensor, tuple[Tensor, ...]]]) -> Record:
        """Place shards, each given as tensor, memory and copies, one after another."""
        shards, offset = [], 0
        for tensor, memory, copies in parts:
            shards.append(Shard(tensor, memory.detach(), tuple(copy.detach() for copy in copies), offset))
            offset += _aligned(memory.nbytes)
        return cls(tuple(shards), offset)

    def pack(self, staged: Tensor) -> None:
        """Copy the live memory into ``nbytes`` of uint8."""
        for shard in self.shards:
            shard.within(staged).copy_(shard.memory)

    def unpack(self, staged: Tensor) -> None:
        """Copy ``nbytes`` of uint8 into the live memory, in place."""
        for shard in self.shards:
            shard.write(shard.within(staged))


class End(NamedTuple):
    """Where a piece of a record leaves or arrives: the home's row on its EP rank, and the rank among those that hold
    it."""

    row: int
    part: int


@dataclass(frozen=True)
class RecordFormat:
    """What moves with an expert of one layer, in registry order."""

    tensors: tuple[ExpertTensor, ...]

    @property
    def nbytes(self) -> int:
        """Of an expert, with room for the padding of its pieces."""
        # Each rank that has a range of a row sends that by itself, in up to three parts.
        return sum(
            _aligned(one.row_bytes) + (3 * len(one.ranges[0]) * ALIGNMENT if one.ranges else 0) for one in self.tensors
        )

    @property
    def is_divided(self) -> bool:
        """Whether ranks that hold the same experts each keep a range of their state: records travel in pieces."""
        return any(one.ranges for one in self.tensors)

    def digest(self) -> bytes:
        """Equal on two ranks when their records can be exchanged. Of a divided one it is of weights and ranges alone:
        a rank whose ranges are empty does not know what others keep."""
        rows = [one for one in self.tensors if one.part == "row"]
        return _digest([f"{one.name} {one.kind} {one.dtype} {tuple(one.row_shape)} {one.ranges or ''}" for one in rows])

    def state_digest(self) -> bytes:
        """Return bytes that are equal on ranks whose ranges of state can be exchanged; empty: this rank keeps none."""
        kept: dict[str, list[str]] = {}
        for one in self.tensors:
            if one.part != "row":
                name, _, key = one.name.rpartition("/")
                kept.setdefault(name, []).append(f"{key} {one.dtype} {one.part}")
        if len(set(map(tuple, kept.values()))) > 1:
            raise OptimizerStateError(
                f"an optimizer that divides experts over ranks keeps other state for some of their tensors: {kept}"
            )
        return _digest(next(iter(kept.values()))) if kept else b""

    def row(self, local_slot: int) -> Record:
        """Return the whole record of the expert in a slot."""
        return Record.of((one, one.row(local_slot), one.copies_of_row(local_slot)) for one in self.tensors)

    def piece(self, source: End, destination: End, *, here: End) -> Record:
        """Return what of a record goes from one rank to another, one of them ``here``. What has no ranges is whole
        on each that holds the expert, and goes to the one at the same place. Of what is divided, weights go from the
        rank that steps them to all of those, and state from the rank that keeps it to the one that will."""
        parts: list[tuple[ExpertTensor, Tensor, tuple[Tensor, ...]]] = []
        for one in self.tensors:
            memory, copied = one.row(here.row).detach(), one.copies_of_row(here.row)
            if not one.ranges:
                if source.part == destination.part:
                    parts.append((one, memory, copied))
                continue
            kept, will_keep = one.ranges[source.row][source.part], one.ranges[destination.row][destination.part]
            own = one.ranges[here.row][here.part]
            for first, end in _spans(kept, will_keep, whole=one.part == "row"):
                part = memory
                if one.part != "number":
                    begin = 0 if one.part == "row" else own[0]
                    part = memory.view(-1)[first - begin : end - begin]
                    if part.numel() != end - first:
                        where = f"elements {first} to {end} of an expert"
                        raise OptimizerStateError(f"{one.name}: {where} are not all here")
                stepped = own[0] <= first and end <= own[1]  # other memory has what is stepped here alone
                copies = [copy.view(-1)[first - own[0] : end - own[0]] for copy in copied if stepped]
                parts.append((one, part, tuple(copies)))
        return Record.of(parts)


def _digest(words: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(words).encode(), digest_size=16).digest()


def _spans(kept: tuple[int, int], will_keep: tuple[int, int], *, whole: bool) -> list[tuple[int, int]]:
    """What of ``kept`` is in ``will_keep``; or all of it, parted at the ends of that."""
    first, end = (min(max(place, kept[0]), kept[1]) for place in will_keep)
    spans = [(kept[0], first), (first, end), (end, kept[1])] if whole else [(first, end)]
    return [(begin, stop) for begin, stop in spans if begin < stop]
