"""Makes an optimizer anew for other tensors: the same class, options and numbers, and nothing of the one it is like.

What the first one has in objects of its own, in tensors of several elements or in closures is not handed over: the new
one could write the first one's memory. What comes of that shows where both step.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...utils.errors import one_line

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum, type, np.generic)
_CONTAINERS = (list, tuple, set, frozenset, deque)
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


def is_plain(value: Any) -> bool:
    """Whether it can be handed over: a number or the like, a tensor of one element, a collection of such."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, Tensor):
        return value.numel() <= 1
    if isinstance(value, Mapping):
        return all(is_plain(key) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, _CONTAINERS):
        return all(map(is_plain, value))
    # A closure may hold anything, also the optimizer itself.
    return isinstance(value, BuiltinFunctionType | FunctionType) and not getattr(value, "__closure__", None)


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
