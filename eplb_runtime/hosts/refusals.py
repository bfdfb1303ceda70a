"""What frameworks have in common: settings that are refused, and lines on how equal results are with experts moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Exact = Literal["bit", "rounding"]
EXACT_BY_ITSELF = 2
"""Experts a token: the sum of two results does not depend on their order."""
EXACT_IN_ONE_SUM = 2
"""Ranks that add up gradients of the same experts: the sum of two does not depend on their order."""
BY_PLACE = "with experts moved, training is equal to rounding, not to the bit"
NOT_RUN = "%s=%s was tested with a stand-in at best, and not on a GPU yet: prove it by `eplb-runtime verify -- JOB`"


@dataclass(frozen=True)
class Refusal:
    """A setting that cannot be balanced, its value in this job, the reason, and what to write."""

    setting: str
    value: Any
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.why}; {self.instead}"


def sums_of_results(dispatcher: str, top_k: int) -> str:
    """Return the line on a dispatcher that adds up a token's results by place."""
    order = "in an order that depends on where they are"
    return f"{dispatcher} adds up the results of a token's {top_k} experts {order}: {BY_PLACE}"


def sums_of_gradients(ranks: int) -> tuple[str, ...]:
    """Return the line on so many ranks that add up gradients of the same experts; none where that has one order."""
    if ranks <= EXACT_IN_ONE_SUM:
        return ()
    order = "perhaps in an order that follows an expert's place"
    return (f"gradients of experts are added up over {ranks} ranks, {order}: {BY_PLACE}; with at most 2 it is",)
