"""The water-filling split of all layers in one kernel, a program a layer: for counts that never leave the device.

The same integers as `water_filling.split_totals`, which is the reference. Experts of one color share no rank, so a
sweep takes a color at once: the result is that of the sweep in order. A layer's shares stay in registers; rank loads
lie in memory, where a color's copies find theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...utils.triton import jit, power_of_2, tl
from .tables import SplitTables
from .water_filling import FRACTION_BITS, MOMENTUM_EIGHTHS, MOMENTUM_FROM, SWEEPS, TOLERANCE_BITS


@dataclass(frozen=True, eq=False)
class KernelTables:
    """`SplitTables` on a device.

    Args:
        first_rank_LE, order_LN, ranks_LNC, count_LN, color_LN: int32, as there.
        colors_L: int32, how many colors a layer has.
        num_ranks: R.
        copies: C.
    """

    first_rank_LE: Tensor
    order_LN: Tensor
    ranks_LNC: Tensor
    count_LN: Tensor
    color_LN: Tensor
    colors_L: Tensor
    num_ranks: int
    copies: int

    @classmethod
    def of(cls, tables: SplitTables, device: torch.device | str = "cpu") -> KernelTables:
        names = ("first_rank_LE", "order_LN", "ranks_LNC", "count_LN", "color_LN")
        first, *others = [torch.from_numpy(np.ascontiguousarray(getattr(tables, name))).to(device) for name in names]
        order, ranks_of_copies, count, color = others
        colors = torch.from_numpy(tables.color_LN.max(axis=1, initial=-1) + 1).to(device)
        return cls(
            first,
            order,
            ranks_of_copies,
            count,
            color,
            colors,
            tables.num_ranks,
            tables.copy_slot_LEC.shape[2],
        )

    def each(self) -> Iterator[KernelTables]:
        """Each layer's, in the same memory."""
        names = ("first_rank_LE", "order_LN", "ranks_LNC", "count_LN", "color_LN", "colors_L")
        for layer in range(len(self.colors_L)):
            yield replace(self, **{name: getattr(self, name)[layer : layer + 1] for name in names})


def launch_split_totals(totals_LE: Tensor, tables: KernelTables, quota_LEC: Tensor, *, sweeps: int = SWEEPS) -> None:
    """`water_filling.split_totals` on the device, for equally fast ranks. No host sync: a CUDA graph can hold it.

    Args:
        totals_LE: int64 ``[L, E]``, contiguous; sums below 2 ** 60.
        tables: of all these layers.
        quota_LEC: int64 ``[L, E, C]``, contiguous, written.
        sweeps: as there; 0: the even split.
    """
    (layers, experts), ranks = totals_LE.shape, power_of_2(tables.num_ranks)
    loads_L2R = torch.empty(layers, 2, ranks, dtype=torch.int64, device=totals_LE.device)
    _split[(layers,)](
        totals_LE,
        tables.first_rank_LE,
        tables.order_LN,
        tables.ranks_LNC,
        tables.count_LN,
        tables.color_LN,
        tables.colors_L,
        loads_L2R,
        quota_LEC,
        experts,
        tables.order_LN.shape[1],
        tables.num_ranks,
        sweeps,
        (1 << 62) // (tables.copies + 1),
        C=tables.copies,
        EXPERTS=power_of_2(experts),
        REPLICATED=power_of_2(tables.order_LN.shape[1]),
        COPIES=power_of_2(tables.copies),
        RANKS=ranks,
        FRACTION=FRACTION_BITS,
        EIGHTHS=MOMENTUM_EIGHTHS,
        FROM=MOMENTUM_FROM,
        TOLERANCE=TOLERANCE_BITS,
    )


