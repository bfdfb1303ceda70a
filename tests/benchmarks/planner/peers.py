"""Other projects' planners, run beside ours where they are installed or their file is named.

They take tokens per expert and return which expert is in each slot; they differ in where the function lives and in what
its arguments are called, so arguments are given by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.planner.types import PlanError

FUNCTION = "rebalance_experts"
HOMES_FUNCTION = "expert_placement_greedy"
"""MindSpeed's, which spreads experts over ranks without copies: (tokens by expert, ranks) -> (_, experts by rank)."""
FRAMEWORKS = ("megatron", "megatron.training", "megatron.core")
"""Modules that MindSpeed's file imports and its planner does without."""
INSTALLED = {"vllm": "vllm.distributed.eplb.policy.default", "sglang": "sglang.srt.eplb.eplb_algorithms.deepseek"}
"""Modules that hold ``rebalance_experts``, as a function or as a method of a class."""

Peer = Callable[[NDArray[np.float64], int, int, int, int], NDArray[np.int32]]
"""(load ``[L, E]``, slots, groups, nodes, ranks) -> ``physical_to_logical`` ``[L, P]``."""


def find_peer(name: str) -> Peer:
    """The planner ``name``: ``"vllm"``, ``"sglang"``, or a Python file with a ``rebalance_experts``, as DeepSeek's, or
    with MindSpeed's ``expert_placement_greedy``.

    Raises:
        PlanError: not installed, no such file, or no such function.
    """
    module = _from_file(name) if name.endswith(".py") else _installed(name)
    function = _function_of(module, FUNCTION)
    if function is None and (spread := _function_of(module, HOMES_FUNCTION)) is not None:
        return _of_homes(spread)
    if function is None:
        raise PlanError(f"peer {name}: {module.__name__} has no {FUNCTION}: name a file that has one")
    wanted = inspect.signature(function).parameters

    def peer(load: NDArray[np.float64], slots: int, groups: int, nodes: int, ranks: int) -> NDArray[np.int32]:
        known = _arguments(load, slots, groups, nodes, ranks)
        result = function(**{key: value for key, value in known.items() if key in wanted})
        physical_to_logical = result[0] if isinstance(result, tuple) else result
        return np.asarray(physical_to_logical, dtype=np.int32).reshape(len(load), slots)

    return peer


def as_placement(physical_to_logical: NDArray[np.int32], experts: int, ranks: int) -> Placement:
    """A peer's plan: slots all in use, or homes alone in the first slots of each rank."""
    if (physical_to_logical != EMPTY).all():
        return Placement(physical_to_logical, experts, ranks)
    layers = len(physical_to_logical)
    home = np.empty((layers, experts), dtype=np.int32)
    layer, slot = np.nonzero(physical_to_logical != EMPTY)
    home[layer, physical_to_logical[layer, slot]] = slot
    return Placement(physical_to_logical, experts, ranks, home)


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
    missing = FRAMEWORKS if importlib.util.find_spec(FRAMEWORKS[0]) is None else ()
    with patch.dict(sys.modules, {name: _placeholder(name) for name in missing}):
        spec.loader.exec_module(module)
    return module


def _placeholder(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__getattr__ = lambda attribute: None  # type: ignore[method-assign]
    module.__path__ = []
    return module


def _of_homes(spread: Callable[..., Any]) -> Peer:
    """A planner without copies: replica slots stay empty."""

    def peer(load: NDArray[np.float64], slots: int, groups: int, nodes: int, ranks: int) -> NDArray[np.int32]:
        homes = load.shape[1] // ranks
        planned = np.full((len(load), ranks, slots // ranks), EMPTY, dtype=np.int32)
        for layer, load_E in enumerate(load):
            _, by_rank = spread(dict(enumerate(load_E.tolist())), list(range(ranks)))
            planned[layer, :, :homes] = [by_rank[rank] for rank in range(ranks)]
        return planned.reshape(len(load), slots)

    return peer


def _function_of(module: ModuleType, name: str) -> Callable[..., Any] | None:
    for holder in (module, *(value for value in vars(module).values() if inspect.isclass(value))):
        function = getattr(holder, name, None)
        if callable(function) and not getattr(function, "__isabstractmethod__", False):
            return function  # type: ignore[no-any-return]
    return None
