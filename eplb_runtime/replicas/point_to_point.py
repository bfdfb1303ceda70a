"""Rows of copies by torch.distributed, point to point: gloo or NCCL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .carrier import Carrier, Lane, Row, Stage

_TAGS_PER_LANE = 1 << 12


class PointToPoint(Carrier):
    """Messages of a stage are posted together, on every rank in the same order. Both ends of a message put it into the
    same stage, as NCCL demands.

    Args:
        group: the ranks that have each row once, on the weights' device, used by nothing else.
        ranks: all of them, in the order of the rows: the EP group, or, with divided rows, more.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = ranks

    def lane(self, layer: int, down: bool) -> Lane:
        return _Lane(2 * layer + (not down), self._group, self._ranks)


class _Lane(Lane):
    """Several lanes are on their way at once, and a pair of ranks may exchange several rows: each message of a pair has
    a tag of its own."""

    def __init__(self, number: int, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._first_tag = number * _TAGS_PER_LANE
        self._group = group
        self._count: dict[str, Counter[int]] = {"isend": Counter(), "irecv": Counter()}

    def stage(self, sends: Sequence[Row], receives: Sequence[Row]) -> Stage:
        operations = []
        for kind, rows in ((dist.isend, sends), (dist.irecv, receives)):
            count = self._count[kind.__name__]
            for row in rows:
                tag = self._first_tag + count[row.rank]
                count[row.rank] += 1
                as_bytes = row.here.reshape(-1).view(torch.uint8)
                operations.append(dist.P2POp(kind, as_bytes, self._ranks[row.rank], self._group, tag=tag))
        return Messages(operations)


@dataclass(frozen=True)
class Messages(Stage):
    operations: list[dist.P2POp]

    def post(self) -> list[dist.Work]:
        works: list[dist.Work] = dist.batch_isend_irecv(self.operations) if self.operations else []
        return works

    def __len__(self) -> int:
        return len(self.operations)
