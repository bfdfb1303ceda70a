"""Tensors that may be experts and that nobody has registered, and who holds them.

A walk over the objects of the garbage collector, at the end of a run under ``eplb-runtime verify``. A running job never
does it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CellType, FunctionType, GeneratorType, ModuleType
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from ...moe.experts.registry import ExpertTensors
from ...moe.experts.slices import has_memory, local
from ...utils.checksums import as_bytes

_FRAMEWORKS = ("eplb_runtime.", "torch.distributed.", "torch.autograd.", "megatron.core.", "torchtitan.", "numba.")
"""Packages that hold buffers and tables of their own, as their objects do."""
_PART = 1 << 22
"""Elements that are read at once."""
_DEPTH = 6
"""Containers between a tensor and what has a name."""
_spared: list[Tensor] = []
Variables = Sequence[tuple[str, Any]]


class Suspect(NamedTuple):
    """A tensor that may hold experts, and its checksum; ``is_own``: it has the shape of all experts of this rank."""

    value: Tensor
    shape: tuple[int, ...]
    content: str
    is_own: bool


@contextmanager
def spared() -> Iterator[None]:
    """Leave the tensors alone that there are now: they are no averages of models that are made inside."""
    _spared.extend(one for one in gc.get_objects() if issubclass(type(one), Tensor))
    try:
        yield
    finally:
        _spared.clear()


def memories(models: Sequence[nn.Module], registry: ExpertTensors, owned: Iterable[Tensor]) -> set[int]:
    """Return where parameters, gradients and buffers of models are, and ``owned``: registered or no experts."""
    named = [one for model in models for one in (*model.named_parameters(), *model.named_buffers())]
    held = [tensor for _, tensor in named]  # `buffers` is an attribute of Megatron's DDP
    gradients = [getattr(tensor, name, None) for tensor in held for name in ("grad", "main_grad")]
    known = (*held, *gradients, *owned, *_spared, *registry.parameters())
    return {0} | {_memory_of(one) for one in known if one is not None}


def suspects(models: Sequence[nn.Module], registry: ExpertTensors, known: set[int]) -> list[Suspect]:
    """Return what has a shape of experts and memory of its own: all of a rank, one's matrix, several of these, or a
    vector as long as experts or the modules that have them.

    Args:
        known: `memories` of what is the models' or the balancer's.
    """
    rows, numbers = _shapes(models, registry)
    own, found = {tuple(parameter.shape) for parameter in registry.parameters()}, []
    for value in _values():
        with suppress(Exception):  # there are tensors that cannot even say their shape
            shape, memory = tuple(value.shape), _memory_of(value)
            is_vector = len(shape) == 1 and shape[0] in numbers
            if memory in known or not (is_vector or shape in own or any(shape[-len(row) :] == row for row in rows)):
                continue
            if shape not in rows | own and value.grad_fn is not None:
                continue
            known.add(memory)
            found.append(Suspect(value, shape, _content(value), shape in own))
    return found


def holder_of(suspect: Suspect, ours: list[Suspect]) -> str:
    """Return the variable, object or function that keeps it; empty: one of a framework. ``ours`` holds it, too."""
    variables, level = list(_variables()), list[Any]([suspect.value])
    seen = {id(one) for one in (ours, *ours, *level, level, variables, *variables)}
    for _ in range(_DEPTH):
        names = [name for one in level if (name := _name_of(one, variables)) is not None]
        if names:
            return max(names, key=bool)
        above = [one for one in gc.get_referrers(*level) if id(one) not in seen and type(one).__name__ != "frame"]
        level = list({id(one): one for one in above}.values())
        seen |= {id(one) for one in (*level, level, above)}
    return f"a {type(suspect.value).__name__}"


def _shapes(models: Sequence[nn.Module], registry: ExpertTensors) -> tuple[set[tuple[int, ...]], set[int]]:
    """Return shapes of an expert's matrices, and numbers of elements of vectors that may hold experts."""
    rows, numbers, own = set[tuple[int, ...]](), set[int](), set(map(id, registry.parameters()))
    experts = 0
    for layer in registry.layers:
        each = 0
        for tensor in registry.by_expert(layer):
            parts = [local(part) for part in (tensor if isinstance(tensor, tuple) else (tensor,))]
            row = parts[0].shape if isinstance(tensor, tuple) else parts[0].shape[1:]
            rows |= {tuple(row)} if len(row) > 1 else set()
            whole = sum(part.numel() for part in parts)
            experts, each = experts + whole, each + row.numel()
            numbers |= {whole, row.numel()}
        numbers |= {each}
    for parameters in ([*module.parameters()] for model in models for module in model.modules()):
        if any(id(parameter) in own for parameter in parameters):
            trained = [parameter.numel() for parameter in parameters if parameter.requires_grad]
            numbers |= {sum(parameter.numel() for parameter in parameters), sum(trained)}
    return rows, (numbers | {experts}) - {0}


def _values() -> Iterator[Tensor]:
    """Yield all tensors with memory."""
    gc.unfreeze()  # else what was frozen is not among them
    for one in gc.get_objects():
        if issubclass(type(one), Tensor):  # isinstance() wakes objects that pretend to be of another class
            with suppress(Exception):
                if one.layout is torch.strided and not one.is_nested and has_memory(one):
                    yield one


def _content(tensor: Tensor) -> str:
    """Return a checksum of all bits."""
    checksum, flat = xxhash.xxh3_128(), local(tensor).detach().reshape(-1)
    flat = flat.int_repr() if flat.is_quantized else flat
    for begin in range(0, len(flat), _PART):
        # A copy: storage that numpy has seen could not be resized.
        checksum.update(as_bytes(flat[begin : begin + _PART].clone().cpu()).numpy().data)
    return checksum.hexdigest()


def _memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0: it has none."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _variables() -> Iterator[tuple[str, Any]]:
    """Yield names and values of the local variables of all running functions, and of the script."""
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None:
            if not f"{inner.f_globals.get('__name__', '')}.".startswith(_FRAMEWORKS):
                yield from ((f"{name} in {inner.f_code.co_name}()", value) for name, value in inner.f_locals.items())
            inner = inner.f_back
    yield from vars(sys.modules["__main__"]).items()


def _name_of(value: Any, variables: Variables) -> str | None:
    """Name what holds others under a name; empty: a framework's; None: it is only a container of what is named."""
    for name, one in variables:
        if one is value:
            return f"variable {name}"
    if isinstance(value, GeneratorType | FunctionType):
        is_own = f"{value.__module__}.".startswith(_FRAMEWORKS) if isinstance(value, FunctionType) else False
        return "" if is_own else f"{type(value).__name__} {value.__qualname__}"
    if isinstance(value, ModuleType):
        return "" if f"{value.__name__}.".startswith(_FRAMEWORKS) else f"module {value.__name__}"
    if _of_a_framework(type(value)):
        return ""
    is_container = isinstance(value, dict | list | tuple | set | CellType | Tensor)
    return None if is_container else f"an object of {type(value).__name__}"


def _of_a_framework(kind: type) -> bool:
    """Return whether this is a class of theirs; modules may be copies that the job has made."""
    made_in = str(getattr(kind, "__module__", ""))
    return f"{made_in}.".startswith(_FRAMEWORKS) and not issubclass(kind, nn.Module)
