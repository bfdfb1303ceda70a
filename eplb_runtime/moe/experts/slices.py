"""Expert tensors that FSDP2 divides over the EDP ranks, along dimension 1 (a slice of each expert), or 0 (experts).

A DTensor is the whole rows, its local tensor, which FSDP keeps in place, what is here. Divided rows
(`distributed.ranks.Ranks`) are whole experts, of which each rank has fewer. Memory may be missing: loops of
reinforcement learning free that of weights between phases, and load it again. Experts of several ranks come together a
few rows at a time: a layer's experts may fill a device.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ...distributed.process_groups import ProcessGroups
from ...utils.checksums import as_bytes


def local(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor, else the tensor itself: live memory on this rank."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is allocated on this rank (True without elements); ``resize_(0)`` frees it."""
    held = local(tensor)
    return not held.numel() or held.untyped_storage().nbytes() > 0


class WeightMemory:
    """Weights by name, with the number of elements that each has had on this rank."""

    def __init__(self) -> None:
        self._weights: dict[str, tuple[tuple[Tensor, ...], int]] = {}

    def add(self, name: str, *parts: Tensor) -> None:
        """Remember a weight, of one tensor or several, and how many elements it has on this rank now."""
        self._weights[name] = parts, sum(local(part).numel() for part in parts)

    def why_freed(self) -> str:
        """Return in one line which remembered weight has no memory now, or another number of elements; "" if none.
        Between phases ``.data`` may be an empty tensor, which looks like a weight and would move as nothing."""
        for name, (parts, elements) in self._weights.items():
            if sum(local(part).numel() for part in parts) != elements or not all(map(has_memory, parts)):
                return f"{name}: its memory is freed or of another size: load it first"
        return ""