@jit
def _split(  # type: ignore[no-untyped-def]
    totals,
    first_ranks,
    order,
    ranks,
    counts,
    colors,
    num_colors,
    loads,
    quotas,
    experts,
    replicated,
    num_ranks,
    sweeps,
    room,
    C: tl.constexpr,
    EXPERTS: tl.constexpr,
    REPLICATED: tl.constexpr,
    COPIES: tl.constexpr,
    RANKS: tl.constexpr,
    FRACTION: tl.constexpr,
    EIGHTHS: tl.constexpr,
    FROM: tl.constexpr,
    TOLERANCE: tl.constexpr,
):
    layer = tl.program_id(0).to(tl.int64)
    base_R, load_R = loads + layer * 2 * RANKS, loads + layer * 2 * RANKS + RANKS
    rank_R = tl.arange(0, RANKS)
    real_R = rank_R < num_ranks
    row_N = tl.arange(0, REPLICATED)
    listed_N = row_N < replicated
    count_N = tl.load(counts + layer * replicated + row_N, mask=listed_N, other=0)
    expert_N = tl.load(order + layer * replicated + row_N, mask=count_N > 1, other=0).to(tl.int64)
    color_N = tl.load(colors + layer * replicated + row_N, mask=count_N > 1, other=-1)
    copy_C = tl.arange(0, COPIES)
    exists_NC = (copy_C[None, :] < count_N[:, None]) & (count_N > 1)[:, None]
    place_NC = (layer * replicated + row_N)[:, None] * C + copy_C[None, :]
    rank_NC = tl.load(ranks + place_NC, mask=exists_NC, other=0)

    # What stands on each rank whatever the split.
    tl.store(base_R + rank_R, tl.zeros((RANKS,), dtype=tl.int64))
    expert_E = tl.arange(0, EXPERTS)
    known_E = expert_E < experts
    tokens_E = tl.load(totals + layer * experts + expert_E, mask=known_E, other=0)
    for copy in tl.static_range(C):
        first_E = tokens_E if copy == 0 else tokens_E * 0
        tl.store(quotas + (layer * experts + expert_E) * C + copy, first_E, mask=known_E)
    tl.debug_barrier()
    first_E = tl.load(first_ranks + layer * experts + expert_E, mask=known_E, other=0)
    tl.atomic_add(base_R + first_E, tokens_E, mask=known_E)
    tokens_N = tl.load(totals + layer * experts + expert_N, mask=count_N > 1, other=0)
    first_N = tl.load(first_ranks + layer * experts + expert_N, mask=count_N > 1, other=0)
    tl.atomic_add(base_R + first_N, -tokens_N, mask=count_N > 1)
    tl.debug_barrier()
    fixed_R = tl.load(base_R + rank_R)
    even_NC = _even(tokens_N, count_N, exists_NC, copy_C)
    even_peak = _peak(load_R, rank_R, fixed_R, rank_NC, exists_NC, even_NC)

    # In fixed point, with as many bits as sums leave room for.
    total = tl.sum(tokens_E, axis=0)
    bit = tl.arange(0, 32).to(tl.int64)
    bits = tl.max(tl.where((bit <= FRACTION) & (total <= (room >> bit)), bit, 0), axis=0)
    share_NC = _even(tokens_N << bits, count_N, exists_NC, copy_C)
    _peak(load_R, rank_R, fixed_R << bits, rank_NC, exists_NC, share_NC)

    load = tl.load(load_R + rank_R, mask=real_R, other=0)
    enough = tl.sum(load, axis=0) // num_ranks
    enough += enough >> TOLERANCE
    before_NC = share_NC
    sweep = 0
    going = sweeps > 0
    while going:
        if _is_enough(load_R, rank_R, real_R, rank_NC, exists_NC, share_NC, enough, TOLERANCE):
            going = sweep < 0
        else:
            if sweep >= FROM:
                last_NC = share_NC
                share_NC = _go_on(load_R, rank_NC, exists_NC, share_NC, before_NC, copy_C, EIGHTHS)
                before_NC = last_NC
            else:
                before_NC = share_NC
            for color in range(tl.load(num_colors + layer)):
                mine_NC = exists_NC & (color_N == color)[:, None]
                share_NC = _refill(load_R, rank_NC, mine_NC, share_NC, count_N, COPIES)
            sweep += 1
            going = sweep < sweeps

    whole_NC = _round(share_NC, bits, exists_NC, copy_C, COPIES)
    worse = _peak(load_R, rank_R, fixed_R, rank_NC, exists_NC, whole_NC) > even_peak
    best_NC = tl.where(worse | (sweeps == 0), even_NC, whole_NC)
    tl.store(quotas + (layer * experts + expert_N)[:, None] * C + copy_C[None, :], best_NC, mask=exists_NC)


@jit
def _even(total_N, count_N, exists_NC, copy_C):  # type: ignore[no-untyped-def]
    copies_N = tl.maximum(count_N, 1).to(tl.int64)
    each_N = total_N // copies_N
    more_N = total_N - each_N * copies_N
    return tl.where(exists_NC, each_N[:, None] + (copy_C[None, :] < more_N[:, None]).to(tl.int64), 0)


