"""Tensors that may be experts and that nobody has registered, and who holds them.

A walk over the objects of the garbage collector, at the end of a run under ``eplb-runtime verify``. A running job never
does it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from torch import Tensor, nn

from ...moe.experts.registry import ExpertTensors
from ...moe.experts.slices import local

_FRAMEWORKS = ("eplb_runtime.", "torch.distributed.", "torch.autograd.", "megatron.core.", "torchtitan.", "numba.")
"""Packages that hold buffers and tables of their own, as their objects do."""
_DEPTH = 6
"""Containers between a tensor and what has a name."""


def unregistered(models: Sequence[nn.Module], registry: ExpertTensors, owned: Iterable[Tensor | None]) -> list[Tensor]:
    """Return tensors with memory of their own that have the shape of this rank's experts, or, as vectors, as many
    elements as these or the modules that have them.

    Args:
        owned: further tensors that are registered, or no experts.
    """
    gc.collect()
    gc.unfreeze()  # else what was frozen is not among them
    held = [one for model in models for tensors in (model.parameters(), model.buffers()) for one in tensors]
    gradients = [getattr(tensor, name, None) for tensor in held for name in ("grad", "main_grad")]
    known = {0, *(_memory_of(one) for one in (*held, *gradients, *owned, *registry.parameters()) if one is not None)}
    shapes, sizes = {tuple(one.shape) for one in registry.parameters()}, _sizes(models, registry)
    found = []
    for value in gc.get_objects():
        if issubclass(type(value), Tensor):  # isinstance() wakes objects that pretend to be of another class
            with suppress(Exception):  # there are tensors that cannot even say their shape
                shape, memory = tuple(value.shape), _memory_of(value)
                is_vector = len(shape) == 1 and shape[0] in sizes and value.grad_fn is None
                if memory not in known and (shape in shapes or is_vector):
                    known.add(memory)
                    found.append(value)
    return found


def _sizes(models: Sequence[nn.Module], registry: ExpertTensors) -> set[int]:
    """Return numbers of elements of vectors that may hold experts."""
    experts, own = list(registry.parameters()), set(map(id, registry.parameters()))
    together: list[Sequence[Tensor]] = [experts, *([one] for one in experts if one.dim() > 2)]
    for module in (module for model in models for module in model.modules()):
        if not own.isdisjoint(map(id, parameters := [*module.parameters()])):
            together += [parameters, [one for one in parameters if one.requires_grad]]
    return {sum(local(one).numel() for one in parameters) for parameters in together}


def _memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0: it has none."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def holder_of(tensor: Tensor, ours: list[Tensor]) -> str:
    """Return the variable, object or function that keeps a tensor; empty: a framework's. ``ours`` holds it, too."""
    variables, level = {id(value): name for name, value in _variables()}, list[Any]([tensor])
    seen = {id(one) for one in (ours, level, *level)}
    for _ in range(_DEPTH):
        if names := [name for one in level if (name := _name_of(one, variables)) is not None]:
            return max(names, key=bool)
        above = [one for one in gc.get_referrers(*level) if id(one) not in seen and type(one) is not FrameType]
        level = list({id(one): one for one in above}.values())
        seen |= {id(one) for one in (*level, level, above)}
    return f"a {type(tensor).__name__}"


def _variables() -> Iterator[tuple[str, Any]]:
    """Yield names and values of the local variables of all running functions, and of the script."""
    for frame in sys._current_frames().values():
        inner: FrameType | None = frame
        while inner is not None:
            if not f"{inner.f_globals.get('__name__', '')}.".startswith(_FRAMEWORKS):
                yield from ((f"{name} in {inner.f_code.co_name}()", value) for name, value in inner.f_locals.items())
            inner = inner.f_back
    yield from vars(sys.modules["__main__"]).items()


def _name_of(value: Any, variables: Mapping[int, str]) -> str | None:
    """Name what holds others under a name; empty: a framework's; None: it is only a container of what is named."""
    if id(value) in variables:
        return f"variable {variables[id(value)]}"
    if isinstance(value, dict | list | tuple | set | CellType | Tensor):
        return None
    kind = type(value)
    made_in = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or kind.__module__
    if f"{made_in}.".startswith(_FRAMEWORKS) and not isinstance(value, nn.Module):  # which may be the job's copy of one
        return ""
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    is_code = isinstance(value, FunctionType | GeneratorType)
    return f"{kind.__name__} {value.__qualname__}" if is_code else f"an object of {kind.__name__}"
