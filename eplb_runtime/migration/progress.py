"""Progress of a migration, between steps or overlapped with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..distributed.consensus import Phase, Verdict
from ..events import RebalanceCommitted
from ..placement import EMPTY, Placement


@dataclass(frozen=True)
class MigrationProgress:
    """Progress of a migration since it was last asked for; the same on every rank but for bytes and seconds.

    Args:
        placement: the current one, on every rank.
        verdict: no commit: the rest of the migration is dropped.
        failed_phase: phase in which it failed; None: it did not.
        rounds: number of committed rounds, where training waited for all of them.
        committed_layers, left_layers: layers that changed, and layers that are not where the target has them; a layer
            of several rounds may be among both.
        moved_experts: number of experts that changed their rank, over all ranks.
        received_bytes: of experts, by this rank.
        transfers: int64 ``[M, 4]`` as `schedule.Round`'s, of the committed rounds; None: there are none.
        record_bytes: of an expert with its state, per layer; 0 for layers that were not to change.
        pause_seconds: time for which training waited, without work that was queued on the device before.
        seconds: time that this rank spent in each part of a migration between steps: ``prepare post transfer verify
            maps vote commit``.
        only_between_steps: somebody writes or replaces these experts in each step: nothing can overlap with it.
    """

    placement: Placement
    verdict: Verdict = field(default_factory=lambda: Verdict(True))
    failed_phase: Phase | None = None
    rounds: int = 0
    committed_layers: tuple[int, ...] = ()
    left_layers: tuple[int, ...] = ()
    moved_experts: int = 0
    received_bytes: int = 0
    transfers: NDArray[np.int64] | None = None
    record_bytes: tuple[int, ...] = ()
    pause_seconds: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    only_between_steps: bool = False

    @property
    def cause(self) -> str:
        """Why the rest is dropped; empty: it is not."""
        return self.verdict.cause

    @property
    def connections_broken(self) -> bool:
        """Return whether the ranks have to connect again."""
        return self.verdict.connections_broken

    @property
    def stall_seconds(self) -> float | None:
        """Part of the pause that does not grow with the bytes; None unless a migration between steps was completed."""
        if not self.rounds or self.failed_phase is not None:
            return None
        return sum(self.seconds.get(part, 0.0) for part in ("prepare", "post", "maps", "vote"))

    def committed(self, step: int, pause_seconds: float, before: Placement) -> RebalanceCommitted:
        """Return the event that experts have moved, ``pause_seconds`` since the last one."""
        return RebalanceCommitted(
            step,
            epoch=self.placement.epoch,
            digest=self.placement.digest(),
            moved_experts=self.moved_experts,
            received_bytes=self.received_bytes,
            pause_seconds=pause_seconds,
            phase_seconds=dict(self.seconds),
            placement=self.placement,
            transfers=self.transfers,
            expert_bytes=self.record_bytes,
            placed_replicas=_placed_replicas(before, self.placement),
        )


def _placed_replicas(before: Placement, after: Placement) -> int:
    """Number of replica slots that hold another expert than before."""
    now = after.replicas_LRK
    return int(((now != before.replicas_LRK) & (now != EMPTY)).sum())
