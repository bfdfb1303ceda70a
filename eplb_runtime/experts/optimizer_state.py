"""What an optimizer keeps for each expert, found through ``optimizer.state`` and never by name.

A state tensor belongs to the experts when its leading dimension is the parameter's; single numbers (Adam's ``step``)
belong to the whole parameter and are equal on every rank. Anything else cannot be told apart and is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class OptimizerStateError(ValueError):
    """An optimizer, or its state, that cannot be split by expert."""


def expert_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[tuple[str, Tensor]]:
    """The state tensors of ``parameter`` whose rows are its experts, sorted by key.

    Raises:
        OptimizerStateError: a tensor has neither the parameter's leading dimension nor a single element.
    """
    state = optimizer.state.get(parameter, {})
    found = []
    for key in sorted(state, key=str):
        value = state[key]
        if isinstance(value, Tensor) and is_per_expert(str(key), value, parameter):
            found.append((str(key), value))
    return found


def is_per_expert(key: str, value: Tensor, parameter: Tensor) -> bool:
    """Whether the rows of a state tensor are the experts of ``parameter`` (else it is one number for all).

    Raises:
        OptimizerStateError: it is neither.
    """
    if value.ndim == parameter.ndim and value.shape[0] == parameter.shape[0]:
        return True
    if value.numel() == 1:
        return False
    raise OptimizerStateError(
        f"optimizer state {key!r} has shape {tuple(value.shape)} for an expert parameter of shape "
        f"{tuple(parameter.shape)}: it cannot be split by expert; use an element-wise optimizer (SGD, Adam, AdamW, ...)"
    )


def replace_parameter(
    optimizer: torch.optim.Optimizer,
    old: torch.nn.Parameter,
    new: torch.nn.Parameter,
    take_rows: Callable[[Tensor], Tensor],
) -> None:
    """Put ``new`` in the place of ``old``: same group, same options, its state cut to the rows that ``new`` holds.

    Args:
        take_rows: full tensor ``[E, ...]`` -> a new tensor of this rank's rows ``[E/R, ...]``.

    Raises:
        OptimizerStateError: the optimizer does not hold ``old``, or its state cannot be split.
    """
    place = next(
        ((group, i) for group in optimizer.param_groups for i, p in enumerate(group["params"]) if p is old), None
    )
    if place is None:
        raise OptimizerStateError("the optimizer does not hold this parameter")
    state = optimizer.state.get(old, {})
    local = {
        key: take_rows(value) if isinstance(value, Tensor) and is_per_expert(str(key), value, old) else value
        for key, value in state.items()
    }
    group, index = place
    group["params"][index] = new
    if old in optimizer.state:
        del optimizer.state[old]
        optimizer.state[new] = local
