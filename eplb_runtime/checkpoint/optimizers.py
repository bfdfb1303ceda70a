"""One optimizer or several, as a checkpoint sees them: the param groups of all, and the state of each parameter."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor


class KeepsState(Protocol):
    """The part of an optimizer that a checkpoint reads and writes."""

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """Options, and parameters under ``"params"``."""

    @property
    def state(self) -> MutableMapping[Tensor, Any]:
        """By parameter."""


Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | KeepsState | None


def as_one(given: Given) -> KeepsState | None:
    """Return the optimizer, several as one, or None where there is none.

    Raises:
        TypeError: an entry of a sequence is no optimizer.
    """
    if not isinstance(given, Sequence):
        return given
    for number, one in enumerate(given):
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"optimizer {number} of the list is a {type(one).__name__}: give optimizers of torch.optim")
    return Several(given) if given else None


class Several:
    """Several optimizers of one model, each with parameters of its own."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers))

    @property
    def state(self) -> _States:
        return _States(self._optimizers)


class _States(MutableMapping[Tensor, Any]):
    """A parameter's state, in the optimizer that steps the parameter."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._of: Mapping[int, MutableMapping[Tensor, Any]] = {
            id(parameter): optimizer.state
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._all = [optimizer.state for optimizer in optimizers]

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._of[id(parameter)][parameter]

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._of and parameter in self._of[id(parameter)]

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._of[id(parameter)][parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of[id(parameter)][parameter]

    def __iter__(self) -> Any:
        return chain.from_iterable(self._all)

    def __len__(self) -> int:
        return sum(map(len, self._all))
