"""The policy that never moves anything: what every other is measured against."""

from __future__ import annotations

from ...placement import Placement
from ..types import PlanRequest


def static(request: PlanRequest) -> Placement:
    """The current placement, or experts in logical order where there is none."""
    return request.start
