"""Sums of gradients over ranks, a few large messages at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks import gather_rows

BUCKET_BYTES = 32 << 20
"""Gradients of one dtype travel together up to this size."""


def average_gradients(
    parameters: Iterable[Tensor], group: dist.ProcessGroup, divisor: int, *, in_rank_order: bool = False
) -> None:
    """Sum the gradients over ``group`` and divide by ``divisor``, in place, a few large all-reduces at a time.

    A parameter without a gradient on some ranks takes part with zeros; one without a gradient on every rank stays so.

    Args:
        parameters: the same, in the same order, on every rank of the group.
        in_rank_order: sum each element in the order of the ranks, wherever it stands; for rows that change places.
    """
    parameters = [p for p in parameters if p.requires_grad]
    if not parameters:
        return
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    has_gradient = has_gradient.to(parameters[0].device)
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, present in zip(parameters, has_gradient.tolist(), strict=True):
        if not present:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        if in_rank_order:
            flat = sum_in_rank_order(flat, group)
        else:
            dist.all_reduce(flat, group=group)
        flat.div_(divisor)
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def sum_in_rank_order(flat_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of a group, each element added in the order of the ranks: ``[N]`` of the same dtype.

    An all-reduce adds in an order that depends on where in the buffer an element stands, and with three ranks or more
    the order shows in the last bits: an expert's gradient would depend on its slot. Here each rank sums one part, and
    as many bytes travel as in a ring all-reduce.
    """
    ranks = group.size()
    if ranks <= 2:  # a + b is b + a
        dist.all_reduce(flat_N, group=group)
        return flat_N
    part = -(-flat_N.numel() // ranks)
    padded = torch.nn.functional.pad(flat_N, (0, part * ranks - flat_N.numel()))
    parts_RN = torch.empty_like(padded)
    dist.all_to_all_single(parts_RN, padded, group=group)
    first, *others = parts_RN.view(ranks, part)
    for other in others:
        first.add_(other)
    return gather_rows(first, group).view(-1)[: flat_N.numel()]


def _buckets(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for same in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for gradient in same:
            if bucket and size + gradient.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.nbytes
        yield bucket
