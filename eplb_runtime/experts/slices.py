"""Expert tensors of which each EDP rank keeps a slice: FSDP2's shards along dimension 1.

Their rows are experts all the same, so whatever moves, sums or saves rows does it with slices: a DTensor stands for
the whole rows, its local tensor, which FSDP keeps in place, for what is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank: the live memory, outside of autograd."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sliced(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def columns(tensor: Tensor) -> slice:
    """Which part of dimension 1 is on this rank; all of it where a tensor is not sliced."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    width = local(tensor).shape[1]
    return slice(tensor.device_mesh.get_local_rank() * width, (tensor.device_mesh.get_local_rank() + 1) * width)


def why_not_slices(tensor: DTensor, edp_ranks: Sequence[int]) -> str:
    """Empty if each EDP rank has a slice along dimension 1, in the order of the EP groups; else what is wrong."""
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    if tensor.device_mesh.ndim != 1 or ranks != list(edp_ranks):
        return f"is sharded over ranks {ranks}, but ranks {list(edp_ranks)} hold the same experts"
    if tensor.placements != (Shard(1),):
        return f"is placed as {tensor.placements[0]}, not along dimension 1"
    return ""


class DividedGradient(torch.autograd.Function):
    """A parameter as it is; its gradient divided, before whoever sums it over ranks sees it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, divisor: float) -> Tensor:
        ctx.divisor = divisor
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.divisor, None
