"""Decide which expert stands where: pure functions of (load, topology, current placement, budgets) to a ``Plan``."""

from .cost import CostModel
from .drop_in import rebalance_experts
from .planning import plan
from .types import Offer, Plan, PlanError, PlanRequest

__all__ = ["CostModel", "Offer", "Plan", "PlanError", "PlanRequest", "plan", "rebalance_experts"]
