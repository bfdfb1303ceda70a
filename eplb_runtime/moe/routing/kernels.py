"""Counting and routing a batch's choices on a GPU, by few kernels: no host sync, so that a CUDA graph can hold them.

Choices are logical ids, int32 or int64. With one copy of each expert, `count_and_map` does it in one pass; an id of
no expert ends the job by an assertion of the device, as plain torch would. With copies, `deal_by_kernels` deals out
once all ranks' counts have told the quotas; its reference is `splitter.deal_out`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...utils.triton import jit, power_of_2, tl

_BLOCK = 256
"""Choices of a program. Dealing out compares all of them with each other."""
AT_ONCE = 128
"""Blocks whose beginnings are worked out at once."""
ASSERT = {"debug": True, "sanitize_overflow": False}
"""Of a launch: what the kernel asserts is checked."""


def count_and_map(ids_TK: Tensor, table_E: Tensor, counts_E: Tensor, real_T: Tensor | None = None) -> Tensor:
    """Count a batch's choices into ``counts_E`` and return their slots, in one pass. ``real_T``: False for padding,
    which has slots and does not count."""
    ids_TK, choices = ids_TK.contiguous(), ids_TK.numel()
    slots_TK = torch.empty(ids_TK.shape, dtype=torch.int64, device=ids_TK.device)
    if choices:
        _count_and_map[(-(-choices // _BLOCK),)](
            ids_TK,
            ids_TK if real_T is None else real_T.contiguous(),
            table_E,
            counts_E,
            slots_TK,
            choices,
            counts_E.shape[0],
            TOP_K=ids_TK.shape[1],
            PADDED=real_T is not None,
            EXPERTS=power_of_2(max(2, counts_E.shape[0])),
            BLOCK=_BLOCK,
            **ASSERT,
        )
    return slots_TK


def torch_count_and_map(ids_TK: Tensor, table_E: Tensor, counts_E: Tensor, real_T: Tensor | None = None) -> Tensor:
    """The reference: what `LoadCounter.count` and `SlotTable.slots` do."""
    ids_N = ids_TK.reshape(-1).to(torch.int64)
    counted_TK = torch.ones_like(ids_TK, dtype=torch.int64)
    if real_T is not None:
        counted_TK = counted_TK * real_T[:, None]
    counts_E.scatter_add_(0, ids_N, counted_TK.reshape(-1))
    return table_E.index_select(0, ids_N).view(ids_TK.shape)


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
    tl.device_assert((expert >= 0) & (expert < experts), "a choice of an expert that there is not")
    tl.store(slots + choice, tl.load(table + expert, mask=there, other=0), mask=there)
    counted = there
    if PADDED:
        counted = there & (tl.load(real + choice // TOP_K, mask=there, other=0) != 0)
    of_block = tl.histogram(expert, EXPERTS, mask=counted)
    every = tl.arange(0, EXPERTS)
    tl.atomic_add(counts + every, of_block.to(tl.int64), mask=(every < experts) & (of_block > 0))


def deal_by_kernels(ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor, begin_BE: Tensor | None = None) -> Tensor:
    """As `splitter.deal_out`; by one kernel more than by `count_by_blocks`, whose blocks may be given."""
    ids_TK, choices = ids_TK.contiguous(), ids_TK.numel()
    if begin_BE is None:
        begin_BE = count_by_blocks(ids_TK, sent_EC.shape[0])[1]
    slots_TK = torch.empty(ids_TK.shape, dtype=torch.int64, device=ids_TK.device)
    if choices:
        _deal[(begin_BE.shape[0],)](
            ids_TK,
            begin_BE,
            sent_EC.contiguous(),
            copy_slot_EC.contiguous(),
            slots_TK,
            choices,
            COPIES=sent_EC.shape[1],
            EXPERTS=begin_BE.shape[1],
            BLOCK=_BLOCK,
        )
    return slots_TK


def count_by_blocks(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """By two kernels: int64 ``[E]``, how often each expert is chosen; int32, how often in the blocks before each."""
    ids_TK = ids_TK.contiguous()
    blocks, width = -(-ids_TK.numel() // _BLOCK), power_of_2(max(2, experts))
    counts_E = torch.empty(experts, dtype=torch.int64, device=ids_TK.device)
    begin_BE = torch.empty(blocks, width, dtype=torch.int32, device=ids_TK.device)
    if blocks:
        _count_block[(blocks,)](ids_TK, begin_BE, ids_TK.numel(), experts, EXPERTS=width, BLOCK=_BLOCK, **ASSERT)
    wide = min(32, width)
    _begin[(width // wide,)](begin_BE, counts_E, blocks, experts, EXPERTS=width, WIDE=wide, AT_ONCE=AT_ONCE)
    return counts_E, begin_BE


@jit(do_not_specialize=["choices"])
def _count_block(  # type: ignore[no-untyped-def]
    ids, of_blocks, choices, experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    there = choice < choices
    expert = tl.load(ids + choice, mask=there, other=0).to(tl.int32)
    tl.device_assert((expert >= 0) & (expert < experts), "an expert that there is not")
    counted = tl.histogram(expert, EXPERTS, mask=there)
    tl.store(of_blocks + block * EXPERTS + tl.arange(0, EXPERTS), counted)


@jit
def before_each_block(  # type: ignore[no-untyped-def]
    of_blocks, blocks, column, WIDTH: tl.constexpr, WIDE: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Turn columns of ``of_blocks`` in place into sums of the earlier blocks'; returns the sum of all."""
    before = tl.zeros((WIDE,), dtype=tl.int32)
    for first in range(0, blocks, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        place = of_blocks + block[:, None].to(tl.int64) * WIDTH + column[None, :]
        there = (block < blocks)[:, None] & (column < WIDTH)[None, :]
        counted = tl.load(place, mask=there, other=0)
        tl.store(place, tl.cumsum(counted, axis=0) - counted + before[None, :], mask=there)
        before += tl.sum(counted, axis=0)
    return before


@jit(do_not_specialize=["blocks"])
def _begin(  # type: ignore[no-untyped-def]
    of_blocks, counts, blocks, experts, EXPERTS: tl.constexpr, WIDE: tl.constexpr, AT_ONCE: tl.constexpr
):
    """In place: of the choices of an expert, how many stand in earlier blocks."""
    expert = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    counted = before_each_block(of_blocks, blocks, expert, EXPERTS, WIDE, AT_ONCE)
    tl.store(counts + expert, counted.to(tl.int64), mask=expert < experts)


@jit(do_not_specialize=["choices"])
def _deal(  # type: ignore[no-untyped-def]
    ids,
    begins,
    sent,
    copy_slots,
    slots,
    choices,
    COPIES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
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
