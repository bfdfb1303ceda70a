"""Counting and routing a batch's choices on a GPU, by few kernels: no host sync, so that a CUDA graph can hold them.

Choices are logical ids, int32 or int64. With one copy of each expert, `count_and_map` does it in one pass; an id of
no expert ends the job by an assertion of the device, as plain torch would. With copies, `deal_by_kernels` deals out
once all ranks' counts have given the quotas; its reference is `splitter.deal_out`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...utils.triton import jit, power_of_2, tl

_BLOCK = 256
"""Choices of a program. Dealing out compares all of them with each other."""
_WIDE = 32
"""Columns of counts, of a program."""
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
    tl.device_assert((expert >= 0) & (expert < experts), "a choice of an expert that does not exist")
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
    counts_E = torch.empty(experts, dtype=torch.int64, device=ids_TK.device)
    return counts_E, begin_of_blocks(ids_TK.contiguous(), counts_E.view(1, -1), experts, _BLOCK)


def begin_of_blocks(
    slots_TK: Tensor, counts_RC: Tensor, slots_per_rank: int, block: int, dedup: bool = False, tag: int | None = None
) -> Tensor:
    """Write how many choices each slot has (with ``dedup`` how many tokens each rank, and the tag) into ``counts_RC``,
    and return int32 how many are in the blocks before each."""
    choices, (ranks, columns) = slots_TK.numel(), counts_RC.shape
    widths = {"SLOTS": power_of_2(max(2, ranks * slots_per_rank)), "RANKS": power_of_2(max(2, ranks)) if dedup else 0}
    width, blocks = sum(widths.values()), -(-choices // block)
    begin_BW = torch.empty(blocks, width, dtype=torch.int32, device=slots_TK.device)
    if blocks:
        of_slots = slots_per_rank, ranks * slots_per_rank
        sizes = {"TOP_K": slots_TK.shape[1], **widths, "BLOCK": block}
        count_slots[(blocks,)](slots_TK, begin_BW, choices, *of_slots, **sizes, **ASSERT)
    begin_slots[(-(-width // _WIDE),)](
        *(begin_BW, counts_RC, blocks, tag or 0, ranks, slots_per_rank, columns),
        **widths,
        HAS_TAG=tag is not None,
        WIDE=_WIDE,
        AT_ONCE=AT_ONCE,
    )
    return begin_BW


@jit
def is_first(slots, choice, there, rank, slots_per_rank, TOP_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether no earlier choice of the same token is on the same rank."""
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
    """Choices of each slot in a block, and with ``RANKS`` tokens that visit each rank."""
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
    """In place: of each slot's choices, how many are in earlier blocks; and the counts for each rank."""
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
