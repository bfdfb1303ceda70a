"""Rows by slot for grouped products that want each slot's rows to begin at a multiple of some number (16 for float8, 32
or 128 for MXFP8): zeros fill up every slot, and what comes of them is dropped.

One pass over the rows before the experts and one after them. No host sync: how many rows there are may be known on the
device only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .compute import Compute, SlotCounts


@dataclass(frozen=True)
class Aligned:
    """A `Compute` around one that wants each slot's rows filled up to a multiple; where only the device knows how many
    come, the last slot has what is left of the memory, too."""

    compute: Compute
    multiple: int

    def __call__(self, rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor]) -> Tensor:
        """As of `Compute`."""
        aligned_S, places = aligned(counts_S, self.multiple, rows_MD.shape[0])
        offsets_S, ends_S = counts_S.offsets_S, aligned_S.offsets_S
        rows_PD = _Regroup.apply(rows_MD.contiguous(), offsets_S, ends_S, offsets_S, places)
        out_PD = self.compute(rows_PD, aligned_S, parameters)
        if out_PD.shape[0] != places:
            raise ValueError(f"experts gave {out_PD.shape[0]} rows for {places}")
        out_MD: Tensor = _Regroup.apply(out_PD.contiguous(), ends_S, offsets_S, offsets_S, rows_MD.shape[0])
        return out_MD


def aligned(counts_S: SlotCounts, multiple: int, rows: int) -> tuple[SlotCounts, int]:
    """What ``rows`` rows of these counts become, and how many places that takes."""
    sizes_S = (counts_S.counts_S + (multiple - 1)) // multiple * multiple
    ends_S = sizes_S.cumsum(0, dtype=torch.int32)
    if counts_S.on_host is None:
        places = -(-(rows + min(rows, ends_S.shape[0]) * (multiple - 1)) // multiple) * multiple
        ends_S[-1] = places
        return SlotCounts(ends_S, None), places
    sizes = [-(-count // multiple) * multiple for count in counts_S.on_host]
    return SlotCounts(ends_S, sizes), sum(sizes)


class _Regroup(torch.autograd.Function):
    """Rows from one spacing to another; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, source_ND: Tensor, from_S: Tensor, to_S: Tensor, offsets_S: Tensor, places: int) -> Tensor:
        ctx.save_for_backward(from_S, to_S, offsets_S)
        ctx.rows = source_ND.shape[0]
        return regroup(source_ND, from_S, to_S, offsets_S, places)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor | None, ...]:
        from_S, to_S, offsets_S = ctx.saved_tensors
        grad_ND: Tensor = _Regroup.apply(grad_PD.contiguous(), to_S, from_S, offsets_S, ctx.rows)
        return grad_ND, None, None, None, None


def regroup(source_ND: Tensor, from_S: Tensor, to_S: Tensor, offsets_S: Tensor, places: int) -> Tensor:
    """Return ``[places, D]``: rows of slots that end at ``from_S``, moved to slots that end at ``to_S``."""
    place_P = torch.arange(places, dtype=torch.int32, device=source_ND.device)
    slot_P = torch.searchsorted(to_S, place_P, right=True).clamp_(max=to_S.shape[0] - 1)
    zero = to_S.new_zeros(1)
    begins, sizes_S = [torch.cat([zero, ends[:-1]]) for ends in (from_S, to_S)], torch.diff(offsets_S, prepend=zero)
    number_P = place_P - begins[1][slot_P]
    there_P = number_P < sizes_S[slot_P]
    if not source_ND.shape[0]:
        return source_ND.new_zeros(places, source_ND.shape[1])
    row_P = torch.where(there_P, begins[0][slot_P] + number_P, 0)
    return torch.where(there_P[:, None], source_ND[row_P], 0)
