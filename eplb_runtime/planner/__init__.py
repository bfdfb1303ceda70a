"""Decide which expert stands where: pure functions of (load, topology, current placement, budgets) to a ``Plan``."""

from .cost import CostModel
from .planning import plan
from .types import Plan, PlanError, PlanRequest

__all__ = ["CostModel", "Plan", "PlanError", "PlanRequest", "plan"]
