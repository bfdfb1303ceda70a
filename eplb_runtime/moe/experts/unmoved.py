"""Finds what an optimizer keeps by row of experts in places from which it could not move with them.

What `expert_state` finds moves. Here is the rest that can be seen: tensors inside of objects, arrays, numbers for each
expert, attributes of the optimizer, another optimizer inside. What is registered (`Balancer.register`) moves as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .made_anew import OF_TORCH
from .optimizer_state import OptimizerStateError, is_per_expert

_DEEP = 4
"""Containers and objects inside of others that are looked into."""
_MOST = 10_000
"""Values that are looked at in one attribute."""
_NOT_LOOKED_INTO = (str, bytes, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module)
_STAYS = "which would stay behind when experts move"


@dataclass(frozen=True)
class Unmoved:
    """One thing that goes by row.

    Args:
        said: on one line, what it is and what to do; empty: it is registered, and moves.
        may_be_registered: whether it is a tensor that `Balancer.register` takes.
    """

    said: str
    may_be_registered: bool = False


def unmoved(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], registered: Collection[int] = ()
) -> Iterator[Unmoved]:
    """Everything that is seen.

    Args:
        parameters: experts ``[E/R, ...]`` that it steps, by name.
        registered: addresses of memory that moves as well.
    """
    kind = type(optimizer).__name__
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            try:
                is_per_expert(str(key), value, parameter, registered)
            except OptimizerStateError as error:
                yield Unmoved(f"{kind}, {name}: {error}")
                continue
            if what := _what_it_is(value, parameter, registered):
                yield Unmoved(
                    f"{kind} keeps {key!r} of {name} as {what}, {_STAYS}: keep it in a tensor under a key of its own, "
                    "with a row for each expert"
                )
    shapes = {tuple(parameter.shape): name for name, parameter in reversed(list(parameters.items()))}
    names = {id(parameter): name for name, parameter in parameters.items()}
    keys = {id(parameter): parameter for parameter in parameters.values()}
    for path, value in _attributes(optimizer):
        for place, inner, owner in _inside(path, value, keys):
            if isinstance(inner, Tensor | np.ndarray):
                name = shapes.get(tuple(inner.shape), "")
                if not name or id(inner) in keys:
                    continue
                name = names.get(id(owner), name)
                if _is_among(inner, registered):
                    yield Unmoved("")
                else:
                    yield Unmoved(
                        f"{kind}.{place} goes by row, as {name}, {_STAYS}: keep it in the optimizer's state, or let it "
                        "move by balancer.register(parameter, name, tensor)",
                        may_be_registered=True,
                    )
            elif isinstance(inner, torch.optim.Optimizer):
                if (whose := _of_its_own(inner, optimizer, parameters)) is not None:
                    yield Unmoved(
                        f"{kind}.{place} is a {type(inner).__name__} with a state of its own{whose}, {_STAYS}: use an "
                        "optimizer that keeps all in its own state"
                    )
            elif owner is not None and _is_number_for_each(inner, owner):
                yield Unmoved(
                    f"{kind}.{place} has a number for each expert, {_STAYS}: keep them in a tensor in the optimizer's "
                    "state, with a row for each expert"
                )


def _what_it_is(value: Any, parameter: Tensor, registered: Collection[int]) -> str:
    """State of one parameter in words, if it has rows that no tensor of its own holds; else empty."""
    if isinstance(value, Tensor):
        return ""
    for _, inner, _ in _inside("", value, {}):
        if isinstance(inner, np.ndarray) and inner.size > 1 and not _is_among(inner, registered):
            return "an array"
        if isinstance(inner, Tensor) and inner.numel() > 1 and not _is_among(inner, registered):
            return f"a {type(value).__name__} that holds tensors"
        if _is_number_for_each(inner, parameter):
            return "a number for each expert"
    return ""


def _of_its_own(
    inner: torch.optim.Optimizer, outer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> str | None:
    """Whose, in words, if an optimizer inside of another has a state that the other has not; else None."""
    if inner is outer or inner.state is outer.state:
        return None
    held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        state = inner.state.get(parameter)
        if id(parameter) in held and (state is None or state is not outer.state.get(parameter)):
            return f" for {name}"
    return None


def _is_number_for_each(value: Any, parameter: Tensor) -> bool:
    """A pair of coefficients is a tuple, into which nobody writes."""
    if isinstance(value, Mapping):
        return all(type(key) is int for key in value) and _is_number_for_each(list(value.values()), parameter)
    if not isinstance(value, list | deque) or len(value) < 2 or len(value) != len(parameter):
        return False
    return all(type(one) in (int, float) for one in value)


def _is_among(one: Tensor | NDArray[Any], registered: Collection[int]) -> bool:
    return (one.data_ptr() if isinstance(one, Tensor) else one.__array_interface__["data"][0]) in registered


def _attributes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Those that torch's own optimizers do not have, and the options of groups."""
    yield from ((name, value) for name, value in vars(optimizer).items() if name not in OF_TORCH)
    for number, group in enumerate(optimizer.param_groups):
        yield from ((f"param_groups[{number}][{key!r}]", value) for key, value in group.items() if key != "params")


def _inside(path: str, value: Any, keys: Mapping[int, Tensor]) -> Iterator[tuple[str, Any, Tensor | None]]:
    """What can be reached from a value, how, and the parameter under which it is kept there, if any."""
    seen: set[int] = set()
    level: Sequence[tuple[str, Any, Tensor | None]] = [(path, value, None)]
    for _ in range(_DEEP):
        below: list[tuple[str, Any, Tensor | None]] = []
        for place, one, owner in level:
            if id(one) in seen or len(seen) > _MOST:
                continue
            seen.add(id(one))
            yield place, one, owner
            below += ((place + step, inner, by if by is not None else owner) for step, inner, by in _in(one, keys))
        level = below


def _in(value: Any, keys: Mapping[int, Tensor]) -> Iterator[tuple[str, Any, Tensor | None]]:
    """One step further."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            step = f"[{key!r}]" if isinstance(key, str | int) else "[...]"
            yield step, inner, keys.get(key if isinstance(key, int) else id(key))
    elif isinstance(value, list | tuple | deque | set):
        yield from ((f"[{number}]", inner, None) for number, inner in enumerate(value))
    elif not isinstance(value, (Tensor, np.ndarray, torch.optim.Optimizer, *_NOT_LOOKED_INTO)):
        yield from ((f".{name}", inner, None) for name, inner in getattr(value, "__dict__", {}).items())
