"""State that Megatron's distributed optimizer keeps of an expert where several ranks hold the same ones.

It divides each bucket of a flat buffer evenly over them, wherever experts begin and end. Each steps what it has of an
expert, whole or cut, and sends the weights to the others in the next gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...moe.experts.optimizer_state import Ranges
from ..attaching.description import AttachError


def is_divided(leaf: Any) -> bool:
    """Return whether a distributed optimizer divides what it steps over several ranks."""
    return len(ranks_of(leaf)) > 1


def ranks_of(leaf: Any) -> tuple[int, ...]:
    """The ranks that a distributed optimizer divides over, in their order."""
    return tuple(dist.get_process_group_ranks(leaf.data_parallel_group))


def stepped_by_all(leaf: Any) -> Iterator[Tensor]:
    """The model's parameters that a distributed optimizer steps, on this rank or on others."""
    for buffer in leaf.buffers:
        yield from buffer.param_index_map


def ranges_of(leaf: Any, parameter: Tensor) -> Ranges:
    """For each of `ranks_of`, the elements of a flat parameter that it steps; empty ones are ``(0, 0)``.

    Raises:
        AttachError: this rank's is not what the optimizer itself says.
    """
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
