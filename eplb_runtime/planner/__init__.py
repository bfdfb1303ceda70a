"""Decide which expert is in which slot: functions of (load, topology, current placement, budgets) to a ``Plan``."""

from .api import plan
from .cost import CostModel
from .drop_in import rebalance_experts
from .types import Plan, PlanError, PlanRequest

__all__ = ["CostModel", "Plan", "PlanError", "PlanRequest", "plan", "rebalance_experts"]
