"""Makes an optimizer anew for other tensors: the same class, options and numbers, and nothing of the one it is like.

What the first one has in tensors of several elements, and in objects and closures that hold or write more than numbers,
is not handed over: the new one could write the first one's memory. What comes of that shows where both step.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from dis import get_instructions
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...utils.errors import one_line

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum, type, np.generic)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_DEEP = 6
"""Collections and objects inside of others that are looked into."""
_HEAP = 1 << 9
"""Of ``type.__flags__``: made by Python code."""
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
OF_TORCH = frozenset(("param_groups", "state", "defaults", "step", *_HOOKS))
"""Attributes that are never handed over; ``step`` is one where a scheduler has put its own in place."""
_BY_DEVICE = ("fused", "capturable", "foreach")
"""Options that constructors check against the tensors; they are set afterwards."""

Group = tuple[Mapping[str, Any], Sequence[Tensor]]
"""A param group and the tensors that are in the place of its parameters."""


@dataclass(frozen=True)
class Made:
    """An optimizer that was made anew.

    Args:
        why_not_whole: why its constructor did not make it, and it may lack something; empty: it did.
    """

    optimizer: torch.optim.Optimizer
    why_not_whole: str = ""


def made_anew(optimizer: torch.optim.Optimizer, groups: Sequence[Group], device: torch.device | None = None) -> Made:
    """An optimizer of the same class, with the options that these groups have now and without state.

    It is made by its constructor, from its defaults; where that needs more, or makes other groups, by its attributes
    alone, as far as these are numbers and the like.

    Args:
        device: another one, that of the tensors; options of how to compute on a device are left out then.
    """
    made, why = _by_constructor(optimizer, groups, device)
    if made is None:
        made = _by_attributes(optimizer, groups)
    for name, value in vars(optimizer).items():
        if name not in OF_TORCH and is_plain(value):
            made.__dict__[name] = copied(value, device)
    for own, (options, _) in zip(made.param_groups, groups, strict=True):
        for key, value in options.items():
            if key != "params" and is_plain(value) and (device is None or key not in _BY_DEVICE):
                own[key] = copied(value, device)
    return Made(made, why)


def _by_constructor(
    optimizer: torch.optim.Optimizer, groups: Sequence[Group], device: torch.device | None
) -> tuple[torch.optim.Optimizer | None, str]:
    """None: why it cannot be made so."""
    kind, why = type(optimizer), "its constructor makes something else"
    accepted = inspect.signature(kind.__init__).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    options = {
        name: copied(value, device)
        for name, value in optimizer.defaults.items()
        if (anything or name in accepted) and name not in _BY_DEVICE and is_plain(value)
    }
    # Some constructors ask their groups for options, others refuse any that they do not know.
    whole = [{**_options(group, optimizer.defaults), "params": list(tensors)} for group, tensors in groups]
    bare: list[dict[str, Any]] = [{"params": list(tensors)} for _, tensors in groups]
    for given in (whole, bare):
        try:
            made = kind(given, **options)
        except Exception as error:
            why = one_line(error)
            continue
        if isinstance(made, torch.optim.Optimizer) and _ids(made.param_groups) == _ids(bare):
            return made, ""
    return None, why


def _options(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a user gave, or that are as at the start."""
    return {
        key: copied(value)
        for key, value in group.items()
        if key != "params" and key not in _BY_DEVICE and key in defaults and is_plain(value)
    } | {key: value for key, value in group.items() if type(value) is bool and key not in _BY_DEVICE}


