"""Parts of one gradient norm over a model whose experts and stages are spread over ranks.

Each logical expert counts once, and sums are taken in logical order: the norm does not depend on the placement. Where
an expert's gradient is cut over ranks, its squares are added as whole numbers, which is exact in any order, so the norm
is equal to the bit wherever the cuts are.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...distributed.consensus import maxima
from ...distributed.process_groups import ProcessGroups
from ...moe.experts.optimizer_state import Ranges

_CHUNK = 1 << 24
"""Elements whose squares are in memory at once."""
_STEPS = 2.0**31
"""Steps of a square below one: sums of 2^32 squares are exact in int64."""
_MOST_EXPONENT = 500
"""Factors up to two to this power can be squared."""


@dataclass(frozen=True)
class RangesOfSlots:
    """This rank's ranges of the gradients of each slot of a layer, flat; None or empty: it has none."""

    gradients: Sequence[Tensor | None]
    ranges: Sequence[Ranges]


Gradient = Tensor | Sequence[Tensor | None] | RangesOfSlots
"""Gradients of all experts of a layer that are here, for one of their tensors; empty: there are none."""


def powers_of_experts(
    gradients: Sequence[tuple[int, Gradient]],
    logical_of_rows_LH: Tensor,
    num_experts: int,
    groups: ProcessGroups,
    slices: dist.ProcessGroup | None,
    norm_type: float,
) -> list[Tensor]:
    """Return the norm of each expert parameter's gradient over all its experts to the power ``norm_type`` (``inf``: the
    norm): float64 scalars, equal on every rank. Collective. ``gradients``: ``(layer, gradient)`` of this rank's homes,
    or its slices (over ``slices``) or ranges of them, on every rank of ``groups.rows`` for the same parameters;
    ``logical_of_rows_LH``: the logical expert of each row."""
    device = logical_of_rows_LH.device
    powers_NE = torch.zeros(len(gradients), num_experts, dtype=torch.float64, device=device)
    divided = [gradient for _, gradient in gradients if isinstance(gradient, RangesOfSlots)]
    of_divided: Iterator[Tensor] = iter(())
    if divided:
        assert groups.expert_data is not None
        place = groups.job.edp_ranks.index(groups.job.rank)
        of_divided = iter(squares_of_slots(divided, place, groups.expert_data, device))
    for index, (layer, gradient) in enumerate(gradients):
        if isinstance(gradient, RangesOfSlots):
            powers_NE[index, logical_of_rows_LH[layer]] = next(of_divided)
        elif len(gradient):
            norms = _norms_of_rows(gradient, powers_NE, norm_type)
            powers_NE[index, logical_of_rows_LH[layer]] = _power(norms, norm_type)
    if slices is not None:
        parts = [torch.empty_like(powers_NE) for _ in range(slices.size())]
        dist.all_gather(parts, powers_NE, group=slices)
        powers_NE = combined(torch.stack(parts), norm_type)
    # Every entry is zero on all of these ranks but one: the sum is exact in any order.
    dist.all_reduce(powers_NE, group=groups.rows)
    return list(combined(powers_NE.T, norm_type))


def combined(powers: Tensor, norm_type: float) -> Tensor:
    """Return the power of a norm, ``[...]``, from those of its N parts, ``[N, ...]``: the sum, or the maximum for
    ``inf``. A NaN stays one."""
    return powers.amax(dim=0) if math.isinf(norm_type) else powers.sum(dim=0)


def _power(norm: Tensor, norm_type: float) -> Tensor:
    """Return what `combined` takes of a norm."""
    return norm if math.isinf(norm_type) else norm.pow(norm_type)


def _norms_of_rows(gradient: Tensor | Sequence[Tensor | None], like: Tensor, norm_type: float) -> Tensor:
    """float64 ``[E/R]``."""
    if isinstance(gradient, Tensor):
        rows = gradient.flatten(1) if gradient.ndim > 1 else gradient.unsqueeze(1)
        return torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=torch.float64)
    norm = partial(torch.linalg.vector_norm, ord=norm_type, dtype=torch.float64)
    return torch.stack([like.new_zeros(()) if g is None else norm(g) for g in gradient])