@jit
def _peak(load_R, rank_R, fixed_R, rank_NC, exists_NC, share_NC):  # type: ignore[no-untyped-def]
    """The busiest rank's load, and all of them in memory."""
    tl.debug_barrier()
    tl.store(load_R + rank_R, fixed_R)
    tl.debug_barrier()
    tl.atomic_add(load_R + rank_NC, share_NC, mask=exists_NC)
    tl.debug_barrier()
    return tl.max(tl.load(load_R + rank_R), axis=0)


@jit
def _is_enough(  # type: ignore[no-untyped-def]
    load_R, rank_R, real_R, rank_NC, exists_NC, share_NC, enough, TOLERANCE: tl.constexpr
):
    """Whether the busiest rank is near the mean, or proven to be near the optimum (`water_filling.is_optimal`)."""
    load = tl.load(load_R + rank_R, mask=real_R, other=0)
    peak = tl.max(load, axis=0)
    floor = peak - (peak >> TOLERANCE)
    busy_R = real_R & (load >= floor)
    locked = tl.sum(tl.where(busy_R, load, 0), axis=0)
    crowd = tl.sum(busy_R.to(tl.int64), axis=0)
    hot_NC = exists_NC & (tl.load(load_R + rank_NC, mask=exists_NC, other=0) >= floor)
    inside_N = tl.sum(tl.where(hot_NC, share_NC, 0), axis=1)
    escapes_N = tl.sum((exists_NC & (hot_NC == 0)).to(tl.int32), axis=1) > 0
    locked -= tl.sum(tl.where(escapes_N, inside_N, 0), axis=0)
    return (peak <= enough) | (locked >= floor * crowd)


@jit
def _go_on(load_R, rank_NC, exists_NC, share_NC, before_NC, copy_C, EIGHTHS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each expert's split farther the way it came, where nothing falls below zero."""
    others_NC = exists_NC & (copy_C > 0)[None, :]
    step_NC = tl.where(others_NC, ((share_NC - before_NC) * EIGHTHS) >> 3, 0)
    step_NC = tl.where(exists_NC & (copy_C == 0)[None, :], -tl.sum(step_NC, axis=1)[:, None], step_NC)
    least_N = tl.min(share_NC + step_NC, axis=1)
    step_NC = tl.where((least_N >= 0)[:, None], step_NC, 0)
    tl.debug_barrier()
    tl.atomic_add(load_R + rank_NC, step_NC, mask=exists_NC)
    tl.debug_barrier()
    return share_NC + step_NC


@jit
def _refill(load_R, rank_NC, mine_NC, share_NC, count_N, COPIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The best split for each expert of a color, the others held still (`water_filling.sweep_copies`)."""
    base_NC = tl.load(load_R + rank_NC, mask=mine_NC, other=0) - share_NC
    water_N = tl.sum(tl.where(mine_NC, base_NC + share_NC, 0), axis=1)
    used_N = tl.maximum(count_N, 1).to(tl.int64)
    left_N = water_N
    for _ in tl.static_range(COPIES - 1):
        under_NC = mine_NC & (base_NC <= (left_N // used_N)[:, None])
        used_N = tl.maximum(tl.sum(under_NC.to(tl.int64), axis=1), 1)
        left_N = water_N - tl.sum(tl.where(mine_NC & (under_NC == 0), base_NC, 0), axis=1)
    level_N = left_N // used_N
    more_N = left_N - level_N * used_N
    wet_NC = mine_NC & (base_NC <= level_N[:, None])
    first_NC = tl.cumsum(wet_NC.to(tl.int64), axis=1) <= more_N[:, None]
    new_NC = tl.where(wet_NC, level_N[:, None] - base_NC + first_NC.to(tl.int64), 0)
    tl.debug_barrier()
    tl.store(load_R + rank_NC, base_NC + new_NC, mask=mine_NC)
    tl.debug_barrier()
    return tl.where(mine_NC, new_NC, share_NC)


@jit
def _round(share_NC, bits, exists_NC, copy_C, COPIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whole tokens: largest remainder, ties to the earlier copy."""
    whole_NC = share_NC >> bits
    rest_NC = tl.where(exists_NC, share_NC - (whole_NC << bits), -1)
    missing_N = tl.sum(tl.where(exists_NC, rest_NC, 0), axis=1) >> bits
    for given in tl.static_range(COPIES - 1):
        best_N = tl.argmax(rest_NC, axis=1)
        best_NC = copy_C[None, :] == best_N[:, None]
        gets_NC = best_NC & (given < missing_N)[:, None]
        whole_NC += gets_NC.to(tl.int64)
        rest_NC = tl.where(best_NC, -1, rest_NC)
    return whole_NC
