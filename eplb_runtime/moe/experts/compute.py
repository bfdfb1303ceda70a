"""The experts of one layer that a rank computes, without copies: what dispatch calls with the rows that arrived.
(With replica slots, `replicas/compute.py` takes its place.) And rows by slot for grouped products that want each slot's
rows to begin at a multiple of some number (16 for float8, 32 or 128 for MXFP8).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class SlotCounts:
    """How many rows each local slot has, in the form that the caller can use without a sync.

    Args:
        offsets_S: int32, on the rows' device: where each slot's rows end, as grouped GEMMs take it.
        on_host: the numbers; None where only the device knows them.
    """

    offsets_S: Tensor
    on_host: Sequence[int] | None

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> Self:
        """Return `SlotCounts` of numbers on the host. Offsets are copied to the device without waiting."""
        ends = torch.from_numpy(np.cumsum(counts, dtype=np.int32))
        return cls(ends.to(device, non_blocking=True), counts)

    @property
    def counts_S(self) -> Tensor:
        """Return int32 on the rows' device: how many rows each slot has."""
        return torch.diff(self.offsets_S, prepend=self.offsets_S.new_zeros(1))

    def known(self) -> Sequence[int]:
        """Return how many rows each slot has, on the host; the first call waits for the device if only it knows."""
        return self._waited_for if self.on_host is None else self.on_host

    @cached_property
    def _waited_for(self) -> list[int]:
        counts: list[int] = self.counts_S.tolist()
        return counts

    def slot_of_rows(self, rows: int) -> Tensor:
        """Return int64 ``[M]``: the local slot of each row. Rows past the last slot's end belong to it, too."""
        place_M = torch.arange(rows, dtype=torch.int32, device=self.offsets_S.device)
        return torch.searchsorted(self.offsets_S, place_M, right=True).clamp_(max=self.offsets_S.shape[0] - 1)


class Compute(Protocol):
    """The host's way to run rows through slots."""

    def __call__(self, rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor], /) -> Tensor:
        """Rows ``[M, D]`` by local slot, rows of each slot, weights of all slots -> ``[M, D]``, no router weights."""


class LocalExperts:
    """The slots of one layer here: the host's code, the live weights, and what their gradients are divided by."""

    def __init__(self, compute: Compute, parameters: Callable[[], Sequence[Tensor]], divisor: float = 1.0) -> None:
        self._compute = compute
        self._parameters = parameters
        self._divisor = divisor

    def __call__(self, rows_MD: Tensor, counts_S: SlotCounts, weights_M: Tensor | None) -> Tensor:
        """Return ``[M, D]``, unweighted results of the rows that arrived here, ordered by slot; on every rank, also
        with none. ``weights_M``: router weights, if gradients will come unweighted."""
        parameters = with_divided_gradients(self._parameters(), self._divisor)
        return run_rows(self._compute, rows_MD, counts_S, parameters, weights_M)


def with_divided_gradients(parameters: Sequence[Tensor], divisor: float) -> Sequence[Tensor]:
    """Return the parameters; or, if gradients are enabled and ``divisor`` is not 1, new views of them, each with a hook
    that divides the gradient that comes through the view."""
    if divisor == 1 or not torch.is_grad_enabled():
        return parameters
    views = [parameter.view_as(parameter) for parameter in parameters]
    for view in views:
        if view.requires_grad:
            view.register_hook(lambda gradient: gradient / divisor)
    return views


def live_tensors(module: nn.Module, names: Sequence[str]) -> Callable[[], list[Tensor]]:
    """Return a function that gives the tensors which ``module`` has under these dotted names when it is called."""
    getters = [attrgetter(name) for name in names]
    return lambda: [get(module) for get in getters]


def run_rows(
    compute: Compute, rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor], weights_M: Tensor | None
) -> Tensor:
    """Return ``[M, D]``, what ``compute`` gives. Without rows it is not called; the backward pass then gives parameters
    zero gradients. With ``weights_M`` gradients are weighted (`weigh_gradients`)."""
    out_MD = compute(rows_MD, counts_S, parameters) if rows_MD.shape[0] else _Idle.apply(rows_MD, *parameters)
    return out_MD if weights_M is None else weigh_gradients(out_MD, weights_M)


def weigh_gradients(out_MD: Tensor, weights_M: Tensor) -> Tensor:
    """Return ``out_MD`` with the same values. In the backward pass its gradient is multiplied by ``weights_M``, and
    ``weights_M`` gets a gradient, for which ``out_MD`` is kept."""
    weighed: Tensor = _WeighGradients.apply(out_MD, weights_M)
    return weighed


class _WeighGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_MD: Tensor, weights_M: Tensor) -> Tensor:
        ctx.save_for_backward(out_MD if ctx.needs_input_grad[1] else None, weights_M)
        ctx.dtype = out_MD.dtype
        return out_MD.view_as(out_MD)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, Tensor | None]:
        out_MD, weights_M = ctx.saved_tensors
        grad_MD = grad_MD.to(torch.promote_types(ctx.dtype, weights_M.dtype))
        grad_weights_M = (grad_MD * out_MD).sum(dim=1).to(weights_M.dtype) if ctx.needs_input_grad[1] else None
        grad_out_MD = (grad_MD * weights_M.unsqueeze(1)).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return grad_out_MD, grad_weights_M


class _Idle(torch.autograd.Function):
    """Stands in for the experts on a rank that no token reached: keeps the graph whole, so that this rank enters the
    collectives of the backward pass, and gives its parameters zero gradients, as a batch without their tokens would."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return rows.clone()

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        zeros = (torch.zeros_like(p) if need else None for p, need in zip(ctx.saved_tensors, needed, strict=True))
        return grad, *zeros


@dataclass(frozen=True)
class Aligned:
    """A `Compute` around one that wants each slot's rows filled up, with zeros, to a multiple; what comes of them is
    dropped. No host sync: where only the device knows each slot's number, the last slot has all memory that is left."""

    compute: Compute
    multiple: int

    def __call__(self, rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor]) -> Tensor:
        rows, width = rows_MD.shape
        aligned_S, places = aligned(counts_S, self.multiple, rows)
        shift_S = aligned_S.offsets_S - aligned_S.counts_S - (counts_S.offsets_S - counts_S.counts_S)
        place_M = torch.arange(rows, device=rows_MD.device) + shift_S[counts_S.slot_of_rows(rows)]
        out_PD = self.compute(rows_MD.new_zeros(places, width).index_copy(0, place_M, rows_MD), aligned_S, parameters)
        if out_PD.shape[0] != places:
            raise ValueError(f"experts gave {out_PD.shape[0]} rows for {places}")
        return out_PD.index_select(0, place_M)


def aligned(counts_S: SlotCounts, multiple: int, rows: int) -> tuple[SlotCounts, int]:
    """Return counts with each slot's rows rounded up to ``multiple``, and their sum. If the host does not know the
    counts, the sum is the most that ``rows`` rows can need, and the last slot has all that the others leave."""
    sizes_S = (counts_S.counts_S + (multiple - 1)) // multiple * multiple
    ends_S = sizes_S.cumsum(0, dtype=torch.int32)
    if counts_S.on_host is None:
        places = -(-(rows + min(rows, ends_S.shape[0]) * (multiple - 1)) // multiple) * multiple
        ends_S[-1] = places
        return SlotCounts(ends_S, None), places
    sizes = [-(-count // multiple) * multiple for count in counts_S.on_host]
    return SlotCounts(ends_S, sizes), sum(sizes)
