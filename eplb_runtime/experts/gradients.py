"""Gradients of a model whose experts are spread over ranks: average the dense ones, and one norm over all of it.

The norm counts each logical expert once and sums in logical order, so it does not depend on where experts stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 32 << 20
"""Gradients of one dtype travel together up to this size."""


def average_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup, divisor: int) -> None:
    """Sum the gradients over ``group`` and divide by ``divisor``, in place, a few large all-reduces at a time.

    A parameter without a gradient on some ranks takes part with zeros; one without a gradient on every rank stays so.

    Args:
        parameters: the same, in the same order, on every rank of the group.
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
        dist.all_reduce(flat, group=group)
        flat.div_(divisor)
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


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


@torch.no_grad()
def total_norm(
    expert_gradients: Sequence[tuple[int, Tensor]],
    logical_of_rows_LH: Tensor,
    num_experts: int,
    dense_gradients: Sequence[Tensor],
    group: dist.ProcessGroup,
    slices: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """The 2-norm over dense gradients and all logical experts, float64 scalar, equal bit for bit on every rank.

    Args:
        expert_gradients: ``(layer, gradient [E/R, ...])`` of this rank's homes, or its slices of them.
        logical_of_rows_LH: int64 ``[L, E/R]``: the logical expert of each row.
        num_experts: E.
        dense_gradients: already averaged, equal on every rank, or sharded as DTensors.
        group: one EP group.
        slices: the EDP ranks, where each has a slice; else None.
    """
    squares = torch.zeros(len(expert_gradients), num_experts, dtype=torch.float64, device=device)
    for index, (layer, gradient) in enumerate(expert_gradients):
        per_row = torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=torch.float64)
        squares[index, logical_of_rows_LH[layer]] = per_row.square()
    if slices is not None:
        dist.all_reduce(squares, group=slices)
    # Every entry is zero on all ranks of an EP group but one: the sum is exact in any order.
    dist.all_reduce(squares, group=group)
    sharded = [gradient for gradient in dense_gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in dense_gradients if not isinstance(gradient, DTensor)]
    dense = [torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in whole]
    if sharded:
        norm = torch.nn.utils.get_total_norm(sharded)
        dense.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square())
    parts = [squares.sum(dim=1), *(part.reshape(1) for part in dense)]
    return torch.cat(parts).sum().sqrt()
