"""What the settings of frameworks have in common: refusals, and how equal results are with experts moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Exact = Literal["bit", "rounding"]
EXACT_BY_ITSELF = 2
"""Experts a token: the sum of two results does not depend on their order."""
EXACT_IN_ONE_SUM = 2
"""Ranks that add up gradients of the same experts: the sum of two does not depend on their order."""
STAND_IN = "%s=%s was tested with a stand-in, and not on a GPU yet: prove it by `eplb-runtime verify -- JOB`"


@dataclass(frozen=True)
class Refusal:
    """A setting that cannot be balanced, its value in this job, the reason, and what to write."""

    setting: str
    value: Any
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.why}; {self.instead}"
