"""Expert tensors that FSDP2 divides over the EDP ranks, along dimension 1 (a slice of each expert), or 0 (experts).

The rows of slices are experts all the same, so whatever moves, sums or saves rows does it with slices: a DTensor
is the whole rows, its local tensor, which FSDP keeps in place, for what is here. Divided rows
(`distributed.ranks.Ranks`) are whole experts, of which each rank has fewer. Memory may be missing: loops of
reinforcement learning free that of weights between phases, and load it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank: the live memory, outside of autograd."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def has_memory(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is there: jobs free weights between phases by ``resize_(0)`` of their storage."""
    held = local(tensor)
    return not held.numel() or held.untyped_storage().nbytes() > 0


class WeightMemory:
    """Weights by name, with the number of elements that each has had on this rank."""

    def __init__(self) -> None:
        self._weights: dict[str, tuple[tuple[Tensor, ...], int]] = {}

    def add(self, name: str, *parts: Tensor) -> None:
        """Remember a weight, of one tensor or several, with its size as it is now."""
        self._weights[name] = parts, sum(local(part).numel() for part in parts)

    def forget(self, name: str) -> None:
        """Forget a weight, if it is known."""
        self._weights.pop(name, None)

    def name_of_freed(self) -> str:
        """Return the name of the first weight that has no storage now, or another number of elements; empty if all
        have. Between phases ``.data`` may be an empty tensor, which looks like a weight and would move as nothing."""
        for name, (parts, elements) in self._weights.items():
            if sum(local(part).numel() for part in parts) != elements or not all(map(has_memory, parts)):
                return name
        return ""

    def why_freed(self) -> str:
        """Return a line that names such a weight; empty if there is none."""
        name = self.name_of_freed()
        return f"{name}: its memory is freed or of another size: load it first" if name else ""


def is_sliced(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def keep_slices(model: nn.Module) -> None:
    """After a forward without a backward pass (an evaluation) FSDP2 leaves whole tensors in some modules: put its
    slices back, as it does itself ahead of a ``state_dict``. Not collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def has_divide_factor(module: nn.Module) -> bool:
    """Return whether FSDP2 was set to divide this module's gradients by another number than its ranks."""
    if not isinstance(module, FSDPModule):
        return False
    state: Any = module._get_fsdp_state()  # type: ignore[operator]  # FSDP2 has a setter alone
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group is not None and group.gradient_divide_factor is not None for group in groups)


def version(tensor: Tensor) -> tuple[int, int, int]:
    """Return a number that changes when a tensor is replaced, or it or its slice is written."""
    return id(tensor), tensor._version, local(tensor)._version


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


def why_not_rows(tensor: DTensor, place: int, holders: int) -> str:
    """Empty if the rank at this place among so many has its share of whole rows, in order; else what is wrong."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    rows, odd = divmod(tensor.shape[0], holders)
    if not odd and (tuple(shape), tuple(offset)) == (
        (rows, *tensor.shape[1:]),
        (place * rows, *[0] * (tensor.ndim - 1)),
    ):
        return ""
    return (
        f"of shape {tuple(tensor.shape)} has {tuple(shape)} from {tuple(offset)} on here, not whole experts, equally "
        f"many on each of the {holders} ranks"
    )


def with_divided_gradients(parameters: Sequence[Tensor], divisor: float) -> Sequence[Tensor]:
    """Parameters as they are; the gradients of what is computed with these are divided on the way to them."""
    if divisor == 1 or not torch.is_grad_enabled():
        return parameters
    return [DividedGradient.apply(parameter, divisor) for parameter in parameters]


class DividedGradient(torch.autograd.Function):
    """A parameter as it is; its gradient divided, before it is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, divisor: float) -> Tensor:
        ctx.divisor = divisor
        return parameter.view_as(parameter)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.divisor, None
