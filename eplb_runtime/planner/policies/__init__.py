"""Policies: pure functions from a ``PlanRequest`` to a ``Placement``, by name."""

from __future__ import annotations

from collections.abc import Callable

from ...placement import Placement
from ..types import PlanError, PlanRequest
from .deepseek import deepseek
from .free import free
from .incremental import incremental


def static(request: PlanRequest) -> Placement:
    """The current placement, or experts in logical order where there is none: PlanError, in the free layout."""
    if request.current is None and request.layout == "free":
        raise PlanError("policy 'static' has no free placement to keep: give current=, or layout='home'")
    request.held.update(dict.fromkeys(range(request.num_layers), "static"))
    return request.start


POLICIES: dict[str, Callable[[PlanRequest], Placement]] = {
    "static": static,
    "deepseek": deepseek,
    "free": free,
    "hierarchical": free,
    "incremental": incremental,
}
"""Every policy by the name that users give."""

LAYOUTS: dict[str, tuple[str, ...]] = {
    "static": ("home", "free"),
    "deepseek": ("free", "home"),
    "free": ("free",),
    "hierarchical": ("free",),
    "incremental": ("home",),
}
"""The layouts each policy plans; the first is its default."""
