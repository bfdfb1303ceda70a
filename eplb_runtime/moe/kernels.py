"""What each batch does on a GPU, by few kernels and without a host sync, so that a CUDA graph can hold them: count and
route a batch's choices, tell which row goes where on one rank, and sum a token's choices, bit for bit as plain torch.
Suffixes as in `permute.py`. Choices are logical ids or slots, int32 or int64; one that there is not ends the job by an
assertion of the device."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..utils.triton import jit, power_of_2, tl
from .dispatch import permute
from .dispatch.permute import Arriving, Leaving, RowMemory

BLOCK, PLACED = 256, 64
"""Choices of a program. Dealing out compares all of them with each other; where places are worked out there is no room
in registers for 256."""
WIDE, AT_ONCE = 32, 128
"""Columns of counts, of a program, and blocks whose beginnings are worked out at once."""
ELEMENTS, ROWS, PARTS = 1024, 1024, 4
"""Summed by a program; rows that one numbers at once, and programs of a group of rows."""
ASSERT = {"debug": True, "sanitize_overflow": False}
"""Of a launch: what the kernel asserts is checked."""


def count_and_map(ids_TK: Tensor, table_E: Tensor, counts_E: Tensor, real_T: Tensor | None = None) -> Tensor:
    """Add a batch's choices to ``counts_E``, in place, and return their slots, int64 ``[T, K]``, by one kernel. Padding
    (``real_T`` False) has slots and is not counted; None: there is no padding."""
    ids_TK, choices = ids_TK.contiguous(), ids_TK.numel()
    slots_TK = torch.empty(ids_TK.shape, dtype=torch.int64, device=ids_TK.device)
    if choices:
        real = ids_TK if real_T is None else real_T.contiguous()
        experts, padded = counts_E.shape[0], real_T is not None
        sizes = {"TOP_K": ids_TK.shape[1], "PADDED": padded, "EXPERTS": power_of_2(max(2, experts)), "BLOCK": BLOCK}
        given = ids_TK, real, table_E, counts_E, slots_TK, choices, experts
        _count_and_map[(-(-choices // BLOCK),)](*given, **sizes, **ASSERT)
    return slots_TK


def deal_by_kernels(ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor, begin_BE: Tensor | None = None) -> Tensor:
    """Return int64 ``[T, K]``, the slot of each choice, as `slots.assign_slots` does. ``begin_BE``: the second result
    of `count_by_blocks` for these choices; None: it is computed first."""
    ids_TK, choices = ids_TK.contiguous(), ids_TK.numel()
    if begin_BE is None:
        begin_BE = count_by_blocks(ids_TK, sent_EC.shape[0])[1]
    slots_TK = torch.empty(ids_TK.shape, dtype=torch.int64, device=ids_TK.device)
    if choices:
        given = ids_TK, begin_BE, sent_EC.contiguous(), copy_slot_EC.contiguous(), slots_TK, choices
        sizes = {"COPIES": sent_EC.shape[1], "EXPERTS": begin_BE.shape[1], "BLOCK": BLOCK}
        _deal[(begin_BE.shape[0],)](*given, **sizes)
    return slots_TK


def count_by_blocks(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return int64 ``[E]``, how often each expert is chosen, and int32, how often in the blocks before each block."""
    counts_E = torch.empty(experts, dtype=torch.int64, device=ids_TK.device)
    return counts_E, begin_of_blocks(ids_TK.contiguous(), counts_E.view(1, -1), experts, BLOCK)


