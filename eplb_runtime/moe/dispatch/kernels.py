"""Which row goes where on one rank, and the sums that bring a token's choices together again, by few kernels.

The same numbers as `permute`'s functions of the same names, which are the references; suffixes as there. Slots are
int32 or int64. A slot that there is not ends the job by an assertion of the device, as plain torch would.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...utils.triton import jit, power_of_2, tl
from ..routing.kernels import begin_of_blocks, is_first
from .permute import Arriving, Leaving, Moves, RowMemory
from .permute import sum_here as permute_sum_here

_BLOCK = 64
"""Choices of a program. Placing compares all of them with each other; with 256 it had no room in registers."""
_ELEMENTS = 1024
"""Summed by a program."""
_ROWS, _PARTS = 1024, 4
"""Rows that a program numbers at once, and programs of a group of rows."""


def leaving(
    slots_TK: Tensor, rank: int, num_ranks: int, slots_per_rank: int, *, dedup: bool, tag: int | None = None
) -> Leaving:
    """By three kernels: count each block of choices, where each slot's begin in each block, the place of each."""
    slots_TK, choices = slots_TK.contiguous(), slots_TK.numel()
    columns = slots_per_rank + dedup + (tag is not None)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=slots_TK.device)

    counts_2RW, source_row_N1 = empty(2, num_ranks, columns), empty(choices, 1) if dedup else None
    choice_N, place_TK, token_N = empty(choices), empty(*slots_TK.shape), empty(choices)
    begin_BW = begin_of_blocks(slots_TK, counts_2RW[0], slots_per_rank, _BLOCK, dedup, tag)
    if choices:
        source_rows = choice_N if source_row_N1 is None else source_row_N1
        width = power_of_2(max(2, num_ranks * slots_per_rank))
        _place[(begin_BW.shape[0],)](
            *(slots_TK, begin_BW, counts_2RW, choice_N, place_TK, token_N, source_rows),
            *(choices, rank, num_ranks, slots_per_rank, columns),
            TOP_K=slots_TK.shape[1],
            SLOTS=width,
            RANKS=begin_BW.shape[1] - width,
            BLOCK=_BLOCK,
            SOME=64,
        )
    return Leaving(counts_2RW, choice_N, place_TK, token_N, source_row_N1)


def arriving(
    counts_RW: NDArray[np.int64],
    first: int,
    slots_per_rank: int,
    device: torch.device,
    source_row_M1: Tensor | None = None,
    counts: Tensor | None = None,
) -> Arriving:
    """By one kernel; a few programs number the rows that one rank has sent to one slot."""
    if counts is None:
        counts = torch.from_numpy(np.ascontiguousarray(counts_RW)).to(device, non_blocking=True)
    (ranks, columns), rows = counts.shape, int(counts_RW[:, :slots_per_rank].sum())

    def empty(dtype: torch.dtype = torch.int64, length: int = rows) -> Tensor:
        return torch.empty(length, dtype=dtype, device=device)

    arrived_M, slot_place_M, ends_S = empty(), empty(), empty(torch.int32, slots_per_rank)
    source, row_M = (arrived_M, arrived_M) if source_row_M1 is None else (source_row_M1, empty())
    _arrive[(ranks * slots_per_rank, _PARTS)](
        *(counts.contiguous(), source, arrived_M, slot_place_M, row_M, ends_S),
        *(first, ranks, slots_per_rank, columns),
        HAS_SOURCE_ROWS=source_row_M1 is not None,
        CELLS=power_of_2(ranks * slots_per_rank),
        RANKS=power_of_2(ranks),
        BLOCK=_ROWS,
        PARTS=_PARTS,
    )
    return Arriving(arrived_M, slot_place_M, row_M, ends_S)


def sum_choices(rows_ND: Tensor, place_TK: Tensor, memory: RowMemory, weights_TK: Tensor | None = None) -> Tensor:
    """By one kernel, with the roundings that plain torch has on a GPU."""
    out_TD = memory.like(rows_ND, place_TK.shape[0], _product(rows_ND, weights_TK))
    return _sum_into(out_TD, rows_ND, place_TK, weights_TK, here=False)


