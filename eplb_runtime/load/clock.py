"""How long a step takes, and what a rebalance costs on top of its bytes: for the gate's prediction of what pays."""

from __future__ import annotations

import time
from dataclasses import dataclass

WEIGHT, STALL_WEIGHT = 0.2, 0.5
"""Of the newest in the smoothed seconds of a step, and of a rebalance's fixed part."""


@dataclass(frozen=True)
class Progress:
    """How far training is: step, smoothed seconds of one, and seconds since the last one ended."""

    step: int
    step_seconds: float
    idle_seconds: float


class StepClock:
    """Smoothed seconds of a step, without the pauses that rebalancing made itself, and of a rebalance's fixed part.

    Attributes:
        step_seconds: of a training step; 0 before the second one.
        stall_seconds: what a migration takes on top of carrying, checking and copying experts.
    """

    def __init__(self, stall_seconds: float) -> None:
        self.step_seconds, self.stall_seconds = 0.0, stall_seconds
        self._last: float | None = None
        self._excluded = 0.0
        self._has_begun = False

    def tick(self) -> None:
        """End a step."""
        now = time.perf_counter()
        if self._last is not None:
            seconds = now - self._last - self._excluded
            self.step_seconds += (WEIGHT if self.step_seconds else 1.0) * (seconds - self.step_seconds)
        self._last, self._excluded, self._has_begun = now, 0.0, False

    def begin(self) -> bool:
        """Begin a step here, unless it has begun; returns whether it begins here. What came since the last one ended is
        no part."""
        begins, self._has_begun = not self._has_begun, True
        if begins and self._last is not None:
            self._excluded = time.perf_counter() - self._last
        return begins

    def progress(self, step: int) -> Progress:
        """Return the progress at a step; on any thread."""
        last = self._last
        return Progress(step, self.step_seconds, 0.0 if last is None else time.perf_counter() - last)

    def exclude(self, seconds: float) -> None:
        """Leave a pause since the last tick out of the step."""
        self._excluded += seconds

    def stalled(self, seconds: float) -> None:
        """Note what a migration took on top of its bytes."""
        self.stall_seconds += STALL_WEIGHT * (seconds - self.stall_seconds)
