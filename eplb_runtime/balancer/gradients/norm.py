"""Parts of one gradient norm over a model whose experts and stages are spread over ranks.

Each logical expert counts once, and sums are taken in logical order: the norm does not depend on the placement. An
expert whose gradient is cut over ranks has one that is equal to the bit wherever the cuts are: its flat gradient is
summed in fixed blocks of its own elements, each in one fixed tree of additions. A block that is cut is brought together
first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...distributed.process_groups import ProcessGroups
from ...moe.experts.optimizer_state import Ranges

BLOCK = 1 << 14
"""Elements that are summed in one tree; a power of two."""
_CHUNK = 1 << 24
"""Elements whose squares are in memory at once."""


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
    """Return `_power` of the norm of each expert parameter's gradient over all its experts: float64 scalars, equal on
    every rank. ``gradients``: ``(layer, gradient)`` of this rank's homes, or its slices (over ``slices``) or ranges of
    them, on every rank of ``groups.rows`` for the same parameters; ``logical_of_rows_LH``: the logical expert of each
    row."""
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
    """Powers of norms ``[N, ...]`` of parts -> of the whole ``[...]``; a NaN stays one."""
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
    """Power of the norm of each gradient that is equal on every rank, and one of all DTensors of each mesh."""
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
    """Powers of norms of a stage's gradients -> a scalar for all pipeline stages, equal bit for bit on every rank."""
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
    """Return for each of ``layers`` float64 ``[slots]``: squared 2-norms, equal on all ranks of the group.
    Collective."""
    slots = [(gradient, ranges) for one in layers for gradient, ranges in zip(one.gradients, one.ranges, strict=True)]
    counts = [-(-_length(ranges) // BLOCK) for _, ranges in slots]
    cuts = [_cut_blocks(ranges) for _, ranges in slots]
    sums = torch.zeros(sum(counts) + sum(map(len, cuts)) * BLOCK, dtype=torch.float64, device=device)
    of_blocks, of_cuts = sums[: sum(counts)], sums[sum(counts) :].view(-1, BLOCK)
    first_block = first_cut = 0
    for (gradient, ranges), count, cut in zip(slots, counts, cuts, strict=True):
        if gradient is not None and gradient.numel():
            blocks = of_blocks[first_block : first_block + count]
            _add(gradient, ranges[place], blocks, of_cuts[first_cut : first_cut + len(cut)], cut)
        first_block, first_cut = first_block + count, first_cut + len(cut)
    # Every entry is zero on all ranks but one: the sum is exact in any order.
    dist.all_reduce(sums, group=group)
    cut_at = [first + block for first, cut in zip(_firsts(counts), cuts, strict=True) for block in cut]
    if cut_at:
        of_blocks[torch.tensor(cut_at, device=device)] = _trees(of_cuts)
    squares = [_trees(_padded(blocks)).squeeze(0) for blocks in of_blocks.split(counts)]
    return [torch.stack(squares[first : first + len(one.ranges)]) for first, one in _places(layers)]


def _places(layers: Sequence[RangesOfSlots]) -> list[tuple[int, RangesOfSlots]]:
    return list(zip(_firsts([len(one.ranges) for one in layers]), layers, strict=True))


def _firsts(counts: Sequence[int]) -> list[int]:
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + count)
    return firsts[:-1]


def _length(ranges: Ranges) -> int:
    return max(end for _, end in ranges)


def _cut_blocks(ranges: Ranges) -> list[int]:
    """Blocks with elements of several ranks."""
    length = _length(ranges)
    inner = {place for first, end in ranges if first < end for place in (first, end) if 0 < place < length}
    return sorted({place // BLOCK for place in inner if place % BLOCK})


def _add(gradient: Tensor, kept: tuple[int, int], blocks: Tensor, of_cuts: Tensor, cut: Sequence[int]) -> None:
    """Put in the sums of blocks that are whole here, and the squares of what is here of others."""
    first, end = kept
    flat = gradient.reshape(-1)
    if flat.numel() != end - first:
        raise RuntimeError(f"a gradient has {flat.numel()} elements, and {end - first} of its expert are stepped here")
    for row, block in enumerate(cut):
        begin, stop = max(first, block * BLOCK), min(end, (block + 1) * BLOCK)
        if begin < stop:
            piece = flat[begin - first : stop - first].double()
            of_cuts[row, begin - block * BLOCK : stop - block * BLOCK] = piece.square()
    here = [block for block in range(first // BLOCK, -(-end // BLOCK)) if block not in cut]
    if not here:
        return
    for block in range(here[0], here[-1] + 1, _CHUNK // BLOCK):
        last = min(here[-1] + 1, block + _CHUNK // BLOCK)
        elements = flat[block * BLOCK - first : last * BLOCK - first].double().square_()
        padded = torch.nn.functional.pad(elements, (0, (last - block) * BLOCK - elements.numel()))
        blocks[block:last] = _trees(padded.view(-1, BLOCK))


def _padded(values: Tensor) -> Tensor:
    """``[1, N]``, N a power of two: zeros follow."""
    return torch.nn.functional.pad(values, (0, (1 << (len(values) - 1).bit_length()) - len(values))).unsqueeze(0)


def _trees(values: Tensor) -> Tensor:
    """The sum of each row ``[N, a power of two]``, by halves: additions of elements, which round the same however many
    rows there are. A kernel's own sum may not."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values.squeeze(1)