def _ids(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [[id(tensor) for tensor in group["params"]] for group in groups]


def _by_attributes(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    made.__dict__.update({name: OrderedDict() for name in _HOOKS})
    made.__dict__.update(
        defaults=dict(optimizer.defaults),
        state=defaultdict(dict),
        param_groups=[{"params": list(tensors)} for _, tensors in groups],
    )
    return made


def step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Its step without hooks, which are of whoever trains, and without what a scheduler has put in its place."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step.__get__(optimizer)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Arguments:
    """Of a call of an optimizer's step, which may take more than a closure, or something else in its place.

    Args:
        positional: after the optimizer.
    """

    positional: Sequence[Any] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    @property
    def closure(self) -> Callable[[], Any] | None:
        """None: there is none."""
        first = self.named.get("closure", self.positional[0] if self.positional else None)
        return first if callable(first) else None

    @property
    def others(self) -> list[Any]:
        """All but the closure."""
        closure = self.closure
        return [value for value in (*self.positional, *self.named.values()) if value is not closure]

    def with_closure(self, closure: Callable[[], Any]) -> Arguments:
        """The same with another closure, where one is."""
        if "closure" in self.named:
            return Arguments(self.positional, {**self.named, "closure": closure})
        return Arguments((closure, *self.positional[1:]), self.named)

    def copied(self) -> Arguments:
        """The same, plain values, in memory of their own."""
        closure = self.closure
        return Arguments(
            [value if value is closure else copied(value) for value in self.positional],
            {name: value if value is closure else copied(value) for name, value in self.named.items()},
        )


def needs_more_than_a_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step asks for something that nobody but its user knows."""
    try:
        parameters = list(inspect.signature(step_of(optimizer)).parameters.values())
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    asked = [one.name for one in parameters if one.default is inspect.Parameter.empty and one.kind not in kinds]
    return any(name != "closure" for name in asked)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether it can be handed over: a number or the like, a tensor of one element, a function of such, a collection of
    such, an object that has nothing else."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, Tensor):
        return value.numel() <= 1
    if depth == _DEEP:
        return False
    inside = partial(is_plain, depth=depth + 1)
    if isinstance(value, Mapping):
        return all(inside(key) and inside(inner) for key, inner in value.items())
    if isinstance(value, _CONTAINERS):
        return all(map(inside, value))
    if isinstance(value, partial):
        return inside(value.func) and inside(value.args) and inside(value.keywords)
    if isinstance(value, BuiltinFunctionType | FunctionType):
        return _keeps_nothing(value)
    return _is_record(value) and inside(vars(value))


def _keeps_nothing(function: Any) -> bool:
    """Whether calls of it leave nothing in it: it is handed over as it is. A closure may hold anything, also the
    optimizer itself, and may be written."""
    if isinstance(function, BuiltinFunctionType):  # also a method of a list
        return isinstance(function.__self__, ModuleType | type | NoneType)
    cells = function.__closure__ or ()
    free = function.__code__.co_freevars
    if any(one.opname in ("STORE_DEREF", "DELETE_DEREF") and one.argval in free for one in get_instructions(function)):
        return False
    try:
        return all(_is_constant(cell.cell_contents) for cell in cells)
    except ValueError:  # an empty one
        return False


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, _PLAIN)


def _is_record(value: Any) -> bool:
    """Whether all that an object has is in its ``__dict__``: its classes are Python's own, without slots."""
    kinds = type(value).__mro__[:-1]
    return hasattr(value, "__dict__") and all(
        kind.__flags__ & _HEAP and "__slots__" not in vars(kind) for kind in kinds
    )


def copied(value: Any, device: torch.device | None = None) -> Any:
    """A plain value that shares no memory with this one; on another device, if one is given."""
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, Mapping):
        made = {key: copied(inner, device) for key, inner in value.items()}
        return defaultdict(value.default_factory, made) if isinstance(value, defaultdict) else made
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(copied(inner, device) for inner in value)
    if isinstance(value, deque):
        return deque((copied(inner, device) for inner in value), value.maxlen)
    if isinstance(value, partial):
        return partial(value.func, *copied(value.args, device), **copied(value.keywords, device))
    if not isinstance(value, (*_PLAIN, FunctionType)) and _is_record(value):
        made = object.__new__(type(value))
        made.__dict__.update(copied(vars(value), device))
        return made
    return value


class _Quiet:
    """Takes in what one thread prints."""

    def __init__(self, before: Any) -> None:
        self._before, self._thread = before, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else int(self._before.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)


@contextmanager
def unnoticed(devices: Sequence[int]) -> Iterator[None]:
    """Inside, random numbers are drawn that others will draw again, and nothing is printed.

    Args:
        devices: GPUs whose generators are used.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    before = sys.stdout
    sys.stdout = _Quiet(before)
    try:
        with torch.random.fork_rng(devices, enabled=True):
            yield
    finally:
        if isinstance(sys.stdout, _Quiet):
            sys.stdout = before
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