def begin_of_blocks(
    slots_TK: Tensor, counts_RC: Tensor, slots_per_rank: int, block: int, dedup: bool = False, tag: int | None = None
) -> Tensor:
    """Write into ``counts_RC`` how many choices each slot has; with ``dedup`` also how many tokens visit each rank; and
    the ``tag``, unless it is None. Return int32: the same counts (without tag) over all blocks before each block."""
    choices, (ranks, columns) = slots_TK.numel(), counts_RC.shape
    widths = {"SLOTS": power_of_2(max(2, ranks * slots_per_rank)), "RANKS": power_of_2(max(2, ranks)) if dedup else 0}
    width, blocks = sum(widths.values()), -(-choices // block)
    begin_BW = torch.empty(blocks, width, dtype=torch.int32, device=slots_TK.device)
    if blocks:
        of_slots = slots_per_rank, ranks * slots_per_rank
        sizes = {"TOP_K": slots_TK.shape[1], **widths, "BLOCK": block}
        count_slots[(blocks,)](slots_TK, begin_BW, choices, *of_slots, **sizes, **ASSERT)
    sizes = {**widths, "HAS_TAG": tag is not None, "WIDE": WIDE, "AT_ONCE": AT_ONCE}
    begin_slots[(-(-width // WIDE),)](begin_BW, counts_RC, blocks, tag or 0, ranks, slots_per_rank, columns, **sizes)
    return begin_BW


def leaving(
    slots_TK: Tensor, rank: int, num_ranks: int, slots_per_rank: int, *, dedup: bool, tag: int | None = None
) -> Leaving:
    """Return which rows this rank sends, in which order, and how many to each slot (`permute.leaving`). 3 kernels."""
    slots_TK, choices = slots_TK.contiguous(), slots_TK.numel()
    columns = slots_per_rank + dedup + (tag is not None)
    empty = partial(torch.empty, dtype=torch.int64, device=slots_TK.device)
    counts_2RW, source_row_N1 = empty(2, num_ranks, columns), empty(choices, 1) if dedup else None
    choice_N, place_TK, token_N = empty(choices), empty(*slots_TK.shape), empty(choices)
    begin_BW = begin_of_blocks(slots_TK, counts_2RW[0], slots_per_rank, PLACED, dedup, tag)
    if choices:
        source_rows = choice_N if source_row_N1 is None else source_row_N1
        given = slots_TK, begin_BW, counts_2RW, choice_N, place_TK, token_N, source_rows, choices
        width, top_k = power_of_2(max(2, num_ranks * slots_per_rank)), slots_TK.shape[1]
        sizes = {"TOP_K": top_k, "SLOTS": width, "RANKS": begin_BW.shape[1] - width, "BLOCK": PLACED, "SOME": 64}
        _place[(begin_BW.shape[0],)](*given, rank, num_ranks, slots_per_rank, columns, **sizes)
    return Leaving(counts_2RW, choice_N, place_TK, token_N, source_row_N1)


def arriving(
    counts_RW: NDArray[np.int64],
    first: int,
    slots_per_rank: int,
    device: torch.device,
    source_row_M1: Tensor | None = None,
    counts: Tensor | None = None,
) -> Arriving:
    """Return where each row arrives, and its place by slot (`permute.arriving`), by one kernel. ``counts``:
    ``counts_RW`` on the device; None: it is copied there."""
    if counts is None:
        counts = torch.from_numpy(np.ascontiguousarray(counts_RW)).to(device, non_blocking=True)
    (ranks, columns), rows = counts.shape, int(counts_RW[:, :slots_per_rank].sum())
    arrived_M, slot_place_M = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    row_M = arrived_M if source_row_M1 is None else torch.empty_like(arrived_M)
    ends_S = torch.empty(slots_per_rank, dtype=torch.int32, device=device)
    source_rows = arrived_M if source_row_M1 is None else source_row_M1
    given = counts.contiguous(), source_rows, arrived_M, slot_place_M, row_M, ends_S, first, ranks
    sizes = {"CELLS": power_of_2(ranks * slots_per_rank), "RANKS": power_of_2(ranks), "BLOCK": ROWS, "PARTS": PARTS}
    flags = {"HAS_SOURCE_ROWS": source_row_M1 is not None}
    _arrive[(ranks * slots_per_rank, PARTS)](*given, slots_per_rank, columns, **flags, **sizes)
    return Arriving(arrived_M, slot_place_M, row_M, ends_S)


def sum_choices(rows_ND: Tensor, place_TK: Tensor, memory: RowMemory, weights_TK: Tensor | None = None) -> Tensor:
    """Return ``[T, D]``: the sum of each token's rows, which are at ``place_TK``, times ``weights_TK`` if given, as
    `permute.sum_choices` gives it on a GPU, by one kernel."""
    out_TD = memory.like(rows_ND, place_TK.shape[0], _product(rows_ND, weights_TK))
    return _sum_into(out_TD, rows_ND, place_TK, weights_TK, here=False)


def sum_local_choices(
    rows_MD: Tensor, place_UK: Tensor, weights_M: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``[U, D]`` in ``dtype``: the sum of each token's rows that are here (place -1: not here), times
    ``weights_M`` if given, by one kernel; by plain torch if products are float64."""
    if _product(rows_MD, weights_M) == torch.float64:
        return permute.sum_local_choices(rows_MD, place_UK, weights_M, dtype)
    out_UD = torch.empty(place_UK.shape[0], rows_MD.shape[1], dtype=dtype, device=rows_MD.device)
    return _sum_into(out_UD, rows_MD, place_UK, weights_M, here=True)


def _sum_into(out_TD: Tensor, rows_MD: Tensor, place_TK: Tensor, weights: Tensor | None, here: bool) -> Tensor:
    """Sum each token's rows. ``here``: some places are -1, and weights are those of rows, not of choices."""
    (tokens, width), dtype = out_TD.shape, _product(rows_MD, weights)
    if tokens and width:
        columns, dtypes = min(ELEMENTS, power_of_2(width)), (dtype, torch.promote_types(dtype, torch.float32))
        product, wide = (getattr(tl, str(one).removeprefix("torch.")) for one in dtypes)
        given = rows_MD.contiguous(), place_TK.contiguous(), place_TK if weights is None else weights.contiguous()
        flags = {"WEIGHED": weights is not None, "HERE": here, "TOP_K": place_TK.shape[1], "COLUMNS": columns}
        grid = tokens, -(-width // columns)
        # Without fused products: else a product that is added at once would not be rounded.
        _sum[grid](*given, out_TD, width, **flags, PRODUCT=product, SUM=wide, enable_fp_fusion=False)
    return out_TD


def _product(rows: Tensor, weights: Tensor | None) -> torch.dtype:
    return rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)


@jit(do_not_specialize=["choices"])
def _count_and_map(  # type: ignore[no-untyped-def]
    ids,
    real,
    table,
    counts,
    slots,
    choices,
    experts,
    TOP_K: tl.constexpr,
    PADDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    choice = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = choice < choices
    expert = tl.load(ids + choice, mask=there, other=0).to(tl.int32)
    tl.device_assert((expert >= 0) & (expert < experts), "a choice of an expert that does not exist")
    tl.store(slots + choice, tl.load(table + expert, mask=there, other=0), mask=there)
    counted = there
    if PADDED:
        counted = there & (tl.load(real + choice // TOP_K, mask=there, other=0) != 0)
    of_block = tl.histogram(expert, EXPERTS, mask=counted)
    every = tl.arange(0, EXPERTS)
    tl.atomic_add(counts + every, of_block.to(tl.int64), mask=(every < experts) & (of_block > 0))


@jit
def is_first(slots, choice, there, rank, slots_per_rank, TOP_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return, for each choice, whether it is ``there`` and no earlier choice of its token is on the same rank."""
    first = there
    for back in tl.static_range(1, TOP_K):
        same_token = there & (choice % TOP_K >= back)
        before = tl.load(slots + choice - back, mask=same_token, other=0).to(tl.int32) // slots_per_rank
        first = first & ~(same_token & (before == rank))
    return first


@jit(do_not_specialize=["choices"])
def count_slots(  # type: ignore[no-untyped-def]
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
    """Write one block's row of ``of_blocks``: how many of its choices each slot has, and, if ``RANKS`` is not 0, how
    many tokens visit each rank. A slot that does not exist fails a device assertion."""
    block = tl.program_id(0).to(tl.int64)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    there = choice < choices
    slot = tl.load(slots + choice, mask=there, other=0).to(tl.int32)
    tl.device_assert((slot >= 0) & (slot < num_slots), "a choice of an expert or a slot that does not exist")
    counted = tl.histogram(slot, SLOTS, mask=there)
    tl.store(of_blocks + block * (SLOTS + RANKS) + tl.arange(0, SLOTS), counted)
    if RANKS > 0:
        rank = slot // slots_per_rank
        visited = tl.histogram(rank, RANKS, mask=is_first(slots, choice, there, rank, slots_per_rank, TOP_K))
        tl.store(of_blocks + block * (SLOTS + RANKS) + SLOTS + tl.arange(0, RANKS), visited)


@jit(do_not_specialize=["blocks", "tag"])
def begin_slots(  # type: ignore[no-untyped-def]
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
    """Replace the counts of each block in ``of_blocks`` by sums over earlier blocks, in place, and write the totals
    into ``counts``: choices of each slot; tokens of each rank, if ``RANKS`` is not 0; the tag, if ``HAS_TAG``."""
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    before = tl.zeros((WIDE,), dtype=tl.int32)
    for first in range(0, blocks, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        place = of_blocks + block[:, None].to(tl.int64) * (SLOTS + RANKS) + column[None, :]
        there = (block < blocks)[:, None] & (column < SLOTS + RANKS)[None, :]
        counted = tl.load(place, mask=there, other=0)
        tl.store(place, tl.cumsum(counted, axis=0) - counted + before[None, :], mask=there)
        before += tl.sum(counted, axis=0)
    total = before.to(tl.int64)
    of_slot = counts + column // slots_per_rank * columns + column % slots_per_rank
    tl.store(of_slot, total, mask=column < num_ranks * slots_per_rank)
    if RANKS > 0:
        rank = column - SLOTS
        tl.store(counts + rank * columns + slots_per_rank, total, mask=(rank >= 0) & (rank < num_ranks))
    if HAS_TAG:
        said = tl.zeros((WIDE,), dtype=tl.int64) + tag
        tl.store(counts + column * columns + columns - 1, said, mask=column < num_ranks)


@jit(do_not_specialize=["choices"])
def _deal(  # type: ignore[no-untyped-def]
    ids, begins, sent, copy_slots, slots, choices, COPIES: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    choice = block * BLOCK + within
    expert = tl.load(ids + choice, mask=choice < choices, other=-1).to(tl.int64)
    # Once more, to lie across: all choices of the block are compared with all.
    others = tl.load(ids + choice, mask=choice < choices, other=-1).to(tl.int64)
    earlier = (others[None, :] == expert[:, None]) & (within[None, :] < within[:, None])
    chosen = expert >= 0
    place = tl.sum(earlier.to(tl.int32), axis=1) + tl.load(begins + block * EXPERTS + expert, mask=chosen, other=0)
    copy = tl.zeros((BLOCK,), dtype=tl.int64)
    end = tl.zeros((BLOCK,), dtype=tl.int64)
    for passed in range(COPIES - 1):
        end += tl.load(sent + expert * COPIES + passed, mask=chosen, other=0)
        copy += (place >= end).to(tl.int64)
    slot = tl.load(copy_slots + expert * COPIES + copy, mask=chosen, other=-1)
    tl.store(slots + choice, slot, mask=choice < choices)


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
    total = tl.zeros((COLUMNS,), dtype=SUM)
    for back in tl.static_range(TOP_K):
        choice = token * TOP_K + back
        row = tl.load(places + choice)
        columns = tl.where(row >= 0, width, 0)  # of no row, nothing is read
        term = tl.load(rows + row * width + column, mask=column < columns, other=0).to(SUM)
        if WEIGHED:
            weight = tl.load(weights + (row if HERE else choice), mask=row >= 0, other=0).to(SUM)
            term = (term * weight).to(PRODUCT).to(SUM)  # rounded to the wider dtype of both
        total += term
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)