def sum_here(
    rows_MD: Tensor, place_UK: Tensor, weights_M: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """By one kernel; by plain torch what is wider than float32."""
    if _product(rows_MD, weights_M) == torch.float64:
        return permute_sum_here(rows_MD, place_UK, weights_M, dtype)
    out_UD = torch.empty(place_UK.shape[0], rows_MD.shape[1], dtype=dtype, device=rows_MD.device)
    return _sum_into(out_UD, rows_MD, place_UK, weights_M, here=True)


def _sum_into(out_TD: Tensor, rows_MD: Tensor, place_TK: Tensor, weights: Tensor | None, here: bool) -> Tensor:
    """Sum each token's rows. ``here``: some places are -1, and weights are those of rows, not of choices."""
    (tokens, width), dtype = out_TD.shape, _product(rows_MD, weights)
    if tokens and width:
        columns = min(_ELEMENTS, power_of_2(width))
        _sum[(tokens, -(-width // columns))](
            *(rows_MD.contiguous(), place_TK.contiguous()),
            *(place_TK if weights is None else weights.contiguous(), out_TD, width),
            WEIGHED=weights is not None,
            HERE=here,
            PRODUCT=_of_triton(dtype),
            SUM=_of_triton(torch.promote_types(dtype, torch.float32)),
            TOP_K=place_TK.shape[1],
            COLUMNS=columns,
            enable_fp_fusion=False,  # else a product that is added at once would not be rounded
        )
    return out_TD


def _product(rows: Tensor, weights: Tensor | None) -> torch.dtype:
    return rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)


MOVES = Moves(leaving, arriving, sum_choices, sum_here)


def _of_triton(dtype: torch.dtype) -> object:
    return getattr(tl, str(dtype).removeprefix("torch."))


@jit(do_not_specialize=["choices"])
def _place(  # type: ignore[no-untyped-def]
    slots,
    of_blocks,
    counts,
    choice_at,
    place_of,
    token_at,
    source_row_at,
    choices,
    me,
    num_ranks,
    slots_per_rank,
    columns,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    choice = block * BLOCK + within
    there = choice < choices
    before_here = of_blocks + block * (SLOTS + RANKS)
    slot = tl.load(slots + choice, mask=there, other=0).to(tl.int32)
    rank = slot // slots_per_rank
    earlier = within[None, :] < within[:, None]
    place = tl.sum((earlier & (slot[None, :] == slot[:, None])).to(tl.int32), axis=1)
    place += tl.load(before_here + slot, mask=there, other=0)
    # This rank's slots come first.
    num_slots = num_ranks * slots_per_rank
    key = tl.where(rank == me, slot - num_slots, slot)
    for start in range(0, num_slots, SOME):
        other = start + tl.arange(0, SOME)
        its_rank = other // slots_per_rank
        counted = tl.load(counts + its_rank * columns + other % slots_per_rank, mask=other < num_slots, other=0)
        its_key = tl.where(its_rank == me, other - num_slots, other)
        place += tl.sum(tl.where(its_key[None, :] < key[:, None], counted.to(tl.int32)[None, :], 0), axis=1)
    tl.store(choice_at + place, choice, mask=there)
    tl.store(place_of + choice, place.to(tl.int64), mask=there)
    if RANKS == 0:
        tl.store(token_at + place, choice // TOP_K, mask=there)
    else:
        first = is_first(slots, choice, there, rank, slots_per_rank, TOP_K)
        firsts = earlier & (rank[None, :] == rank[:, None]) & first[None, :]
        source_row = tl.sum(firsts.to(tl.int32), axis=1) + tl.load(before_here + SLOTS + rank, mask=there, other=0)
        source_row = tl.where(first, source_row, source_row - 1)  # an earlier choice of this token is among them
        tl.store(source_row_at + place, source_row.to(tl.int64), mask=there)
        for start in range(0, num_ranks, SOME):
            other = start + tl.arange(0, SOME)
            visited = tl.load(counts + other * columns + slots_per_rank, mask=other < num_ranks, other=0).to(tl.int32)
            ahead = tl.where(other == me, -1, other)[None, :] < tl.where(rank == me, -1, rank)[:, None]
            source_row += tl.sum(tl.where(ahead, visited[None, :], 0), axis=1)
        tl.store(token_at + source_row, choice // TOP_K, mask=first)


@jit
def _arrive(  # type: ignore[no-untyped-def]
    counts,
    source_row_at,
    arrived_at,
    slot_place,
    row_at,
    ends,
    me,
    num_ranks,
    slots_per_rank,
    columns,
    HAS_SOURCE_ROWS: tl.constexpr,
    CELLS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    slot, rank = tl.program_id(0) // num_ranks, tl.program_id(0) % num_ranks
    cell = tl.arange(0, CELLS)
    of_rank, of_slot = cell // slots_per_rank, cell % slots_per_rank
    counted = tl.load(counts + of_rank * columns + of_slot, mask=of_rank < num_ranks, other=0)
    key = tl.where(rank == me, -1, rank)  # this rank's rows lie before all others as they arrive
    before = tl.where(of_rank == me, -1, of_rank)
    rows = tl.sum(tl.where((of_rank == rank) & (of_slot == slot), counted, 0))
    by_slot = tl.sum(tl.where((of_slot < slot) | ((of_slot == slot) & (of_rank < rank)), counted, 0))
    arrival = tl.sum(tl.where((before < key) | ((before == key) & (of_slot < slot)), counted, 0))
    begin = tl.zeros((), dtype=tl.int64)
    if HAS_SOURCE_ROWS:
        other = tl.arange(0, RANKS)
        tokens = tl.load(counts + other * columns + slots_per_rank, mask=other < num_ranks, other=0)
        begin = tl.sum(tl.where(tl.where(other == me, -1, other) < key, tokens, 0))
    for start in range(tl.program_id(1) * BLOCK, rows, PARTS * BLOCK):
        row = start + tl.arange(0, BLOCK)
        there = row < rows
        tl.store(arrived_at + by_slot + row, arrival + row, mask=there)
        tl.store(slot_place + arrival + row, by_slot + row, mask=there)
        if HAS_SOURCE_ROWS:
            source_row = tl.load(source_row_at + arrival + row, mask=there, other=0)
            tl.store(row_at + by_slot + row, begin + source_row, mask=there)
    if (rank == num_ranks - 1) & (tl.program_id(1) == 0):
        tl.store(ends + slot, (by_slot + rows).to(tl.int32))


@jit
def _term(  # type: ignore[no-untyped-def]
    rows,
    places,
    weights,
    choice,
    column,
    width,
    WEIGHED: tl.constexpr,
    HERE: tl.constexpr,
    PRODUCT: tl.constexpr,
    SUM: tl.constexpr,
):
    """A row, or its product with its weight, rounded to the wider dtype of both; 0 where the row is not here."""
    row = tl.load(places + choice)
    columns = tl.where(row >= 0, width, 0)
    term = tl.load(rows + row * width + column, mask=column < columns, other=0).to(SUM)
    if WEIGHED:
        weight = tl.load(weights + (row if HERE else choice), mask=row >= 0, other=0).to(SUM)
        term = (term * weight).to(PRODUCT).to(SUM)
    return term


@jit
def _sum(  # type: ignore[no-untyped-def]
    rows,
    places,
    weights,
    out,
    width,
    WEIGHED: tl.constexpr,
    HERE: tl.constexpr,
    PRODUCT: tl.constexpr,
    SUM: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    choice = token * TOP_K
    total = _term(rows, places, weights, choice, column, width, WEIGHED, HERE, PRODUCT, SUM)
    if HERE:
        total += 0.0  # the sum of negative zeros is zero, as in plain torch
    for _ in tl.static_range(1, TOP_K):
        choice += 1
        total += _term(rows, places, weights, choice, column, width, WEIGHED, HERE, PRODUCT, SUM)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)