def is_sliced(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def keep_slices(model: nn.Module) -> None:
    """Reshard all FSDP2 modules of a model, in place: after a forward without a backward pass some hold whole tensors.
    FSDP2 does the same ahead of a ``state_dict``. Not collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def has_divide_factor(module: nn.Module) -> bool:
    """Return whether this is an FSDP2 module for which a divisor of gradients was set."""
    return any(group.gradient_divide_factor is not None for group in _fsdp_groups(module))


def unreduced(module: nn.Module) -> Iterator[Tensor]:
    """Yield an FSDP2 module's own parameters whose gradients it keeps whole to reduce them later, where no ``.grad``
    shows them (``set_requires_gradient_sync(False)``)."""
    for one in (parameter for group in _fsdp_groups(module) for parameter in group.fsdp_params):
        whole = getattr(one, "_unsharded_param", one.sharded_param)  # before the first forward there is none
        if one.unsharded_accumulated_grad is not None or whole.grad is not None:
            yield one.sharded_param


def _fsdp_groups(module: nn.Module) -> list[Any]:
    # FSDP2 has setters alone.
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def version(tensor: Tensor) -> tuple[int, int, int]:
    """Return numbers that change when a tensor is replaced, or it or its local tensor is written in place."""
    return id(tensor), tensor._version, local(tensor)._version


def columns(tensor: Tensor) -> slice:
    """Return this rank's part of dimension 1 of a DTensor that is sharded along it; of others ``slice(None)``."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    rank, width = tensor.device_mesh.get_local_rank(), local(tensor).shape[1]
    return slice(rank * width, (rank + 1) * width)


def why_not_slices(tensor: DTensor, edp_ranks: Sequence[int]) -> str:
    """Return "" if each EDP rank has a slice along dimension 1, in the order of ``edp_ranks``; else what is wrong."""
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    if tensor.device_mesh.ndim != 1 or ranks != list(edp_ranks):
        return f"is sharded over ranks {ranks}, but ranks {list(edp_ranks)} hold the same experts"
    if tensor.placements != (Shard(1),):
        return f"is placed as {tensor.placements[0]}, not along dimension 1"
    return ""


def why_not_rows(tensor: DTensor, place: int, holders: int) -> str:
    """Return "" if rank ``place`` of ``holders`` has its equal share of whole rows, in order; else what is wrong."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    rows, odd = divmod(tensor.shape[0], holders)
    wanted = (rows, *tensor.shape[1:]), (place * rows, *[0] * (tensor.ndim - 1))
    if not odd and (tuple(shape), tuple(offset)) == wanted:
        return ""
    return (
        f"of shape {tuple(tensor.shape)} has {tuple(shape)} from {tuple(offset)} on here, not whole experts, equally "
        f"many on each of the {holders} ranks"
    )


BLOCK_BYTES = 1 << 20
"""Rows that are smaller travel together up to this size."""


def in_logical_order(
    rows: Tensor, homes_RH: NDArray[np.integer], groups: ProcessGroups, device: torch.device | str | None = None
) -> Tensor:
    """Return ``[E, ...]``, all experts in logical order, in new memory on every rank (``device`` None: where ``rows``
    are). ``homes_RH``: the logical expert of each home row. Ranks broadcast rows; collective over all EP groups."""
    device = local(rows).device if device is None else torch.device(device)
    whole = torch.empty((homes_RH.size, *rows.shape[1:]), dtype=rows.dtype, device=device)
    row_bytes, here = max(1, rows.shape[1:].numel() * rows.element_size()), local(rows).shape[0]
    step = max(1, min(rows.shape[0], BLOCK_BYTES // row_bytes))
    block = torch.empty((step, *rows.shape[1:]), dtype=rows.dtype, device=local(rows).device)
    for first in range(0, here, step):
        part = block[: here - first]
        for position, rank in enumerate(groups.job.row_ranks):
            if position == groups.job.row_rank:
                whole_rows(rows, first, part, groups)
            dist.broadcast(as_bytes(part), rank, group=groups.rows)
            experts = torch.from_numpy(homes_RH[position, first : first + len(part)].astype("int64"))
            whole.index_copy_(0, experts.to(device), part.to(device))
    return whole


def rearranged(
    rows: Tensor, here_E: NDArray[np.integer], wanted_E: NDArray[np.integer], groups: ProcessGroups
) -> Tensor:
    """Return this rank's part of all rows in another order, in new memory, by one all-to-all. ``here_E``, ``wanted_E``:
    the logical expert of each row over all ranks, now and then. Collective over the job's ``row_ranks``."""
    job, count = groups.job, rows.shape[0]
    mine = slice(job.row_rank * count, (job.row_rank + 1) * count)
    going = np.argsort(wanted_E)[here_E[mine]]  # the row that each of ours becomes
    coming = np.argsort(here_E)[wanted_E[mine]]
    place_of = np.array([dist.get_group_rank(groups.rows, rank) for rank in job.row_ranks])
    to, of = place_of[going // count], place_of[coming // count]
    row_bytes = rows.shape[1:].numel() * rows.element_size()
    arriving, leaving = ((np.bincount(p, minlength=len(place_of)) * row_bytes).tolist() for p in (of, to))
    # Rows of a pair of ranks travel in the order in which they are wanted.
    sent = rows.detach()[torch.from_numpy(np.lexsort((going, to))).to(rows.device)].contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(as_bytes(arrived), as_bytes(sent), arriving, leaving, group=groups.rows)
    order = torch.from_numpy(np.lexsort((np.arange(count), of))).to(rows.device)
    return torch.empty_like(arrived).index_copy_(0, order, arrived)


def whole_rows(rows: Tensor, first: int, out: Tensor, groups: ProcessGroups) -> Tensor:
    """Fill ``out`` with this rank's rows from ``first`` on, and return it. Slices are put together from all EDP ranks,
    by broadcasts: then the call is collective over them."""
    here = local(rows)[first : first + out.shape[0]].detach()
    if not is_sliced(rows) or groups.expert_data is None or groups.job.divided_rows:
        return out.copy_(here)
    width, slice_ = here.shape[1], torch.empty_like(here, memory_format=torch.contiguous_format)
    for position, rank in enumerate(groups.job.edp_ranks):
        if rank == dist.get_rank():
            slice_.copy_(here)
        dist.broadcast(as_bytes(slice_), rank, group=groups.expert_data)
        out[:, position * width : (position + 1) * width] = slice_
    return out


def whole_row(rows: Tensor, row: int, groups: ProcessGroups) -> Tensor:
    """Return one expert of this rank, ``[1, ...]``: live memory; of slices a new tensor, by broadcasts of EDP ranks."""
    here = local(rows).detach()[row : row + 1]
    return whole_rows(rows, row, here.new_empty((1, *rows.shape[1:])), groups) if is_sliced(rows) else here