def powers_of_dense(gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Return the norm to the power ``norm_type`` of each gradient that is equal on every rank, and one of all DTensors
    of each mesh: float64 scalars. Collective with DTensors."""
    gradients = [g.abs() if g.is_complex() else g for g in gradients]
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in gradients if not isinstance(g, DTensor)
    ]
    for mesh in dict.fromkeys(gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)):
        of_mesh = [gradient for gradient in gradients if isinstance(gradient, DTensor) and gradient.device_mesh == mesh]
        norm = torch.nn.utils.get_total_norm(of_mesh, norm_type)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).double())
    return [_power(norm, norm_type) for norm in norms]


def over_stages(powers: Sequence[Tensor], groups: ProcessGroups, device: torch.device, norm_type: float) -> Tensor:
    """Return the power of the norm over all pipeline stages, a float64 scalar equal bit for bit on every rank, from
    ``powers`` of this stage's norms. Collective with several stages."""
    job = groups.job
    of_stage = combined(torch.stack([torch.zeros((), dtype=torch.float64, device=device), *powers]), norm_type)
    if len(job.stage_sets) == 1:
        return of_stage
    of_stages = of_stage.new_zeros(len(job.stage_sets))
    # Ranks that hold the same stages have the same number: one of them gives it, so the sum is exact in any order. The
    # largest would be too, but for a NaN, which no comparison finds.
    if job.rank == job.data_ranks[0]:
        of_stages[job.stage_sets.index(job.stages)] = of_stage
    dist.all_reduce(of_stages, group=groups.everyone)
    return combined(of_stages, norm_type)


@torch.no_grad()
def squares_of_slots(
    layers: Sequence[RangesOfSlots], place: int, group: dist.ProcessGroup, device: torch.device
) -> list[Tensor]:
    """Return squared 2-norms of each slot over all ranges, float64 ``[slots]`` for each of ``layers``, equal on all
    ranks of the group. ``place``: this rank's number in the group. Collective. RuntimeError: a gradient has other
    elements than its range on this rank."""
    flats = []
    slots = (pair for one in layers for pair in zip(one.gradients, one.ranges, strict=True))
    for gradient, (first, end) in ((gradient, ranges[place]) for gradient, ranges in slots):
        if gradient is not None and gradient.numel() not in (0, end - first):
            raise RuntimeError(
                f"a gradient has {gradient.numel()} elements, and {end - first} of its expert are stepped on this rank"
            )
        flats.append(
            gradient.reshape(-1) if gradient is not None and gradient.numel() else torch.zeros(1, device=device)
        )
    largest = torch.stack([torch.linalg.vector_norm(flat, math.inf, dtype=torch.float64) for flat in flats])
    largest, is_nan = maxima(torch.stack([largest.nan_to_num(math.inf, math.inf), largest.isnan().double()]), group)
    # Powers of two from their bits: a function may round, and otherwise in another place of a vector.
    exponents = torch.frexp(largest).exponent.long().clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
    factors = ((1023 - exponents) << 52).view(torch.float64)
    numbers = torch.stack([_whole_numbers(flat, factor) for flat, factor in zip(flats, factors, strict=True)])
    dist.all_reduce(numbers, group=group)
    whole, rest = numbers.double().unbind(1)
    squares = (whole + rest / _STEPS) / _STEPS / factors / factors
    squares = torch.where(largest.isfinite(), squares, largest).masked_fill_(is_nan > 0, math.nan)
    return list(squares.split([len(one.ranges) for one in layers]))


def _whole_numbers(flat: Tensor, factor: Tensor) -> Tensor:
    """int64 ``[2]``: the sum of squares of elements times the factor (below one), in `_STEPS` and in steps of steps."""
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for part in flat.split(_CHUNK):
        squares = part.double().mul_(factor).square_().mul_(_STEPS)
        steps = squares.floor()
        total += torch.stack([steps.long().sum(), squares.sub_(steps).mul_(_STEPS).long().sum()])
    return total
