"""Rows of replicas by torch.distributed, point to point: gloo or NCCL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from .plan import Row, RowStage, RowTransport, Waiting

_TAGS_PER_STAGE = 1 << 12


@dataclass(frozen=True)
class Messages(RowStage):
    """Messages of one stage."""

    operations: list[dist.P2POp]

    def post(self) -> Sequence[Waiting]:
        return dist.batch_isend_irecv(self.operations) if self.operations else []


class PointToPoint(RowTransport):
    """Messages of a stage are posted together, on every rank in the same order. Both ends of a message put it into the
    same stage, as NCCL demands. The group is used by nothing else."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = ranks

    def stage(self, layer: int, down: bool, number: int, sends: Sequence[Row], receives: Sequence[Row]) -> Messages:
        operations = []
        first_tag = ((2 * layer + (not down)) * 2 + number) * _TAGS_PER_STAGE
        for kind, rows in ((dist.isend, sends), (dist.irecv, receives)):
            count: Counter[int] = (
                Counter()
            )  # several stages are in flight at once, and a pair may exchange several rows
            for row in rows:
                as_bytes, tag = row.local.reshape(-1).view(torch.uint8), first_tag + count[row.rank]
                operations.append(dist.P2POp(kind, as_bytes, self._ranks[row.rank], self._group, tag=tag))
                count[row.rank] += 1
        return Messages(operations)

    def post(self, stages: Sequence[RowStage]) -> list[Sequence[Waiting]]:
        """As one group of sends; NCCL has one thing to wait for then, gloo one for each message."""
        operations = [[*stage.operations] for stage in stages if isinstance(stage, Messages)]
        together = Messages([one for some in operations for one in some])
        works, ends = together.post(), accumulate(map(len, operations), initial=0)
        if len(works) != len(together.operations):
            return [works] * len(stages)
        return [works[begin:end] for begin, end in pairwise(ends)]
