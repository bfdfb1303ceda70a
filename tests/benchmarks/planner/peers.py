"""Other projects' planners, run beside ours where they are installed or their file is named.

They take tokens per expert and return which expert is in each slot; they differ in where the function lives and in what
its arguments are called, so arguments are given by name.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_runtime.planner.types import PlanError

FUNCTION = "rebalance_experts"
INSTALLED = {"vllm": "vllm.distributed.eplb.policy.default", "sglang": "sglang.srt.eplb.eplb_algorithms.deepseek"}
"""Modules that hold ``rebalance_experts``, as a function or as a method of a class."""

Peer = Callable[[NDArray[np.float64], int, int, int, int], NDArray[np.int32]]
"""(load ``[L, E]``, slots, groups, nodes, ranks) -> ``physical_to_logical`` ``[L, P]``."""


def find_peer(name: str) -> Peer:
    """The planner ``name``: ``"vllm"``, ``"sglang"``, or a Python file with a ``rebalance_experts``, as DeepSeek's.
    PlanError: not installed, no such file, or no such function."""
    module = _from_file(name) if name.endswith(".py") else _installed(name)
    function = _function_of(module, FUNCTION)
    if function is None:
        raise PlanError(f"peer {name}: {module.__name__} has no {FUNCTION}: name a file that has one")
    wanted = inspect.signature(function).parameters

    def peer(load: NDArray[np.float64], slots: int, groups: int, nodes: int, ranks: int) -> NDArray[np.int32]:
        known = _arguments(load, slots, groups, nodes, ranks)
        result = function(**{key: value for key, value in known.items() if key in wanted})
        physical_to_logical = result[0] if isinstance(result, tuple) else result
        return np.asarray(physical_to_logical, dtype=np.int32).reshape(len(load), slots)

    return peer


def _arguments(load: NDArray[np.float64], slots: int, groups: int, nodes: int, ranks: int) -> dict[str, Any]:
    """Every argument name that the known planners use."""
    import torch

    tokens = torch.from_numpy(np.ascontiguousarray(load, dtype=np.float32))
    return {
        "weight": tokens,
        "tokens_per_expert": tokens,
        "num_replicas": slots,
        "num_physical_experts": slots,
        "num_local_physical_experts": slots // ranks,
        "num_groups": groups,
        "num_nodes": nodes,
        "num_gpus": ranks,
        "num_ranks": ranks,
        "enable_hierarchical": groups > 1,
    }


def _installed(name: str) -> ModuleType:
    if name not in INSTALLED:
        raise PlanError(f"peer {name!r} is unknown: give one of {', '.join(INSTALLED)}, or the path of a .py file")
    try:
        return importlib.import_module(INSTALLED[name])
    except ImportError as error:
        raise PlanError(f"peer {name}: {error}: install it, or give the path of its file") from None


def _from_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise PlanError(f"peer {path}: no such file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _function_of(module: ModuleType, name: str) -> Callable[..., Any] | None:
    for holder in (module, *(value for value in vars(module).values() if inspect.isclass(value))):
        function = getattr(holder, name, None)
        if callable(function) and not getattr(function, "__isabstractmethod__", False):
            return function  # type: ignore[no-any-return]
    return None
