"""What Megatron's optimizers keep of an expert, and where.

A distributed optimizer divides each bucket of a flat buffer evenly over the ranks that hold the same experts, wherever
these begin and end; each rank steps what it has of an expert, whole or cut. HybridDeviceOptimizer steps an inner tensor
in the place of each parameter, some in host memory, by their order and sizes; loading makes new inner tensors, so none
is remembered. TransformerEngine's FusedAdam keeps dtypes of its own, some with a scale; its accessors would round once
more, so raw memory moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from ...moe.experts.optimizer_state import PARAMETER, Ranges
from ..attaching.description import AttachError

MAIN = "param"
"""Key of the float32 master, as in Megatron's own accessor."""
_AGAIN = "master_param"
"""Key under which the state has the inner tensor a second time, after the first step."""
_MASTER = "master_param"
"""TransformerEngine's key of the master, or of the 16 bits of it that a weight in bfloat16 lacks."""
_SCALED = (torch.float16,)
"""Dtypes whose numbers are to be multiplied by a scale. bfloat16 has one, too, which is always 1."""


# -- divided over ranks ------------------------------------------------------------------------------------------------


def ranks_of(leaf: Any) -> tuple[int, ...]:
    """The ranks that a distributed optimizer divides over, in their order."""
    return tuple(dist.get_process_group_ranks(leaf.data_parallel_group))


def stepped_by_all(leaf: Any) -> Iterator[Tensor]:
    """The model's parameters that a distributed optimizer steps, on this rank or on others."""
    for buffer in leaf.buffers:
        yield from buffer.param_index_map


def ranges_of(leaf: Any, parameter: Tensor) -> Ranges:
    """Return for each of `ranks_of` the elements of a flat parameter that it steps; empty ones are ``(0, 0)``."""
    buffer = next(buffer for buffer in leaf.buffers if parameter in buffer.param_index_map)
    begin, end, number = buffer.param_index_map[parameter]
    bucket, ranks = buffer.buckets[number], len(ranks_of(leaf))
    size = bucket.grad_data.numel() // ranks
    found = []
    for place in range(ranks):
        first, last = bucket.offset + place * size, bucket.offset + (place + 1) * size
        kept = max(first, begin) - begin, min(last, end) - begin
        found.append(kept if kept[0] < kept[1] else (0, 0))
    here, said = found[leaf.data_parallel_group.rank()], (0, 0)
    if parameter in leaf.model_param_gbuf_map:
        own = leaf._get_model_param_range_map(parameter)["param"]
        said = own.start, own.end
    if here != said or sum(last - first for first, last in found) != end - begin:
        raise AttachError(
            f"Megatron's distributed optimizer keeps elements {said} of {tuple(parameter.shape)} here, and its buckets "
            f"would have it {here}: this version of it divides them otherwise"
        )
    return tuple(found)


# -- in host memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OffloadedState:
    """What is kept for one parameter, wherever it is: ``state`` by sorted key, and ``copies``, other memory with the
    numbers of `MAIN` or of the parameter itself."""

    state: Mapping[str, Tensor]
    copies: Mapping[str, tuple[Tensor, ...]]


def is_offloaded(optimizer: Any) -> bool:
    return isinstance(optimizer, HybridDeviceOptimizer)


def offloaded_state(
    optimizer: HybridDeviceOptimizer, given: Tensor, parameter: Tensor, first: int = 0
) -> OffloadedState:
    """Return what is kept for a parameter of which the optimizer steps ``given``, from element ``first`` on."""
    own_place = parameter.data_ptr() + first * parameter.itemsize
    inner = optimizer.param_to_inner_param[given]
    state = {key: value for key, value in optimizer.state.get(given, {}).items() if key != _AGAIN}
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


# -- in dtypes of its own ----------------------------------------------------------------------------------------------


def is_precision_aware(leaf: Any) -> bool:
    """Return whether a leaf's state is in dtypes of its own, on the device."""
    return bool(getattr(leaf.config, "use_precision_aware_optimizer", False)) and not is_offloaded(leaf.optimizer)


def raw_state(optimizer: Any, given: Tensor) -> dict[str, Tensor]:
    """Return live memory by key, each scale after what it belongs to; empty before the first step."""
    found = {}
    for key, value in optimizer.state.get(given, {}).items():
        name = MAIN if key == _MASTER else key
        found[name] = value
        if value.dtype in _SCALED:
            found[f"{name}_scale"] = optimizer._scales[given][key]
    return found
