"""Which tensors of a collection belong to which parameters of a model: by name, by order, or by place in a vector."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .registry import RegistryError

MARK = "eplb_runtime_experts"
"""What state dicts call where their experts stood."""
_WRAPPERS = ("module.", "_orig_mod.")
"""What wrappers of a model put before the names of its parameters."""


def matched(tensors: Any, parameters: Mapping[str, Tensor], experts: Sequence[str]) -> dict[str, Tensor]:
    """The tensors that belong to expert parameters, by the parameter's name; the very memory, not copies.

    Args:
        tensors: a module with parameters (or buffers) of the same names; a mapping by name; a sequence of tensors or
            arrays, as many as all parameters, as those that are trained, or as those of experts, in their order; or
            one vector of as many elements.
        parameters: of the model, experts as they lie here, in the model's order.
        experts: the names of those of experts.

    Raises:
        RegistryError: none or not all of the expert parameters are found, or shapes differ.
    """
    if isinstance(tensors, nn.Module):
        tensors = {**dict(tensors.named_buffers()), **dict(tensors.named_parameters())}
    if isinstance(tensors, Mapping):
        plain = {_plain(name): value for name, value in tensors.items() if isinstance(name, str)}
        found = {name: plain[_plain(name)] for name in experts if _plain(name) in plain}
    else:
        found = {name: one for name, one in _in_order(tensors, parameters, experts).items() if name in experts}
    missing = next((name for name in experts if name not in found), None)
    if missing is not None:
        raise RegistryError(
            f"nothing in it belongs to {missing}: give a module or a dict with the names of the model's parameters, a "
            f"list in the order of model.parameters(), or a vector of them"
        )
    made = {name: _tensor(value) for name, value in found.items()}
    for name, tensor in made.items():
        if tensor.shape != parameters[name].shape:
            raise RegistryError(
                f"what belongs to {name} has shape {tuple(tensor.shape)}, and this rank's experts have "
                f"{tuple(parameters[name].shape)}: make it from the attached model's parameters"
            )
    return made


def arrays_in(thing: Any) -> Iterator[Any]:
    """The tensors and arrays in a module or a collection, also in collections inside."""
    if isinstance(thing, Tensor | np.ndarray):
        yield thing
    elif isinstance(thing, nn.Module):
        yield from nn.Module.parameters(thing)  # a wrapper may call something else so
        yield from nn.Module.buffers(thing)
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from arrays_in(value)
    elif isinstance(thing, list | tuple | set | deque):
        for value in thing:
            yield from arrays_in(value)


def _in_order(tensors: Any, parameters: Mapping[str, Tensor], experts: Sequence[str]) -> dict[str, Any]:
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    for names in (list(parameters), trained, list(experts)):
        if isinstance(tensors, Tensor | np.ndarray):
            sizes = [parameters[name].numel() for name in names]
            if tensors.ndim == 1 and len(tensors) == sum(sizes):
                parts = _tensor(tensors).split(sizes)
                return {name: part.view_as(parameters[name]) for name, part in zip(names, parts, strict=True)}
        elif isinstance(tensors, list | tuple) and len(tensors) == len(names):
            return dict(zip(names, tensors, strict=True))
    return {}


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "") if name.startswith(wrapper) else name.replace(f".{wrapper}", ".")
    return name


def _tensor(value: Any) -> Tensor:
    """An array's own memory."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if not isinstance(value, Tensor):
        raise RegistryError(f"a {type(value).__name__} is no tensor")
    return value.detach() if value.requires_grad else value
