"""Rows of copies by torch.distributed, point to point: gloo or NCCL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .row_transport import Row, RowChannel, RowTransport, TransferStage

_TAGS_PER_CHANNEL = 1 << 12


class PointToPoint(RowTransport):
    """Messages of a stage are posted together, on every rank in the same order. Both ends of a message put it into the
    same stage, as NCCL demands. The group is used by nothing else."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = ranks

    def channel(self, layer: int, down: bool) -> RowChannel:
        return _TaggedChannel(2 * layer + (not down), self._group, self._ranks)


class _TaggedChannel(RowChannel):
    """Messages with a tag of their own for each pair of ranks: several channels are in flight at once, and a pair may
    exchange several rows."""

    def __init__(self, number: int, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._first_tag = number * _TAGS_PER_CHANNEL
        self._group = group
        self._count: dict[str, Counter[int]] = {"isend": Counter(), "irecv": Counter()}

    def stage(self, sends: Sequence[Row], receives: Sequence[Row]) -> TransferStage:
        operations = []
        for kind, rows in ((dist.isend, sends), (dist.irecv, receives)):
            count = self._count[kind.__name__]
            for row in rows:
                tag = self._first_tag + count[row.rank]
                count[row.rank] += 1
                as_bytes = row.local.reshape(-1).view(torch.uint8)
                operations.append(dist.P2POp(kind, as_bytes, self._ranks[row.rank], self._group, tag=tag))
        return Messages(operations)


@dataclass(frozen=True)
class Messages(TransferStage):
    operations: list[dist.P2POp]

    def post(self) -> list[dist.Work]:
        works: list[dist.Work] = dist.batch_isend_irecv(self.operations) if self.operations else []
        return works

    def __len__(self) -> int:
        return len(self.operations)
