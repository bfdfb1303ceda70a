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
from ..routing.kernels import ASSERT, AT_ONCE, before_each_block
from .memory import RowMemory
from .permute import Arriving, Leaving, Moves
from .permute import sum_here as permute_sum_here

_BLOCK = 64
"""Choices of a program. Placing compares all of them with each other; with 256 it had no room in registers."""
_WIDE = 32
"""Columns of counts, of a program."""
_ELEMENTS = 1024
"""That a program moves or sums."""
_ROWS, _PARTS = 1024, 4
"""Rows that a program numbers at once, and programs of a group of rows."""


def leaving(
    slots_TK: Tensor, rank: int, num_ranks: int, slots_per_rank: int, *, dedup: bool, tag: int | None = None
) -> Leaving:
    """By three kernels: count each block of choices, where each slot's begin in each block, the place of each."""
    slots_TK = slots_TK.contiguous()
    choices, top_k, slots = slots_TK.numel(), slots_TK.shape[1], num_ranks * slots_per_rank
    columns = slots_per_rank + dedup + (tag is not None)
    # Counts of slots, and of ranks if tokens are sent once.
    widths = {"SLOTS": power_of_2(max(2, slots)), "RANKS": power_of_2(max(2, num_ranks)) if dedup else 0}
    width, blocks = sum(widths.values()), -(-choices // _BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=slots_TK.device)

    counts_2RW, of_blocks = empty(2, num_ranks, columns), empty(blocks, width, dtype=torch.int32)
    choice_N, place_TK, token_N = empty(choices), empty(*slots_TK.shape), empty(choices)
    source_row_N1 = empty(choices, 1) if dedup else None
    sizes = {"TOP_K": top_k, **widths, "BLOCK": _BLOCK}
    if blocks:
        _count_slots[(blocks,)](slots_TK, of_blocks, choices, slots_per_rank, slots, **sizes, **ASSERT)
    _begin_slots[(-(-width // _WIDE),)](
        of_blocks,
        counts_2RW,
        blocks,
        0 if tag is None else tag,
        *(num_ranks, slots_per_rank, columns),
        **widths,
        HAS_TAG=tag is not None,
        WIDE=_WIDE,
        AT_ONCE=AT_ONCE,
    )
    if blocks:
        _place[(blocks,)](
            *(
                slots_TK,
                of_blocks,
                counts_2RW,
                choice_N,
                place_TK,
                token_N,
                choice_N if source_row_N1 is None else source_row_N1,
            ),
            *(choices, rank, num_ranks, slots_per_rank, columns),
            **sizes,
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
    row_M = arrived_M if source_row_M1 is None else empty()
    _arrive[(ranks * slots_per_rank, _PARTS)](
        *(
            counts.contiguous(),
            arrived_M if source_row_M1 is None else source_row_M1,
            arrived_M,
            slot_place_M,
            row_M,
            ends_S,
        ),
        *(first, ranks, slots_per_rank, columns),
        HAS_SOURCE_ROWS=source_row_M1 is not None,
        CELLS=power_of_2(ranks * slots_per_rank),
        RANKS=power_of_2(ranks),
        BLOCK=_ROWS,
        PARTS=_PARTS,
    )
    return Arriving(arrived_M, slot_place_M, row_M, ends_S)


def part(source: Tensor, index_U: Tensor, staying: Tensor, leaving: Tensor) -> None:
    """By one kernel; what is written is contiguous."""
    rows, width = index_U.shape[0], source.shape[1]
    if rows and width:
        columns = min(_ELEMENTS, power_of_2(width))
        at_once = _ELEMENTS // columns
        _part[(-(-rows // at_once), -(-width // columns))](
            *(source.contiguous(), index_U.contiguous(), staying, leaving, staying.shape[0], rows, width),
            ROWS=at_once,
            COLUMNS=columns,
        )


def sum_choices(rows_ND: Tensor, place_TK: Tensor, memory: RowMemory, weights_TK: Tensor | None = None) -> Tensor:
    """By one kernel, with the roundings that plain torch has on a GPU."""
    dtype = rows_ND.dtype if weights_TK is None else torch.promote_types(rows_ND.dtype, weights_TK.dtype)
    (tokens, top_k), width = place_TK.shape, rows_ND.shape[1]
    out_TD = memory.like(rows_ND, tokens, dtype)
    if tokens and width:
        columns = min(_ELEMENTS, power_of_2(width))
        _sum[(tokens, -(-width // columns))](
            *(rows_ND.contiguous(), place_TK.contiguous()),
            *(place_TK if weights_TK is None else weights_TK.contiguous(), out_TD, width),
            WEIGHED=weights_TK is not None,
            SUM=_of_triton(torch.promote_types(dtype, torch.float32)),
            TOP_K=top_k,
            COLUMNS=columns,
            enable_fp_fusion=False,  # else a product that is added at once would not be rounded
        )
    return out_TD


def sum_here(
    rows_MD: Tensor, place_UK: Tensor, weights_M: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """By one kernel; by plain torch what is wider than float32."""
    product = rows_MD.dtype if weights_M is None else torch.promote_types(rows_MD.dtype, weights_M.dtype)
    if product == torch.float64:
        return permute_sum_here(rows_MD, place_UK, weights_M, dtype)
    (tokens, top_k), width = place_UK.shape, rows_MD.shape[1]
    out_UD = torch.empty(tokens, width, dtype=dtype, device=rows_MD.device)
    if tokens and width:
        columns = min(_ELEMENTS, power_of_2(width))
        _sum_here[(tokens, -(-width // columns))](
            *(rows_MD.contiguous(), place_UK.contiguous()),
            *(place_UK if weights_M is None else weights_M.contiguous(), out_UD, width),
            WEIGHED=weights_M is not None,
            PRODUCT=_of_triton(product),
            TOP_K=top_k,
            COLUMNS=columns,
            enable_fp_fusion=False,  # else a product that is added at once would not be rounded
        )
    return out_UD


MOVES = Moves(leaving, arriving, sum_choices, part, sum_here)


def _of_triton(dtype: torch.dtype) -> object:
    return getattr(tl, str(dtype).removeprefix("torch."))


@jit
def _is_first(slots, choice, there, rank, slots_per_rank, TOP_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether no earlier choice of the same token is on the same rank."""
    first = there
    for back in tl.static_range(1, TOP_K):
        same_token = there & (choice % TOP_K >= back)
        before = tl.load(slots + choice - back, mask=same_token, other=0).to(tl.int32) // slots_per_rank
        first = first & ~(same_token & (before == rank))
    return first


@jit(do_not_specialize=["choices"])
def _count_slots(  # type: ignore[no-untyped-def]
    slots,
    of_blocks,
    choices,
    slots_per_rank,
    num_slots,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    there = choice < choices
    slot = tl.load(slots + choice, mask=there, other=0).to(tl.int32)
    tl.device_assert((slot >= 0) & (slot < num_slots), "a choice of a slot that there is not")
    counted = tl.histogram(slot, SLOTS, mask=there)
    tl.store(of_blocks + block * (SLOTS + RANKS) + tl.arange(0, SLOTS), counted)
    if RANKS > 0:
        rank = slot // slots_per_rank
        visited = tl.histogram(rank, RANKS, mask=_is_first(slots, choice, there, rank, slots_per_rank, TOP_K))
        tl.store(of_blocks + block * (SLOTS + RANKS) + SLOTS + tl.arange(0, RANKS), visited)


@jit(do_not_specialize=["blocks", "tag"])
def _begin_slots(  # type: ignore[no-untyped-def]
    of_blocks,
    counts,
    blocks,
    tag: tl.int64,
    num_ranks,
    slots_per_rank,
    columns,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    HAS_TAG: tl.constexpr,
    WIDE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """In place: of each slot's choices, how many are in earlier blocks; and the counts for each rank."""
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    total = before_each_block(of_blocks, blocks, column, SLOTS + RANKS, WIDE, AT_ONCE).to(tl.int64)
    of_slot = counts + column // slots_per_rank * columns + column % slots_per_rank
    tl.store(of_slot, total, mask=column < num_ranks * slots_per_rank)
    if RANKS > 0:
        rank = column - SLOTS
        tl.store(counts + rank * columns + slots_per_rank, total, mask=(rank >= 0) & (rank < num_ranks))
    if HAS_TAG:
        said = tl.zeros((WIDE,), dtype=tl.int64) + tag
        tl.store(counts + column * columns + columns - 1, said, mask=column < num_ranks)


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
        first = _is_first(slots, choice, there, rank, slots_per_rank, TOP_K)
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


@jit(do_not_specialize=["staying_rows", "rows"])
def _part(  # type: ignore[no-untyped-def]
    source, index, staying, leaving, staying_rows, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    came = tl.load(index + row, mask=row < rows, other=0)
    there = (row < rows)[:, None] & (column < width)[None, :]
    stays = (row < staying_rows)[:, None]
    value = tl.load(source + came[:, None] * width + column[None, :], mask=there)
    tl.store(staying + row[:, None] * width + column[None, :], value, mask=there & stays)
    tl.store(leaving + (row - staying_rows)[:, None] * width + column[None, :], value, mask=there & ~stays)


@jit
def _term(  # type: ignore[no-untyped-def]
    rows, places, weights, out, choice, column, width, WEIGHED: tl.constexpr, SUM: tl.constexpr
):
    """A row, or its product with its weight: rounded as what is written is."""
    row = tl.load(places + choice)
    term = tl.load(rows + row * width + column, mask=column < width, other=0).to(SUM)
    if WEIGHED:
        term = (term * tl.load(weights + choice).to(SUM)).to(out.dtype.element_ty).to(SUM)
    return term


@jit
def _sum(  # type: ignore[no-untyped-def]
    rows,
    places,
    weights,
    out,
    width,
    WEIGHED: tl.constexpr,
    SUM: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = _term(rows, places, weights, out, token * TOP_K, column, width, WEIGHED, SUM)
    for choice in tl.static_range(1, TOP_K):
        total += _term(rows, places, weights, out, token * TOP_K + choice, column, width, WEIGHED, SUM)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@jit
def _sum_here(  # type: ignore[no-untyped-def]
    rows,
    places,
    weights,
    out,
    width,
    WEIGHED: tl.constexpr,
    PRODUCT: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in tl.static_range(0, TOP_K):
        row = tl.load(places + token * TOP_K + choice)
        here = tl.where(row >= 0, width, 0)  # columns of this choice
        term = tl.load(rows + row * width + column, mask=column < here, other=0).to(tl.float32)
        if WEIGHED:
            weight = tl.load(weights + row, mask=row >= 0, other=0).to(tl.float32)
            term = (term * weight).to(PRODUCT).to(tl.float32)
        total += term
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)
