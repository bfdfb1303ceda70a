"""How long a step takes, for the gate's prediction of what a better balance saves."""

from __future__ import annotations

import time


class StepClock:
    """Smoothed seconds of a step, without the pauses that rebalancing made itself."""

    WEIGHT = 0.2
    DEFAULT_STALL_SECONDS = 0.01

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.stall_seconds = self.DEFAULT_STALL_SECONDS
        self._last: float | None = None
        self._excluded = 0.0

    def tick(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            seconds = now - self._last - self._excluded
            self.step_seconds += (self.WEIGHT if self.step_seconds else 1.0) * (seconds - self.step_seconds)
        self._last, self._excluded = now, 0.0

    def exclude(self, seconds: float) -> None:
        self._excluded += seconds
