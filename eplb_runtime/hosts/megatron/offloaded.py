"""What Megatron's HybridDeviceOptimizer (``optimizer_cpu_offload``) keeps for a parameter, and where.

It steps an inner tensor in the place of each parameter that it is given: the parameter itself, a float32 copy of it, or
a copy in host memory, by one of several optimizers inside. Which parameters are in host memory depends on their order
and sizes on each rank. Nothing is remembered here: loading makes inner tensors and their state anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from ...moe.experts.optimizer_state import PARAMETER

MAIN = "param"
"""Key of the float32 master, as in Megatron's own accessor."""
_AGAIN = "master_param"
"""Key under which the state has the inner tensor a second time, after the first step."""
_STEPS = "step"


@dataclass(frozen=True)
class OffloadedState:
    """What is kept for one parameter, in the same form wherever it is.

    Args:
        state: by key, sorted; `MAIN` is what the next step reads, left out where it has the parameter's own dtype.
        copies: other memory with the numbers of `MAIN`, or of the parameter itself.
    """

    state: Mapping[str, Tensor]
    copies: Mapping[str, tuple[Tensor, ...]]


def is_offloaded(optimizer: Any) -> bool:
    return isinstance(optimizer, HybridDeviceOptimizer)


def is_mixed(optimizer: Any) -> bool:
    """Whether some parameters are in host memory and others are not."""
    return isinstance(optimizer, HybridDeviceOptimizer) and 0 < optimizer.offload_fraction < 1


def offloaded_state(
    optimizer: HybridDeviceOptimizer, given: Tensor, parameter: Tensor, first: int = 0
) -> OffloadedState:
    """What is kept for a parameter of the model.

    Args:
        given: what the optimizer was given in its place: itself, a view of it, or its float32 master.
        first: element of the flat parameter with which that begins.
    """
    own_place = parameter.data_ptr() + first * parameter.itemsize
    inner = optimizer.param_to_inner_param[given]
    state = {key: value for key, value in optimizer.state.get(given, {}).items() if key != _AGAIN}
    if is_mixed(optimizer):
        # TransformerEngine's optimizer on the device counts steps for all, torch's in host memory for each; all
        # experts are stepped together.
        state.pop(_STEPS, None)
    by_place = {tensor.data_ptr(): tensor for tensor in (given, inner) if tensor.data_ptr() != own_place}
    if inner.dtype == parameter.dtype:  # equal to the parameter itself after each step
        copies = {PARAMETER: tuple(by_place.values())} if by_place else {}
    else:
        state[MAIN] = inner
        others = tuple(tensor for place, tensor in by_place.items() if place != inner.data_ptr())
        copies = {MAIN: others} if others else {}
    return OffloadedState({key: state[key] for key in sorted(state)}, copies)


def stepping_inside(optimizer: HybridDeviceOptimizer) -> list[torch.optim.Optimizer]:
    """An optimizer of each class that steps inside of it."""
    return list({type(one): one for one in optimizer.sub_optimizers}.values())
