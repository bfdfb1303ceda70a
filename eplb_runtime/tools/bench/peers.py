"""Other projects' planners, run beside ours when the user has them installed or names their file.

They all take tokens per expert and return which expert stands in each slot; they differ in where the function lives
and in what its arguments are called, so arguments are given by name. Nothing of theirs is kept here.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ...planner.search.align import placed_anew
from ...planner.types import PlanError

FUNCTION = "rebalance_experts"
HOMES_FUNCTION = "expert_placement_greedy"
"""MindSpeed's, which spreads experts over ranks without copies: (tokens by expert, ranks) -> (_, experts by rank)."""
FRAMEWORKS = ("megatron", "megatron.training", "megatron.core")
"""What MindSpeed's file imports beside its planner, and the planner does without."""
INSTALLED = {
    "vllm": ("vllm.distributed.eplb.policy.default", "vllm.distributed.eplb.rebalance_algo"),
    "sglang": ("sglang.srt.eplb.eplb_algorithms.deepseek",),
}
"""Modules that hold ``rebalance_experts``, newest first: as a function, or as a method of a class."""

Peer = Callable[[NDArray[np.float64], int, int, int, int], NDArray[np.int32]]
"""(load ``[L, E]``, slots, groups, nodes, ranks) -> ``physical_to_logical`` ``[L, P]``."""


def find_peer(name: str) -> Peer:
    """The planner ``name``: ``"vllm"``, ``"sglang"``, or a Python file with a ``rebalance_experts``, as DeepSeek's, or
    with MindSpeed's ``expert_placement_greedy``.

    Raises:
        PlanError: not installed, no such file, no such function, or one with arguments of unknown meaning.
    """
    module = _from_file(name) if name.endswith(".py") else _installed(name)
    function = _function_of(module, FUNCTION)
    if function is None and (spread := _function_of(module, HOMES_FUNCTION)) is not None:
        return _of_homes(name, spread)
    if function is None:
        raise PlanError(f"peer {name}: {module.__name__} has no {FUNCTION}: name a file that has one")
    unknown = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in _arguments(np.zeros((1, 1)), 1, 1, 1, 1)
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if unknown:
        raise PlanError(f"peer {name}: {FUNCTION} wants {', '.join(unknown)}, whose meaning is not known here")

    def peer(load: NDArray[np.float64], slots: int, groups: int, nodes: int, ranks: int) -> NDArray[np.int32]:
        known = _arguments(load, slots, groups, nodes, ranks)
        wanted = inspect.signature(function).parameters
        try:
            result = function(**{key: value for key, value in known.items() if key in wanted})
        except Exception as error:
            raise PlanError(f"peer {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
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
    for module in INSTALLED[name]:
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise PlanError(f"peer {name}: not installed, or without {FUNCTION}: install it, or give the path of its file")


@contextmanager
def _placeholders(names: Iterable[str]) -> Iterator[None]:
    """Inside, what is not installed of these can be imported all the same; it has nothing that works."""
    added: list[str] = []
    for name in names:
        if name in sys.modules or (not added and importlib.util.find_spec(name) is not None):
            continue
        placeholder = ModuleType(name)
        placeholder.__getattr__ = lambda attribute: None  # type: ignore[method-assign]
        placeholder.__path__ = []
        sys.modules[name] = placeholder
        added.append(name)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def _from_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise PlanError(f"peer {path}: no such file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        with _placeholders(FRAMEWORKS):
            spec.loader.exec_module(module)
    except Exception as error:
        raise PlanError(f"peer {path}: cannot be imported: {' '.join(str(error).split())[:200]}") from None
    return module


def as_placement(physical_to_logical: NDArray[np.int32], experts: int, ranks: int) -> Placement:
    """What a peer planned: slots all in use, or homes alone in the first slots of each rank."""
    slots_LRS = physical_to_logical.reshape(len(physical_to_logical), ranks, -1)
    if (slots_LRS != EMPTY).all():
        return Placement(physical_to_logical, experts, ranks)
    homes = experts // ranks
    home_rank_LE = np.empty((len(slots_LRS), experts), dtype=np.int32)
    rank_RH = np.repeat(np.arange(ranks, dtype=np.int32), homes)
    np.put_along_axis(
        home_rank_LE,
        slots_LRS[:, :, :homes].reshape(len(slots_LRS), -1),
        np.broadcast_to(rank_RH, home_rank_LE.shape),
        axis=1,
    )
    return placed_anew(home_rank_LE, slots_LRS[:, :, homes:])


def _of_homes(name: str, spread: Callable[..., Any]) -> Peer:
    """A planner without copies: replica slots stay empty."""

    def peer(load: NDArray[np.float64], slots: int, groups: int, nodes: int, ranks: int) -> NDArray[np.int32]:
        experts = load.shape[1]
        if experts % ranks:
            raise PlanError(f"peer {name}: it spreads {experts} experts evenly, which {ranks} ranks do not divide")
        planned = np.full((len(load), ranks, slots // ranks), EMPTY, dtype=np.int32)
        for layer, load_E in enumerate(load):
            _, by_rank = spread(dict(enumerate(load_E.tolist())), list(range(ranks)))
            planned[layer, :, : experts // ranks] = [by_rank[rank] for rank in range(ranks)]
        return planned.reshape(len(load), slots)

    return peer


def _function_of(module: ModuleType, name: str) -> Callable[..., Any] | None:
    holders: Iterable[Any] = [module, *(value for value in vars(module).values() if inspect.isclass(value))]
    for holder in holders:
        function = getattr(holder, name, None)
        if callable(function) and not getattr(function, "__isabstractmethod__", False):
            return function  # type: ignore[no-any-return]
    return None
