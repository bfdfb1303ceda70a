"""Looks for tensors and arrays whose rows may be experts and that would not move with them: averages, snapshots, masks.

A plain walk over the objects of the garbage collector, at the end of a run under ``eplb-runtime verify``, in which
nothing goes on. A running job never does it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CellType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from ...moe.experts.registry import ExpertTensors
from ...moe.experts.slices import local

MOST_FOUND = 20
"""Findings of a rank that are listed."""
_FRAMEWORKS = ("eplb_runtime", "torch.distributed", "torch.autograd", "megatron", "torchtitan")
"""Modules whose objects hold buffers of their own."""
_DEPTH = 3
"""Containers inside containers that the collector does not follow, as a dict of arrays alone."""


def unregistered(
    models: Sequence[nn.Module], registry: ExpertTensors, owned: Iterable[Tensor]
) -> list[tuple[str, tuple[int, ...]]]:
    """Return holders and shapes of what may be experts: the last dimensions are those of an expert's tensor, or it has
    as many elements as an expert, as a parameter of experts or as the whole model.

    Args:
        owned: tensors that move with experts or are no experts, besides the models' parameters, gradients and buffers.
    """
    held = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    gradients = [getattr(tensor, name, None) for tensor in held for name in ("grad", "main_grad")]
    known = {0} | {_memory_of(one) for one in (*held, *gradients, *owned, *registry.parameters()) if one is not None}
    rows, sizes = _shapes(models, registry)
    whole = rows | {tuple(parameter.shape) for parameter in registry.parameters()}  # else it may be an activation
    variables = list(_variables())
    shapes: list[tuple[int, ...]] = []
    holders: list[Any] = []
    for value, holder in _tensors(variables):
        shape = tuple(value.shape)
        is_like = any(shape[-len(row) :] == row for row in rows) or shape[-1:] in sizes or (value.numel,) in sizes
        if (shape in whole if value.has_gradient else is_like) and value.memory not in known:
            known.add(value.memory)
            shapes.append(shape)
            holders.append(holder)
    # The walk is over: lists of its own, which held what it looked at, are gone.
    named = [(_named(holders[place], (variables, holders)), shape) for place, shape in enumerate(shapes)]
    return [one for one in named if one[0]][:MOST_FOUND]


class _Candidate:
    """A tensor or an array."""

    def __init__(self, value: Tensor | np.ndarray[Any, Any]) -> None:
        self.shape = tuple(value.shape)
        self.has_gradient = isinstance(value, Tensor) and value.grad_fn is not None
        if isinstance(value, np.ndarray):
            self.numel, self.memory = value.size, value.ctypes.data
        else:
            self.numel, self.memory = value.numel(), _memory_of(value)


def _memory_of(tensor: Tensor) -> int:
    """Address of a tensor's storage; 0: it has none."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _shapes(models: Sequence[nn.Module], registry: ExpertTensors) -> tuple[set[tuple[int, ...]], set[tuple[int]]]:
    """Shapes of an expert's matrices, and numbers of elements of what may hold experts."""
    rows, numbers, experts = set(), set(), 0
    for layer in registry.layers:
        for tensor in registry.by_expert(layer):
            parts = [local(part) for part in (tensor if isinstance(tensor, tuple) else (tensor,))]
            row = parts[0].shape if isinstance(tensor, tuple) else parts[0].shape[1:]
            rows |= {tuple(row)} if len(row) > 1 else set()
            whole = sum(part.numel() for part in parts)
            experts += whole
            numbers |= {whole, row.numel() if len(row) > 1 else 0}
    for trained in (False, True):
        numbers.add(sum(p.numel() for model in models for p in model.parameters() if p.requires_grad or not trained))
    return rows, {(number,) for number in numbers | {experts} if number}


def _variables() -> Iterator[tuple[str, Any]]:
    """Names and values of the local variables of all running functions, and of modules that are scripts."""
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None:
            if not inner.f_globals.get("__name__", "").startswith(_FRAMEWORKS):
                yield from ((f"{name} in {inner.f_code.co_name}()", value) for name, value in inner.f_locals.items())
            inner = inner.f_back
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__ == "__main__":
            yield from vars(module).items()


def _tensors(variables: Sequence[tuple[str, Any]]) -> Iterator[tuple[_Candidate, Any]]:
    """All tensors and arrays, each with an object that holds it."""
    objects = gc.get_objects()
    for holder in objects:
        if not _of_a_framework(holder):
            yield from _inside(gc.get_referents(holder), holder, _DEPTH)
    yield from _inside([value for _, value in variables], None, _DEPTH)
    yield from _inside([one for one in objects if issubclass(type(one), Tensor)], None, 0)


def _inside(values: Sequence[Any], holder: Any, depth: int) -> Iterator[tuple[_Candidate, Any]]:
    for value in values:
        kind = type(value)  # isinstance() wakes objects that pretend to be of another class
        if issubclass(kind, Tensor | np.ndarray):
            if value.ndim and _may_be_weights(value):
                yield _Candidate(value), holder if holder is not None else value
        elif depth and issubclass(kind, dict | list | tuple) and not gc.is_tracked(value):
            inner = [*value.values()] if isinstance(value, dict) else list(value)
            yield from _inside(inner, holder if holder is not None else value, depth - 1)


def _may_be_weights(value: Tensor | np.ndarray[Any, Any]) -> bool:
    """Return whether averages, snapshots and masks are of this kind: ids are not."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fV" or value.dtype.itemsize == 1
    return not value.is_sparse and (value.is_floating_point() or value.element_size() == 1)


def _named(holder: Any, ours: tuple[Sequence[tuple[str, Any]], list[Any]]) -> str:
    """A holder in words: the variable that it is, the function or the object that keeps it; empty: a framework's.

    Args:
        ours: names and values of variables, and what is held in a list of the search.
    """
    kind = "a variable"
    for _ in range(2 * _DEPTH):
        for name, value in ours[0]:  # a closure over `holder` would be a holder itself
            if value is holder:
                return f"variable {name}"
        if isinstance(holder, GeneratorType | FunctionType):
            return f"{'function' if isinstance(holder, FunctionType) else 'generator'} {holder.__qualname__}"
        if isinstance(holder, ModuleType):
            return f"module {holder.__name__}"
        if _of_a_framework(holder):
            return ""
        if not isinstance(holder, dict | list | tuple | CellType | Tensor | np.ndarray):
            return f"an object of {type(holder).__name__}"
        kind = "a closure" if isinstance(holder, CellType) else f"a {type(holder).__name__}"
        above = [one for one in gc.get_referrers(holder) if all(one is not own for own in ours) and not _is_ours(one)]
        if not above:
            break
        holder = above[0]
    return kind


def _of_a_framework(value: Any) -> bool:
    return str(getattr(type(value), "__module__", "")).startswith(_FRAMEWORKS)


def _is_ours(value: Any) -> bool:
    """Whether this is a frame, or a list or a generator of the search itself."""
    if isinstance(value, GeneratorType):
        return bool(value.gi_code.co_filename == __file__)
    return type(value).__name__ in ("frame", "list_iterator") or (isinstance(value, list) and len(value) > 10_000)
