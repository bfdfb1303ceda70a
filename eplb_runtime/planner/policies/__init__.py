"""Policies: pure functions from a ``PlanRequest`` to the placements they offer, by name."""

from __future__ import annotations

from collections.abc import Callable

from ...placement import Placement
from ..types import PlanRequest
from .deepseek import deepseek
from .free import free
from .hierarchical import hierarchical
from .incremental import incremental
from .static import static

Policy = Callable[[PlanRequest], tuple[Placement, ...]]
"""Returns at most ``MOST_OFFERS`` placements by slots moved: first the current one, where there is one, last the best
that it knows; all within the budgets."""

POLICIES: dict[str, Policy] = {
    "static": static,
    "deepseek": deepseek,
    "free": free,
    "hierarchical": hierarchical,
    "incremental": incremental,
}
"""Every policy by the name that users give."""

LAYOUTS: dict[str, tuple[str, ...]] = {
    "static": ("home", "free"),
    "deepseek": ("free",),
    "free": ("free",),
    "hierarchical": ("free",),
    "incremental": ("home",),
}
"""The layouts each policy plans; the first is its default."""

OPTIONS: dict[str, tuple[str, ...]] = {"hierarchical": ("spilled_experts", "global_above")}
"""What ``options`` may hold, by policy."""
