"""Parts of one gradient norm over a model whose experts and stages are spread over ranks.

Each logical expert counts once, and sums are taken in logical order: the norm does not depend on the placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...distributed.process_groups import ProcessGroups
from .norm_of_ranges import RangesOfSlots, squares_of_slots

Gradient = Tensor | Sequence[Tensor | None] | RangesOfSlots
"""Gradients of all experts of a layer that are here, for one of their tensors; empty: there are none."""


def squares_of_experts(
    gradients: Sequence[tuple[int, Gradient]],
    logical_of_rows_LH: Tensor,
    num_experts: int,
    groups: ProcessGroups,
    slices: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Return the squared 2-norm of each expert parameter's gradient over all its experts: float64 scalars, equal on
    every rank. ``gradients``: ``(layer, gradient)`` of this rank's homes, or its slices (over ``slices``) or ranges of
    them, on every rank of ``groups.rows`` for the same parameters; ``logical_of_rows_LH``: the logical expert of each
    row."""
    device = logical_of_rows_LH.device
    squares_NE = torch.zeros(len(gradients), num_experts, dtype=torch.float64, device=device)
    divided = [gradient for _, gradient in gradients if isinstance(gradient, RangesOfSlots)]
    of_divided: Iterator[Tensor] = iter(())
    if divided:
        assert groups.expert_data is not None
        place = groups.job.edp_ranks.index(groups.job.rank)
        of_divided = iter(squares_of_slots(divided, place, groups.expert_data, device))
    for index, (layer, gradient) in enumerate(gradients):
        if isinstance(gradient, RangesOfSlots):
            squares_NE[index, logical_of_rows_LH[layer]] = next(of_divided)
        elif len(gradient):
            squares_NE[index, logical_of_rows_LH[layer]] = _norms_of_rows(gradient, squares_NE).square()
    if slices is not None:
        dist.all_reduce(squares_NE, group=slices)
    # Every entry is zero on all of these ranks but one: the sum is exact in any order.
    dist.all_reduce(squares_NE, group=groups.rows)
    return list(squares_NE.sum(dim=1))


def _norms_of_rows(gradient: Tensor | Sequence[Tensor | None], like: Tensor) -> Tensor:
    """float64 ``[E/R]``."""
    if isinstance(gradient, Tensor):
        rows = gradient.flatten(1) if gradient.ndim > 1 else gradient.unsqueeze(1)
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    norms = [like.new_zeros(()) if g is None else torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradient]
    return torch.stack(norms)


def squares_of_dense(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Squared 2-norm of each gradient that is equal on every rank, and one of all that are sharded as DTensors."""
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    squares = [torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in whole]
    if sharded:
        norm = torch.nn.utils.get_total_norm(sharded)
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square())
    return squares


def sum_over_stages(square: Tensor, groups: ProcessGroups) -> Tensor:
    """A stage's scalar -> the sum over all pipeline stages, in their order, equal bit for bit on every rank."""
    job = groups.job
    if len(job.stage_sets) == 1:
        return square
    squares = square.new_zeros(len(job.stage_sets))
    # Ranks that hold the same stages have the same number: one of them gives it, so the sum is exact in any order. The
    # largest would be too, but for a NaN, which no comparison finds.
    if job.rank == job.data_ranks[0]:
        squares[job.stage_sets.index(job.stages)] = square
    dist.all_reduce(squares, group=groups.everyone)
    return squares.sum()
