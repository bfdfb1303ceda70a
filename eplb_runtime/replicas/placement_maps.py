"""What follows a placement, in place: the way from experts to slots, the split over copies, the copies themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..moe.routing.lookup import SlotTable
from ..moe.routing.splitter import BatchSplitter
from ..placement import Placement
from .sync import ReplicaSync


@dataclass(frozen=True)
class Maps:
    """Everything that follows a placement, in place, at a commit; no splitter and replicas without replica slots."""

    table: SlotTable
    splitter: BatchSplitter | None
    replicas: ReplicaSync | None

    def prepare(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Make ready, all memory included, to follow a placement that differs in these layers; what is returned does
        it."""
        ready = [self.table.prepare(placement, layers)]
        if self.splitter is not None and self.replicas is not None:
            ready += [self.splitter.prepare(placement, layers), self.replicas.prepare(placement, layers)]

        def follow() -> None:
            for take_over in ready:
                take_over()

        return follow
