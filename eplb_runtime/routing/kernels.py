"""Counting and routing a batch's choices on a GPU, by few kernels: no host sync, into memory that the caller keeps, so
that a CUDA graph can hold them.

Choices are logical ids, int32 or int64, of any K; -1 is no choice, counts nowhere and goes to no slot. With one copy of
each expert, `count_and_look_up` does it in one pass. With copies, `Dealer` counts, and deals out once all ranks' counts
have told the quotas. Without Triton or a GPU, plain torch does the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..on_triton import fits, jit, power_of_2, tl
from .water_filling_torch import assign_slots

_BLOCK = 256
"""Choices of a program. Dealing out compares all of them with each other."""
_AT_ONCE = 128
"""Blocks whose beginnings are worked out at once."""


def count_and_look_up(
    ids_TK: Tensor, table_E: Tensor, counts_E: Tensor, slots_TK: Tensor, real_T: Tensor | None = None
) -> None:
    """Count a batch's choices and find their slots, in one pass.

    Args:
        ids_TK: int32 or int64 ``[T, K]``, contiguous.
        table_E: int64, the slot of each expert.
        counts_E: int64, added to.
        slots_TK: int64 ``[T, K]``, written.
        real_T: bool, False for padding, which has slots and does not count; None: every token counts.
    """
    (launch_count_and_look_up if fits(ids_TK) else torch_count_and_look_up)(ids_TK, table_E, counts_E, slots_TK, real_T)


def torch_count_and_look_up(
    ids_TK: Tensor, table_E: Tensor, counts_E: Tensor, slots_TK: Tensor, real_T: Tensor | None = None
) -> None:
    """The reference of `launch_count_and_look_up`."""
    ids_TK = ids_TK.to(torch.int64)
    chosen_TK = ids_TK >= 0
    known_TK = ids_TK.clamp(min=0)
    slots_TK.copy_(torch.where(chosen_TK, table_E[known_TK], -1))
    counted_TK = chosen_TK if real_T is None else chosen_TK & real_T[:, None]
    counts_E.scatter_add_(0, known_TK.reshape(-1), counted_TK.reshape(-1).to(torch.int64))


def launch_count_and_look_up(
    ids_TK: Tensor, table_E: Tensor, counts_E: Tensor, slots_TK: Tensor, real_T: Tensor | None = None
) -> None:
    """By the kernel; as `count_and_look_up`."""
    choices = ids_TK.numel()
    if choices:
        _count_and_look_up[(-(-choices // _BLOCK),)](
            ids_TK,
            ids_TK if real_T is None else real_T,
            table_E,
            counts_E,
            slots_TK,
            choices,
            ids_TK.shape[1],
            counts_E.shape[0],
            PADDED=real_T is not None,
            EXPERTS=power_of_2(counts_E.shape[0]),
            BLOCK=_BLOCK,
        )


@jit
def _count_and_look_up(  # type: ignore[no-untyped-def]
    ids,
    real,
    table,
    counts,
    slots,
    choices,
    top_k,
    experts,
    PADDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    choice = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = choice < choices
    expert = tl.load(ids + choice, mask=there, other=-1).to(tl.int64)
    chosen = expert >= 0
    tl.store(slots + choice, tl.load(table + expert, mask=chosen, other=-1), mask=there)
    counted = chosen
    if PADDED:
        counted = chosen & (tl.load(real + choice // top_k, mask=there, other=0) != 0)
    of_block = tl.histogram(tl.where(counted, expert, 0).to(tl.int32), EXPERTS, mask=counted)
    every = tl.arange(0, EXPERTS)
    tl.atomic_add(counts + every, of_block.to(tl.int64), mask=(every < experts) & (of_block > 0))


class Dealer:
    """Counts the choices of batches, and deals them out to copies by quota. One batch after another.

    Args:
        experts: E.
        most_choices: of a batch.
        device: of the choices.
    """

    def __init__(self, experts: int, most_choices: int, device: torch.device) -> None:
        self._experts = experts
        self._begin_BE = torch.zeros(
            max(1, -(-most_choices // _BLOCK)), power_of_2(experts), dtype=torch.int32, device=device
        )

    def count(self, ids_TK: Tensor, counts_E: Tensor) -> None:
        """Count a batch.

        Args:
            ids_TK: int32 or int64 ``[T, K]``, contiguous.
            counts_E: int64, written: how often each expert was chosen.

        Raises:
            ValueError: more choices than ``most_choices``.
        """
        if ids_TK.numel() > self._begin_BE.shape[0] * _BLOCK:
            raise ValueError(
                f"{ids_TK.numel()} choices, and there is room for {self._begin_BE.shape[0] * _BLOCK}: "
                "make the dealer for the largest batch"
            )
        if fits(ids_TK):
            self.launch_count(ids_TK, counts_E)
        else:
            torch_count(ids_TK, counts_E)

    def deal(self, ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor, slots_TK: Tensor) -> None:
        """Slots of the batch that was counted last.

        Args:
            ids_TK: as it was counted.
            sent_EC: int64 ``[E, C]``: so many choices of an expert go to each copy, the first ones to the first; the
                sum over copies is at least what was counted.
            copy_slot_EC: int64 ``[E, C]``, slots of the copies.
            slots_TK: int64 ``[T, K]``, written.
        """
        if fits(ids_TK):
            self.launch_deal(ids_TK, sent_EC, copy_slot_EC, slots_TK)
        else:
            slots_TK.copy_(assign_slots(ids_TK, sent_EC, copy_slot_EC))

    def launch_count(self, ids_TK: Tensor, counts_E: Tensor) -> None:
        """By kernels: each block's choices, then where each expert's begin in each block."""
        width = self._begin_BE.shape[1]
        blocks = -(-ids_TK.numel() // _BLOCK)
        if blocks:
            _count_block[(blocks,)](ids_TK, self._begin_BE, ids_TK.numel(), EXPERTS=width, BLOCK=_BLOCK)
        wide = min(32, width)
        _begin[(width // wide,)](
            self._begin_BE, counts_E, blocks, self._experts, EXPERTS=width, WIDE=wide, AT_ONCE=_AT_ONCE
        )

    def launch_deal(self, ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor, slots_TK: Tensor) -> None:
        """By a kernel; as `deal`."""
        if ids_TK.numel():
            _deal[(-(-ids_TK.numel() // _BLOCK),)](
                ids_TK,
                self._begin_BE,
                sent_EC,
                copy_slot_EC,
                slots_TK,
                ids_TK.numel(),
                COPIES=sent_EC.shape[1],
                EXPERTS=self._begin_BE.shape[1],
                BLOCK=_BLOCK,
            )


def deal_by_kernels(ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor) -> Tensor:
    """As `splitter.deal_out`: counts once more where each block's choices begin, so that nothing is kept from batch to
    batch."""
    ids_TK = ids_TK.contiguous()
    dealer = Dealer(sent_EC.shape[0], ids_TK.numel(), ids_TK.device)
    dealer.launch_count(ids_TK, torch.empty(sent_EC.shape[0], dtype=torch.int64, device=ids_TK.device))
    slots_TK = torch.empty(ids_TK.shape, dtype=torch.int64, device=ids_TK.device)
    dealer.launch_deal(ids_TK, sent_EC, copy_slot_EC, slots_TK)
    return slots_TK


def torch_count(ids_TK: Tensor, counts_E: Tensor) -> None:
    """The reference of `Dealer.launch_count`; that of `Dealer.launch_deal` is `assign_slots`."""
    ids_N = ids_TK.reshape(-1).to(torch.int64)
    counts_E.zero_().scatter_add_(0, ids_N.clamp(min=0), (ids_N >= 0).to(torch.int64))


@jit
def _count_block(ids, of_blocks, choices, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + choice, mask=choice < choices, other=-1).to(tl.int32)
    chosen = expert >= 0
    counted = tl.histogram(tl.where(chosen, expert, 0), EXPERTS, mask=chosen)
    tl.store(of_blocks + block * EXPERTS + tl.arange(0, EXPERTS), counted)


@jit
def _begin(  # type: ignore[no-untyped-def]
    of_blocks, counts, blocks, experts, EXPERTS: tl.constexpr, WIDE: tl.constexpr, AT_ONCE: tl.constexpr
):
    """In place: of the choices of an expert, how many stand in earlier blocks."""
    expert = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    before = tl.zeros((WIDE,), dtype=tl.int32)
    for first in range(0, blocks, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        place = of_blocks + block[:, None].to(tl.int64) * EXPERTS + expert[None, :]
        there = (block < blocks)[:, None] & (expert < EXPERTS)[None, :]
        counted = tl.load(place, mask=there, other=0)
        tl.store(place, tl.cumsum(counted, axis=0) - counted + before[None, :], mask=there)
        before += tl.sum(counted, axis=0)
    tl.store(counts + expert, before.to(tl.int64), mask=expert < experts)


@jit
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
