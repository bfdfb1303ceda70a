"""Models and optimizers as they were before ``attach``, so that an attach that fails leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Before:
    """What attaching changes of models and optimizers. It keeps full experts alive until it is dropped."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        modules = [module for model in models for module in model.modules()]
        self._objects = [_Attributes(thing) for thing in (*modules, *optimizers)]
        self._groups = [(g, g["params"], list(g["params"])) for o in optimizers for g in o.param_groups]
        self._states = [(optimizer.state, dict(optimizer.state)) for optimizer in optimizers]
        self._meta = [p for model in models for p in model.parameters() if p.is_meta]

    def restore(self) -> None:
        """Everything as it was: the same parameters, buffers, hooks and forwards in the same modules."""
        for attributes in self._objects:
            attributes.restore()
        for group, listed, parameters in self._groups:
            listed[:] = parameters
            group["params"] = listed
        for state, before in self._states:
            state.clear()
            state.update(before)
        for parameter in self._meta:
            if not parameter.is_meta:
                _give_up_memory(parameter)


class _Attributes:
    """The attributes of an object, and what is in those that are dicts or sets (parameters, buffers, hooks)."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        self._before = dict(vars(thing))
        self._inside = [(value, value.copy()) for value in self._before.values() if isinstance(value, (dict, set))]

    def restore(self) -> None:
        now = vars(self._thing)
        now.clear()
        now.update(self._before)
        for value, before in self._inside:
            value.clear()
            value.update(before)


def _give_up_memory(parameter: Tensor) -> None:
    """Back to the meta device; the parameter stays the same object."""
    bare = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    bare.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, bare)
