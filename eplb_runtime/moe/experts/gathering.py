"""Bring experts of several ranks together, a few rows at a time: on every rank, in logical order.

Nothing here holds more than what it returns and one block of rows: a layer's experts may fill a device.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...distributed.process_groups import ProcessGroups
from ...utils.checksums import as_bytes
from .slices import is_sliced, local

BLOCK_BYTES = 1 << 20
"""Rows that are smaller travel together up to this size."""


def rows_per_call(rows: Tensor) -> int:
    """How many rows travel together: as many as fit into a block, at least one."""
    row_bytes = max(1, rows.shape[1:].numel() * rows.element_size())
    return max(1, min(rows.shape[0], BLOCK_BYTES // row_bytes))


def in_logical_order(
    rows: Tensor, homes_RH: NDArray[np.integer], groups: ProcessGroups, device: torch.device | str | None = None
) -> Tensor:
    """Return ``[E, ...]`` on every rank from the home rows of each (``homes_RH``: their logical experts). Collective
    over all EP groups."""
    device = local(rows).device if device is None else torch.device(device)
    whole = torch.empty((homes_RH.size, *rows.shape[1:]), dtype=rows.dtype, device=device)
    step, here = rows_per_call(rows), local(rows).shape[0]
    block = torch.empty((step, *rows.shape[1:]), dtype=rows.dtype, device=local(rows).device)
    for first in range(0, here, step):
        count = min(step, here - first)
        for position, rank in enumerate(groups.job.row_ranks):
            if position == groups.job.row_rank:
                whole_rows(rows, first, block[:count], groups)
            dist.broadcast(as_bytes(block[:count]), rank, group=groups.rows)
            experts = torch.from_numpy(homes_RH[position, first : first + count].astype("int64"))
            whole.index_copy_(0, experts.to(device), block[:count].to(device))
    return whole


def rearranged(
    rows: Tensor, here_E: NDArray[np.integer], wanted_E: NDArray[np.integer], groups: ProcessGroups
) -> Tensor:
    """Return this rank's part of all rows in another order: new memory, one exchange. ``here_E``, ``wanted_E``: the
    logical expert of each row over all ranks. Collective over the job's ``row_ranks``."""
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
    """Fill ``out`` with rows of this rank from ``first`` on; slices come from the EDP ranks (collective over them)."""
    here = local(rows)[first : first + out.shape[0]].detach()
    if not is_sliced(rows) or groups.expert_data is None or groups.job.divided_rows:
        return out.copy_(here)
    width = here.shape[1]
    slice_ = torch.empty(here.shape, dtype=here.dtype, device=here.device)
    for position, rank in enumerate(groups.job.edp_ranks):
        if rank == dist.get_rank():
            slice_.copy_(here)
        dist.broadcast(as_bytes(slice_), rank, group=groups.expert_data)
        out[:, position * width : (position + 1) * width] = slice_
    return out


def whole_row(rows: Tensor, row: int, groups: ProcessGroups) -> Tensor:
    """One expert of this rank, ``[1, ...]``: live memory, of slices a new tensor (collective over the EDP ranks)."""
    here = local(rows).detach()[row : row + 1]
    return whole_rows(rows, row, here.new_empty((1, *rows.shape[1:])), groups) if is_sliced(rows) else here
