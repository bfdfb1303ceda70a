"""Squared norms of experts whose gradients are cut over ranks: equal to the bit wherever the cuts are.

An expert's flat gradient is summed in fixed blocks of its own elements, each in one fixed tree of additions. A block
that is cut is brought together first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

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
