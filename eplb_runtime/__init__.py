"""Expert-parallel load balancing for MoE training: the public names, nothing else."""

from .balancer import Balancer
from .checkpoint import logical_state_dict
from .config import BalancerConfig
from .hosts import attach
from .placement import Placement
from .planner import Plan, plan
from .topology import Topology

__all__ = ["Balancer", "BalancerConfig", "Placement", "Plan", "Topology", "attach", "logical_state_dict", "plan"]
