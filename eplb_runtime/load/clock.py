"""How long a step takes, and what a rebalance costs besides its bytes: for the gate's prediction of what pays."""

from __future__ import annotations

import time


class StepClock:
    """Smoothed seconds of a step, without the pauses that rebalancing made itself, and of a rebalance's fixed part.

    Args:
        stall_seconds: measured before the first migration.

    Attributes:
        step_seconds: of a training step; 0 before the second one.
        stall_seconds: what a migration takes besides carrying, checking and copying experts.
    """

    WEIGHT = 0.2
    STALL_WEIGHT = 0.5

    def __init__(self, stall_seconds: float) -> None:
        self.step_seconds = 0.0
        self.stall_seconds = stall_seconds
        self._last: float | None = None
        self._excluded = 0.0

    def tick(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            seconds = now - self._last - self._excluded
            self.step_seconds += (self.WEIGHT if self.step_seconds else 1.0) * (seconds - self.step_seconds)
        self._last, self._excluded = now, 0.0

    def exclude(self, seconds: float) -> None:
        """This pause since the last tick is no part of a step."""
        self._excluded += seconds

    def stalled(self, seconds: float) -> None:
        """A migration was carried out and took so long besides its bytes."""
        self.stall_seconds += self.STALL_WEIGHT * (seconds - self.stall_seconds)
