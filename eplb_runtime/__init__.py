"""Expert-parallel load balancing for MoE training: the public names, nothing else.

Each name is imported when first used, so that the command line and the planner don't wait for torch.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from .balancer.balancer import Balancer as Balancer
    from .balancer.balancer import GradScaler as GradScaler
    from .checkpoint import load_logical_state_dict as load_logical_state_dict
    from .checkpoint import logical_state_dict as logical_state_dict
    from .config import BalancerConfig as BalancerConfig
    from .config import DispatchConfig as DispatchConfig
    from .config import MigrationConfig as MigrationConfig
    from .hosts import MoE as MoE
    from .hosts import attach as attach
    from .hosts import shard_experts as shard_experts
    from .hosts import stack_experts as stack_experts
    from .hosts.recording import record as record
    from .hosts.trainer import BalancedTrainer as BalancedTrainer
    from .placement import Placement as Placement
    from .planner import Plan as Plan
    from .planner import plan as plan
    from .planner import rebalance_experts as rebalance_experts
    from .tools.verification import verify as verify
    from .topology import Topology as Topology

__version__ = "0.1.0"

_ROOM_OF = {
    "BalancedTrainer": "hosts.trainer",
    "Balancer": "balancer.balancer",
    "GradScaler": "balancer.balancer",
    "Placement": "placement",
    "Topology": "topology",
    "record": "hosts.recording",
    "verify": "tools.verification",
    **dict.fromkeys(("BalancerConfig", "DispatchConfig", "MigrationConfig"), "config"),
    **dict.fromkeys(("MoE", "attach", "shard_experts", "stack_experts"), "hosts"),
    **dict.fromkeys(("load_logical_state_dict", "logical_state_dict"), "checkpoint"),
    **dict.fromkeys(("Plan", "plan", "rebalance_experts"), "planner"),
}
__all__ = sorted(_ROOM_OF)


def _find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
    """Add ``ep_implementation="eplb"`` to Transformers' registry when that is imported, which is left to others."""
    spec = PathFinder.find_spec(name, path, target) if name == _REGISTRY else None
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module = partial(_register, spec.loader.exec_module)  # type: ignore[method-assign]
    return spec


def _register(execute: Callable[[ModuleType], object], registry: ModuleType) -> None:
    execute(registry)

    def expert_parallel(*of_layer: Any) -> Any:
        return import_module(f"{__name__}.hosts.transformers.expert_parallel").BalancedEP(*of_layer)

    if (interface := getattr(registry, "EPImplementationInterface", None)) is not None:  # else of another version
        interface.register("eplb", expert_parallel)


_REGISTRY = "transformers.distributed.expert_parallel"
if _REGISTRY in sys.modules:
    _register(bool, sys.modules[_REGISTRY])
sys.meta_path.insert(0, SimpleNamespace(find_spec=_find_spec))  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return import_module(f"{__name__}.checkpoint")
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
