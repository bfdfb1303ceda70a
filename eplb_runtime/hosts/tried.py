"""Tries the experts of a list: one module is about to compute them all, and each must give what that one gives.

Settings can be compared where they are plain values under known names; where else they may be (a private name, a dict,
a partial, a lambda's default, a rebound ``forward``) only the results tell. A few rows go through each expert, once
with its own weights and once with made-up ones (zeros at the start hide everything behind them).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

_SCALES = (0.01, 1.0, 30.0, 1000.0)
"""Of the rows: limits and the ends of activations show at large ones."""
_SEED = 20
_ROUNDING = 16
"""Units in the last place by which one code may differ from itself, where memory lies otherwise."""
_DEPTH = 6
"""Of values inside values that are looked at for the name of a difference."""

Given = tuple[Tensor | None, ...] | str
"""What a call gave: its result and gradients, or how it failed."""


def why_not_alike(name: str, experts: Sequence[nn.Module], template: nn.Module) -> str:
    """Empty if each expert gives for a few rows what ``template`` gives with that expert's weights; else one line.

    Experts are as they were afterwards: modes, generators of random numbers, attributes that a forward sets, gradients.

    Args:
        name: of the list.
        template: computes every expert from now on, by `torch.func.functional_call`.
    """
    first = experts[0]
    device = next(first.parameters()).device
    on_meta = device.type == "meta"
    with _as_they_were([*experts, template], device):
        made = {key: _made_up(tensor) for key, tensor in first.named_parameters()}
        rows = _rows(first, made)
        if rows is None:
            return _why_settings_differ(name, experts)
        way = partial(_gives, rows=rows)
        trained, evaluated = (way(template, made, training=training) for training in (True, False))
        for number, expert in enumerate(experts):
            alike = _same(way(expert, made, training=True), trained, partial(way, expert, made, training=True))
            alike &= _same(way(expert, made, training=False), evaluated, partial(way, expert, made, training=False))
            if alike and not on_meta:
                own = partial(way, expert, None, training=False)
                alike = _same(own(), way(template, dict(expert.named_parameters()), training=False), own)
            if not alike:
                return _said(f"{name}.{number}", f"{name}.0", _difference(expert, first))
    return ""


def _said(name: str, first_name: str, where: str) -> str:
    by = f"{first_name} gives with the weights of {name}" if name != first_name else "a copy of it gives"
    return (
        f"{name} gives other results for the same rows than {by}"
        + (f" ({where})" if where else "")
        + ", and one of them computes all once they are stacked: make them equal, or keep tensors [E, ...] and say by "
        "MoE(..., compute=) how rows run through them"
    )


def _why_settings_differ(name: str, experts: Sequence[nn.Module]) -> str:
    """For experts that cannot be tried: nobody has shown that a setting is without effect."""
    for number, expert in enumerate(experts):
        where = _difference(expert, experts[0])
        if where:
            return (
                f"{name}.{number} does not compute as {name}.0 does ({where}), as far as can be told without calling "
                "it with rows [M, D], and one of them computes all once they are stacked: make them equal, or keep "
                "tensors [E, ...] and say by MoE(..., compute=) how rows run through them"
            )
    return ""


# -- calling -----------------------------------------------------------------------------------------------------------


@contextmanager
def _as_they_were(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """What is called inside leaves no trace in modules and generators."""
    attributes = [(module, dict(vars(module))) for one in modules for module in one.modules()]
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002  # experts may draw from it
    devices = [device] if device.type not in ("cpu", "meta") else []
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)


def _made_up(tensor: Tensor) -> Tensor:
    """Values of the size that weights have; of whole numbers its own."""
    if not tensor.is_floating_point():
        return tensor.detach()
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    scale = tensor.shape[-1] ** -0.5 if tensor.ndim else 1.0
    generator = torch.Generator().manual_seed(_SEED)
    made = torch.rand(tensor.shape, generator=generator).sub_(0.4).mul_(2 * scale)
    return made.to(device, tensor.dtype).requires_grad_(tensor.requires_grad)


def _rows(expert: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """``[M, D]`` that the expert takes and gives; None: nothing was found that it takes."""
    like = next((tensor for tensor in tensors.values() if tensor.is_floating_point()), None)
    if like is None:
        return None
    sizes = [size for tensor in tensors.values() for size in reversed(tensor.shape)]
    sizes += [
        one * other
        for tensor in tensors.values()
        for one, other in zip(tensor.shape[:-1], tensor.shape[1:], strict=True)
    ]
    sizes += [value for module in expert.modules() for value in vars(module).values() if type(value) is int]
    generator = torch.Generator().manual_seed(_SEED)
    scales = torch.tensor(_SCALES).unsqueeze(1)
    for width in dict.fromkeys(size for size in [*sizes, 8] if 0 < size <= 2**20):
        rows = (torch.randn(len(_SCALES), width, generator=generator) * scales).to(like.device, like.dtype)
        given = _gives(expert, tensors, rows=rows, training=False)
        if not isinstance(given, str) and given[0] is not None and given[0].shape == rows.shape:
            return rows
    return None


def _gives(module: nn.Module, tensors: Mapping[str, Tensor] | None, *, rows: Tensor, training: bool) -> Given:
    """What one call gives, in training with gradients of rows and weights.

    Args:
        tensors: in the place of the module's own; None: these.
    """
    module.train(training)
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)  # noqa: NPY002
    rows = rows.clone().requires_grad_(training)
    own = dict(module.named_parameters()) if tensors is None else tensors
    wanted = [rows, *(tensor for tensor in own.values() if tensor.requires_grad)]
    try:
        with torch.set_grad_enabled(training):
            out = module(rows) if tensors is None else functional_call(module, dict(tensors), (rows,))
            if not isinstance(out, Tensor):
                return f"gives a {type(out).__name__}"
            if not training or not out.requires_grad:
                return (out.detach(),)
            weight = torch.linspace(-1.0, 1.0, out.numel(), device=out.device).view(out.shape).to(out.dtype)
            return (out.detach(), *torch.autograd.grad(out, wanted, weight, allow_unused=True))
    except Exception as error:
        return f"raises {type(error).__name__}"


def _same(one: Given, other: Given, again: Callable[[], Given]) -> bool:
    """Whether two calls gave the same, as far as the first gives the same ``again``."""
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) and one == other
    apart = _apart(one, other)
    if apart == 0:
        return True
    repeated = again()
    spread = None if isinstance(repeated, str) else _apart(one, repeated)
    return apart is not None and spread is not None and apart <= max(4 * spread, _rounding(one))


def _rounding(given: tuple[Tensor | None, ...]) -> float:
    return _ROUNDING * max(torch.finfo(t.dtype).eps for t in given if t is not None and t.is_floating_point())


def _apart(one: tuple[Tensor | None, ...], other: tuple[Tensor | None, ...]) -> float | None:
    """The largest difference, relative to what is largest in its row; None: there are others, or of other shapes."""
    if len(one) != len(other):
        return None
    most = 0.0
    for mine, theirs in zip(one, other, strict=True):
        if mine is None or theirs is None:
            if mine is not theirs:
                return None
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return None
        if mine.numel() == 0 or torch.equal(mine, theirs):
            continue
        a, b = (tensor.double().reshape(len(tensor) if tensor.ndim else 1, -1) for tensor in (mine, theirs))
        differs = (a - b).abs()
        differs[(a == b) | (a.isnan() & b.isnan())] = 0.0
        largest = a.nan_to_num(0.0, 0.0, 0.0).abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
        most = max(most, float((differs.nan_to_num(torch.inf) / largest).max()))
    return most


# -- naming ------------------------------------------------------------------------------------------------------------

_OF_TORCH = set(vars(nn.Module()))


def _difference(expert: nn.Module, first: nn.Module) -> str:
    """The first attribute by which two experts differ, in words; empty: none was found."""
    modules = dict(first.named_modules())
    for path, module in expert.named_modules():
        ours, theirs = ({k: v for k, v in vars(m).items() if k not in _OF_TORCH} for m in (module, modules[path]))
        for key in {**ours, **theirs}:
            one, other = ours.get(key), theirs.get(key)
            if (key in ours) != (key in theirs) or _differ(one, other, module, modules[path], _DEPTH):
                return f"{f'{path}.{key}'.lstrip('.')} is {short(one)}, not {short(other)}"
    return ""


def short(value: Any) -> str:
    """On one line, and not a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _differ(one: Any, other: Any, own: nn.Module, others: nn.Module, depth: int) -> bool:
    """Whether two values can be seen to be different, where each may refer to its own module."""
    if one is other or (one is own and other is others) or depth == 0:
        return False
    if type(one) is not type(other):
        return True
    inside = partial(_differ, own=own, others=others, depth=depth - 1)
    if isinstance(one, nn.Module | ModuleType | nn.Parameter):
        # Another module than one's own in the same place: it is bound to an expert that is not this one.
        return isinstance(one, nn.Module) and (one is others or other is own)
    if isinstance(one, Tensor):
        return one.shape != other.shape or (not one.is_meta and not other.is_meta and not torch.equal(one, other))
    if isinstance(one, np.ndarray | np.generic):
        return not np.array_equal(one, other)
    if isinstance(one, Mapping):
        return list(one) != list(other) or any(inside(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) != len(other) or any(map(inside, one, other))
    if isinstance(one, partial):
        return any(inside(*pair) for pair in zip(*((p.func, p.args, p.keywords) for p in (one, other)), strict=True))
    if isinstance(one, MethodType):
        return inside(one.__func__, other.__func__) or (one.__self__ is own) != (other.__self__ is others)
    if isinstance(one, FunctionType):
        cells = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other)]
        rest = [(function.__defaults__, function.__kwdefaults__) for function in (one, other)]
        return one.__code__ != other.__code__ or inside(*cells) or inside(*rest)
    if isinstance(one, BuiltinFunctionType | type):
        return True
    if is_dataclass(one):
        return any(inside(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if type(one).__eq__ is object.__eq__:
        return hasattr(one, "__dict__") and inside(vars(one), vars(other))
    try:
        return not bool(one == other)
    except Exception:
        return False
