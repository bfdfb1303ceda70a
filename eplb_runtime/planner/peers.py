"""Other people's planners, to measure beside ours in the same run: installed, or in a file that the user names.

Nothing of theirs is shipped. A planner is a function ``rebalance_experts``, in a module or in a class of it, as in
DeepSeek's EPLB, vLLM and SGLang; its arguments are recognised by their names.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .types import PlanError

ENTRY = "rebalance_experts"
INSTALLED = {
    "vllm": ("vllm.distributed.eplb.policy.default", "vllm.distributed.eplb.rebalance_algo"),
    "sglang": ("sglang.srt.eplb.eplb_algorithms.deepseek", "sglang.srt.managers.eplb_algorithms.deepseek"),
}
"""Where the named engines keep their planner, newest place first."""

PeerPlanner = Callable[[NDArray[np.float64], int, int, int, int], NDArray[np.int64]]
"""(load [L, E], slots P, groups, nodes, ranks R) -> physical_to_logical int64 [L, P]; groups = 1: no group rule."""


def load_peer(name: str) -> tuple[str, PeerPlanner]:
    """A peer's planner and the name to show for it.

    Args:
        name: ``vllm`` or ``sglang``, installed; or the path of a Python file with ``rebalance_experts``.

    Raises:
        PlanError: not installed, no such file, it cannot be imported, or its arguments are not understood.
    """
    if name in INSTALLED:
        return name, _adapt(_import_first(name, INSTALLED[name]), name)
    path = Path(name)
    if not path.is_file():
        known = ", ".join(INSTALLED)
        raise PlanError(f"peer {name!r}: no such file; name a Python file with {ENTRY}(), or one of: {known}")
    return path.stem, _adapt(_import_file(path), name)


def _import_first(name: str, places: tuple[str, ...]) -> types.ModuleType:
    last: ImportError | None = None
    for place in places:
        try:
            return importlib.import_module(place)
        except ImportError as error:
            last = error
    raise PlanError(f"peer {name!r} cannot be imported ({last}): install it, or name its planner's file instead")


def _import_file(path: Path) -> types.ModuleType:
    """Import a file as part of a package that is its folder, so that its relative imports find their files."""
    package = "_eplb_peer_" + path.resolve().parent.as_posix().encode().hex()
    if package not in sys.modules:
        parent = types.ModuleType(package)
        parent.__path__ = [str(path.resolve().parent)]
        sys.modules[package] = parent
    try:
        return importlib.import_module(f"{package}.{path.stem}")
    except Exception as error:  # whatever a foreign file raises while it is imported
        raise PlanError(f"peer {path}: cannot be imported: {type(error).__name__}: {error}") from None


def _adapt(module: types.ModuleType, name: str) -> PeerPlanner:
    function = _entry(module, name)
    parameters = inspect.signature(function).parameters
    required = [key for key, value in parameters.items() if value.default is inspect.Parameter.empty]
    unknown = [key for key in required if key not in _ARGUMENTS]
    if unknown:
        raise PlanError(f"peer {name!r}: its {ENTRY}() wants {', '.join(unknown)}, which is not understood")

    def planner(
        load: NDArray[np.float64], num_slots: int, groups: int, num_nodes: int, num_ranks: int
    ) -> NDArray[np.int64]:
        if groups == 1:
            num_nodes = 1
        values = {key: _ARGUMENTS[key](load, num_slots, groups, num_nodes, num_ranks) for key in required}
        answer = function(**values)
        table = answer[0] if isinstance(answer, tuple) else answer
        return np.asarray(table, dtype=np.int64)

    return planner


def _entry(module: types.ModuleType, name: str) -> Callable[..., Any]:
    holders = [module, *(value for value in vars(module).values() if inspect.isclass(value))]
    for holder in holders:
        function = getattr(holder, ENTRY, None)
        if callable(function) and not getattr(function, "__isabstractmethod__", False):
            return function  # type: ignore[no-any-return]
    raise PlanError(f"peer {name!r}: there is no {ENTRY}() in it, neither in the module nor in a class of it")


def _tensor(load: NDArray[np.float64]) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(load))


_ARGUMENTS: dict[str, Callable[[NDArray[np.float64], int, int, int, int], Any]] = {
    "weight": lambda load, slots, groups, nodes, ranks: _tensor(load),
    "tokens_per_expert": lambda load, slots, groups, nodes, ranks: _tensor(load[None]),
    "num_replicas": lambda load, slots, groups, nodes, ranks: slots,
    "num_physical_experts": lambda load, slots, groups, nodes, ranks: slots,
    "num_local_physical_experts": lambda load, slots, groups, nodes, ranks: slots // ranks,
    "num_groups": lambda load, slots, groups, nodes, ranks: groups,
    "num_nodes": lambda load, slots, groups, nodes, ranks: nodes,
    "num_gpus": lambda load, slots, groups, nodes, ranks: ranks,
    "num_ranks": lambda load, slots, groups, nodes, ranks: ranks,
    "enable_hierarchical": lambda load, slots, groups, nodes, ranks: groups > 1,
}
