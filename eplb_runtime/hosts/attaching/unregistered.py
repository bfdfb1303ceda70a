"""Looks for tensors and arrays whose rows may be experts and that would not move with them: averages, snapshots, masks.

A plain walk over the objects of the garbage collector, at the end of a run under ``eplb-runtime verify``, in which
nothing goes on. A running job never does it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from math import prod
from pathlib import Path
from types import CellType, CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from ...moe.experts.registry import ExpertTensors
from ...moe.experts.slices import has_memory, local
from ...utils.checksums import as_bytes

Found = tuple[tuple[int, ...], str]  # a shape and a content
ALIKE, OWN = "alike ", "own "
"""Begin a content that is known only where all ranks have the same: of what is trained past the balancer, or has the
last dimensions of an expert's tensor, or is a vector that may be experts; and one that is never known: of the shape of
a rank's own experts."""
_FRAMEWORKS = ("eplb_runtime.", "torch.distributed.", "torch.autograd.", "megatron.core.", "torchtitan.", "numba.")
"""Packages that hold buffers and tables of their own, as their objects do."""
_ARRAYS, _CONTAINERS = (Tensor, np.ndarray), (dict, list, tuple)
_PLAIN = frozenset({str, int, float, bool, bytes, type, type(None), FunctionType, CellType, CodeType, ModuleType})
_PART = 1 << 22
"""Elements that are read at once."""
_SPOILED = 0.75
"""Factor that leaves numbers finite, and of the same sign."""
_spared: list[Tensor] = []
_DEPTH = 3
"""Containers inside containers that the collector does not follow, as a dict of arrays alone."""


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


def candidates(
    models: Sequence[nn.Module], registry: ExpertTensors, known: set[int]
) -> tuple[list[Found], list[Any], list[Candidate]]:
    """Return shapes and contents of what is neither the models' nor the balancer's and may be experts, what holds each
    (an object, or the name of a variable), and the tensors and arrays. A content is a checksum. What is no vector is as
    large as an expert's smallest matrix, at least.

    Args:
        known: `memories` of what is the models' or the balancer's.
    """
    rows, sizes = _shapes(models, registry)
    own = {tuple(parameter.shape) for parameter in registry.parameters()}
    whole, least = rows | own, min(map(prod, rows), default=0)  # else it may be an activation, or a number of a step
    found: list[Found] = []
    holders: list[Any] = []
    values: list[Candidate] = []
    for value, holder in _tensors(list(_variables())):
        shape = value.shape
        if value.memory in known or (value.has_gradient and shape not in whole):
            continue
        known.add(value.memory)
        of_rank = any(shape[-len(row) :] == row for row in rows) or value.trained
        if len(shape) == 1:  # experts one after the other
            of_rank = of_rank or shape in sizes or not all(shape[0] % prod(row) for row in rows)
        if not (of_rank or shape in own or value.numel >= least or shape == (registry.homes_per_rank,)):
            continue
        is_own = shape in own and not value.trained
        found.append((shape, OWN * is_own + ALIKE * (of_rank and not is_own) + value.content()))
        holders.append(holder)
        values.append(value)
    return found, holders, values


