"""The policy that never moves anything: what every other is measured against."""

from __future__ import annotations

from ...placement import Placement
from ..types import PlanError, PlanRequest


def static(request: PlanRequest) -> Placement:
    """The current placement, or experts in logical order where there is none (``home`` layout).

    Raises:
        PlanError: the free layout without a current placement.
    """
    if request.current is None and request.layout == "free":
        raise PlanError("policy 'static' has no free placement to keep: give current=, or layout='home'")
    return request.start
