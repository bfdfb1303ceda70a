"""The policy that never moves anything: what every other is measured against."""

from __future__ import annotations

from ...placement import Placement
from ..types import PlanError, PlanRequest


def static(request: PlanRequest) -> Placement:
    """The current placement, or experts in logical order where there is none: PlanError, in the free layout."""
    if request.current is None and request.layout == "free":
        raise PlanError("policy 'static' has no free placement to keep: give current=, or layout='home'")
    request.held.update(dict.fromkeys(range(request.num_layers), "static"))
    return request.start
