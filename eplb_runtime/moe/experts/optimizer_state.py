"""What an optimizer keeps for each expert, found through ``optimizer.state`` and never by name.

A state tensor belongs to the experts when its leading dimension is the parameter's; single numbers (Adam's ``step``)
belong to the whole parameter and are equal on every rank. Anything else cannot be told apart and is refused, tensors
inside of lists and the like, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor


class OptimizerStateError(ValueError):
    """An optimizer, or its state, that cannot be split by expert."""


Ranges = tuple[tuple[int, int], ...]
"""For each of the ranks that hold the same experts, in order, the first element and the end of what it keeps."""


class StateOwner(Protocol):
    """An optimizer of a framework's own, which may step other tensors than the model's."""

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """Return what is kept for a parameter of the model, by key: live memory, none of it the parameter's own."""

    def copies_of(self, parameter: Tensor) -> Mapping[str, tuple[Tensor, ...]]:
        """Other live memory that holds the same numbers as a part of that state, by its key, or as the parameter itself
        (`PARAMETER`)."""

    def ranges_of(self, parameter: Tensor) -> Ranges:
        """Return the elements of a flat parameter whose state each rank keeps that holds it; empty: each keeps all of
        it. Else ``state_of`` has flat tensors of this rank's range, or single numbers."""


PARAMETER = ""
"""Key under which `StateOwner.copies_of` has copies of the parameter itself."""


def state_of(optimizer: torch.optim.Optimizer | StateOwner, parameter: Tensor) -> Mapping[str, Any]:
    """Return what an optimizer keeps for a parameter; empty: nothing yet."""
    if isinstance(optimizer, torch.optim.Optimizer):
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
        return state
    return optimizer.state_of(parameter)


def state_of_each(
    optimizer: torch.optim.Optimizer | StateOwner, parameters: Sequence[Tensor], *, divided: bool = False
) -> list[tuple[str, tuple[Tensor, ...]]]:
    """Return the state of experts that are parameters of their own, one tensor for each, sorted by key. ``divided``: of
    an expert of which this rank keeps nothing it is an empty tensor; else all are stepped alike."""
    of_each = [state_of(optimizer, parameter) for parameter in parameters]
    kept = [state for state in of_each if state or not divided]
    for state in kept:
        if list(state) != list(kept[0]):
            raise OptimizerStateError(
                f"an optimizer keeps {sorted(map(str, kept[0]))} for one expert of a layer and "
                f"{sorted(map(str, state))} for another: step all experts together"
            )
        odd = [key for key, value in state.items() if value is not None and not isinstance(value, Tensor)]
        if odd:
            raise OptimizerStateError(
                f"an optimizer keeps {odd[0]!r} of each expert as a {type(state[odd[0]]).__name__}: only tensors move"
            )
    first = kept[0] if kept else {}
    keys = [key for key in sorted(first, key=str) if isinstance(first[key], Tensor)]
    return [(str(key), tuple(state[key] if state else first[key].new_empty(0) for state in of_each)) for key in keys]


def copies_of_each(
    optimizer: torch.optim.Optimizer | StateOwner, parameters: Sequence[Tensor]
) -> dict[str, tuple[tuple[Tensor, ...], ...]]:
    """By key, for each expert that is a parameter of its own, the memory that holds the same numbers: none or more
    tensors, on other devices for some experts than for others."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return {}
    of_each = [optimizer.copies_of(parameter) for parameter in parameters]
    return {key: tuple(copies.get(key, ()) for copies in of_each) for key in {key for one in of_each for key in one}}


def expert_state(
    optimizer: torch.optim.Optimizer | StateOwner, parameter: Tensor, registered: Collection[int] = ()
) -> list[tuple[str, Tensor]]:
    """Return the state tensors of ``parameter`` whose rows are its experts, sorted by key. ``registered``: addresses of
    memory that moves by itself."""
    state = sorted(((str(key), value) for key, value in state_of(optimizer, parameter).items()), key=itemgetter(0))
    return [(key, value) for key, value in state if is_per_expert(key, value, parameter, registered)]


def is_per_expert(key: str, value: Any, parameter: Tensor, registered: Collection[int] = ()) -> bool:
    """Return whether the rows of a state tensor are the experts of ``parameter``, or it is one number for all;
    OptimizerStateError: neither."""
    if not isinstance(value, Tensor):
        if _holds_tensors(value, registered):
            raise OptimizerStateError(
                f"optimizer state {key!r} is a {type(value).__name__} that holds tensors, which would stay behind when "
                "experts move: keep each of them under a key of its own"
            )
        return False
    if value.ndim == parameter.ndim and value.shape[0] == parameter.shape[0]:
        return True
    if value.numel() == 1:
        return False
    raise OptimizerStateError(
        f"optimizer state {key!r} has shape {tuple(value.shape)} for an expert parameter of shape "
        f"{tuple(parameter.shape)}: it cannot be split by expert; give it as many dimensions, a row an expert"
    )


def _holds_tensors(value: Any, registered: Collection[int]) -> bool:
    """Return whether a container has a tensor of several elements somewhere inside that does not move by itself."""
    if isinstance(value, Tensor):
        return value.numel() > 1 and value.data_ptr() not in registered
    if isinstance(value, Mapping):
        return any(_holds_tensors(inner, registered) for inner in value.values())
    return isinstance(value, (list, tuple, deque)) and any(_holds_tensors(inner, registered) for inner in value)


def replace_parameter(
    optimizer: torch.optim.Optimizer,
    old: torch.nn.Parameter,
    new: torch.nn.Parameter,
    take_rows: Callable[[Tensor], Tensor],
) -> None:
    """Put ``new`` in the place of ``old``: same group, same options, its state cut by ``take_rows`` to the rows that
    ``new`` holds."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if parameter is old:
                state = optimizer.state.get(old, {})
                cut = {key: take_rows(one) if is_per_expert(str(key), one, old) else one for key, one in state.items()}
                group["params"][index] = new
                if optimizer.state.pop(old, None) is not None:
                    optimizer.state[new] = cut
                return
    raise OptimizerStateError("the optimizer does not hold this parameter")
