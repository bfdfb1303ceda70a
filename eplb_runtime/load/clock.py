"""How long a step takes, and what a rebalance costs besides its bytes: for the gate's prediction of what pays."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far training is: step, smoothed seconds of one, and seconds since the last one ended."""

    step: int
    step_seconds: float
    idle_seconds: float


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
        self._has_begun = False

    def tick(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            seconds = now - self._last - self._excluded
            self.step_seconds += (self.WEIGHT if self.step_seconds else 1.0) * (seconds - self.step_seconds)
        self._last, self._excluded, self._has_begun = now, 0.0, False

    def begin(self) -> bool:
        """Begin a step here, unless it has begun; returns whether it begins here. What came since the last one ended is
        no part."""
        if self._has_begun:
            return False
        self._has_begun = True
        if self._last is not None:
            self._excluded = time.perf_counter() - self._last
        return True

    def progress(self, step: int) -> Progress:
        """On any thread."""
        last = self._last
        return Progress(step, self.step_seconds, 0.0 if last is None else time.perf_counter() - last)

    def exclude(self, seconds: float) -> None:
        """This pause since the last tick is no part of a step."""
        self._excluded += seconds

    def stalled(self, seconds: float) -> None:
        """A migration was carried out and took so long besides its bytes."""
        self.stall_seconds += self.STALL_WEIGHT * (seconds - self.stall_seconds)