def named(found: Sequence[Found], holders: list[Any], wanted: Iterable[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Return holders in words, and shapes, of those at the places that are wanted, without what frameworks hold."""
    once = {(id(holders[place]), found[place][0]): place for place in sorted(wanted, reverse=True)}.values()
    variables, first = list(_variables()), sorted(once, key=lambda place: not found[place][1].startswith(OWN))[:100]
    every = [(_named(holders[place], (variables, holders)), found[place][0]) for place in first]
    return [one for one in every if one[0]]


class Candidate:
    """A tensor or an array."""

    def __init__(self, value: Tensor | np.ndarray[Any, Any]) -> None:
        self.shape, self.has_gradient, self.trained = tuple(value.shape), False, False
        if isinstance(value, np.ndarray):
            self._plain: Any = value
            self.numel, self.memory, self._is_float = value.size, value.ctypes.data, value.dtype.kind == "f"
        else:
            self._plain = local(value).detach()
            self.numel, self.memory, self._is_float = value.numel(), _memory_of(value), value.is_floating_point()
            self.has_gradient = value.grad_fn is not None
            self.trained = value.is_leaf and value.grad is not None

    def spoil(self, shared: Sequence[range]) -> bool:
        """Change it a little: what was made from it is another then. Return whether it could be.

        Args:
            shared: addresses behind which are files, or memory of other processes: these are left alone, and hold data.
        """
        before = self.content()
        with suppress(Exception):
            address = self._plain.ctypes.data if isinstance(self._plain, np.ndarray) else self._plain.data_ptr()
            if any(address in one for one in shared):
                return True
            if isinstance(self._plain, np.ndarray):
                self._plain.setflags(write=True)
                self._plain[...] = self._plain * _SPOILED if self._is_float else self._plain // 2
            else:
                wide = self._plain.dequantize() if self._plain.is_quantized else self._plain
                is_whole = not (self._is_float or self._plain.is_quantized)
                self._plain.copy_(wide // 2 if is_whole else wide.float() * _SPOILED)
        return self.content() != before

    def content(self) -> str:
        """A checksum of all bits; of nothing where they cannot be read."""
        checksum = xxhash.xxh3_128()
        with suppress(Exception):
            flat = self._plain.reshape(-1)
            flat = flat.int_repr() if isinstance(flat, Tensor) and flat.is_quantized else flat
            for begin in range(0, self.numel, _PART):
                part = flat[begin : begin + _PART]
                if isinstance(part, Tensor):  # a copy: storage that numpy has seen could not be resized
                    part = as_bytes(part.clone().cpu()).numpy()
                checksum.update(np.ascontiguousarray(part).view(np.uint8).data)
        return checksum.hexdigest()


def shared_memory() -> list[range]:
    """Return the addresses of this process that it shares with files and other processes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.split()[1].endswith("s")]
    return [range(int(first, 16), int(end, 16)) for first, end in spans]


def _memory_of(tensor: Tensor) -> int:
    """Address of a tensor's storage; 0: it has none."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _shapes(models: Sequence[nn.Module], registry: ExpertTensors) -> tuple[set[tuple[int, ...]], set[tuple[int]]]:
    """Shapes of an expert's matrices, and numbers of elements of what may hold experts."""
    rows, numbers, experts, own = set(), set(), 0, set(map(id, registry.parameters()))
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
    return rows, {(number,) for number in numbers | {experts} if number}


def _variables() -> Iterator[tuple[str, Any]]:
    """Names and values of the local variables of all running functions, and of modules that are scripts."""
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None:
            if not f"{inner.f_globals.get('__name__', '')}.".startswith(_FRAMEWORKS):
                yield from ((f"{name} in {inner.f_code.co_name}()", value) for name, value in inner.f_locals.items())
            inner = inner.f_back
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__ == "__main__":
            yield from vars(module).items()


def _tensors(variables: Sequence[tuple[str, Any]]) -> Iterator[tuple[Candidate, Any]]:
    """All tensors and arrays, each with an object that holds it."""
    gc.unfreeze()  # else what was frozen is not among them
    objects = gc.get_objects()
    for holder in objects:
        if not _of_a_framework(type(holder)):  # type: ignore[arg-type]
            yield from _inside(gc.get_referents(holder), holder, _DEPTH)
    for name, value in variables:
        yield from _inside([value], name, _DEPTH)
    yield from _inside([one for one in objects if issubclass(type(one), Tensor)], None, 0)


def _inside(values: Sequence[Any], holder: Any, depth: int) -> Iterator[tuple[Candidate, Any]]:
    for value in values:
        kind = type(value)  # isinstance() wakes objects that pretend to be of another class
        if kind in _PLAIN:
            continue
        if issubclass(kind, np.ndarray) and value.dtype == object:
            yield from _inside(value.ravel().tolist(), holder if holder is not None else value, depth - 1)
        elif issubclass(kind, _ARRAYS):
            candidate = None
            with suppress(Exception):  # there are tensors that cannot even say their shape
                held = value._values() if isinstance(value, Tensor) and value.layout is torch.sparse_coo else value
                candidate = Candidate(held) if _may_be_weights(held) else None
            if candidate is not None:
                yield candidate, holder if holder is not None else value
        elif depth and issubclass(kind, _CONTAINERS) and not gc.is_tracked(value):
            inner = [*value.values()] if isinstance(value, dict) else list(value)
            yield from _inside(inner, holder if holder is not None else value, depth - 1)


def _may_be_weights(value: Tensor | np.ndarray[Any, Any]) -> bool:
    """Return whether averages, snapshots and masks are of this kind: ids are not, nor is a file that is read."""
    if isinstance(value, np.ndarray):
        is_file = isinstance(value, np.memmap) and value.mode == "r"
        return value.ndim > 0 and not is_file and value.dtype.names is None and value.dtype.kind in "fVbiu"
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        return False
    return (value.ndim > 0 or value.requires_grad) and (value.is_quantized or has_memory(value))


def _named(holder: Any, ours: tuple[Sequence[tuple[str, Any]], list[Any]]) -> str:
    """A holder in words: the variable that it is, the function or the object that keeps it; empty: a framework's.

    Args:
        ours: names and values of variables, and what is held in a list of the search.
    """
    level, known = [holder], {id(holder)}
    for _ in range(2 * _DEPTH):
        names = [name for one in level if (name := _name_of(one, ours[0])) is not None]
        if names:
            return max(names, key=bool)
        level = [
            above
            for one in level
            for above in gc.get_referrers(one)
            if all(above is not own for own in (*ours, level)) and not _is_ours(above)
        ]
        level = list({id(one): one for one in level if id(one) not in known}.values())
        if not level and isinstance(holder, Tensor):  # nothing of Python has it, but a cache of torch
            return ""
        known.update(map(id, level))
    return f"a {type(holder).__name__}"


def _name_of(value: Any, variables: Sequence[tuple[str, Any]]) -> str | None:
    """Name what holds others under a name; empty: a framework's; None: it is only a container of what is named."""
    if isinstance(value, str):
        return f"variable {value}"
    for name, one in variables:
        if one is value:
            return f"variable {name}"
    if isinstance(value, FunctionType) and f"{value.__module__}.".startswith(_FRAMEWORKS):
        return ""
    if isinstance(value, GeneratorType | FunctionType):
        return f"{'function' if isinstance(value, FunctionType) else 'generator'} {value.__qualname__}"
    if isinstance(value, ModuleType):
        return "" if f"{value.__name__}.".startswith(_FRAMEWORKS) else f"module {value.__name__}"
    if _of_a_framework(type(value)):  # type: ignore[arg-type]
        return ""
    is_container = isinstance(value, dict | list | tuple | set | CellType | Tensor | np.ndarray)
    return None if is_container else f"an object of {type(value).__name__}"


@lru_cache(maxsize=10_000)
def _of_a_framework(kind: type) -> bool:
    """Return whether this is a class of theirs; modules may be copies that the job has made."""
    made_in = str(getattr(kind, "__module__", ""))
    return f"{made_in}.".startswith(_FRAMEWORKS) and not issubclass(kind, nn.Module)


def _is_ours(value: Any) -> bool:
    """Return whether this is a frame, or a list or a generator of the search itself."""
    if isinstance(value, GeneratorType):
        return bool(value.gi_code.co_filename == __file__)
    return type(value).__name__ in ("frame", "list_iterator") or (isinstance(value, list) and len(value) > 10_000)
