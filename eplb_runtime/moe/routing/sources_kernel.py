"""One rank's part of a batch's split, worked out on the device: for dispatchers that want no counts on the host.

The integers of `sources.split_for_rank`, which is the reference: quotas of the copies by `water_filling_kernel`, then
who sends to which, a program an expert. Where sources in their order meet copies in theirs, a copy takes of each source
what the sources before it have left of its room; so a copy takes from all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...utils.triton import jit, power_of_2, tl
from .tables import SplitTables
from .water_filling import SWEEPS, Mode
from .water_filling_kernel import KernelTables, launch_split_totals

_LEAST_REPLICATED = 16
"""Room for so many experts with copies; with more, for a power of 2: few shapes, so few kernels are compiled."""


@dataclass(frozen=True, eq=False)
class LayerOnDevice:
    """What one layer's split needs, on the device.

    Args:
        tables: of this layer alone; C, its copies, a power of 2.
        copy_slot_EC: int64, the slots of each expert's copies; padded with -1.
        slots_per_rank: S.
    """

    tables: KernelTables
    copy_slot_EC: Tensor
    slots_per_rank: int


def layers_on_device(tables: SplitTables, device: torch.device) -> Sequence[LayerOnDevice]:
    """One for each layer of the tables."""
    wide = _widened(tables)
    slots_LEC = torch.from_numpy(wide.copy_slot_LEC.astype(np.int64)).to(device)
    layers = KernelTables.of(wide, device).each()
    return [LayerOnDevice(*one, tables.slots_per_rank) for one in zip(layers, slots_LEC, strict=True)]


def sent_by_rank(
    counts_RE: Tensor,
    layer: LayerOnDevice,
    rank: int,
    *,
    ranks_per_node: int,
    mode: Mode = "water_filling",
    locality: bool = True,
    least_tokens: int = 0,
) -> Tensor:
    """What one rank sends of one layer's batch. No host sync.

    Args:
        counts_RE: int64 ``[R, E]`` on the device, tokens of each source rank for each expert; rows may lie apart.
        rank: whose.
        ranks_per_node, mode, locality: as of `sources.split_for_rank`.
        least_tokens: below so many over all ranks everything stays at home.

    Returns:
        int64 ``[E, C]``, tokens for each copy, C as of ``layer``.
    """
    (ranks, experts), copies = counts_RE.shape, layer.copy_slot_EC.shape[1]
    total_E = counts_RE.sum(dim=0)
    quota_EC, sent_EC = torch.empty_like(layer.copy_slot_EC), torch.empty_like(layer.copy_slot_EC)
    launch_split_totals(total_E[None], layer.tables, quota_EC[None], sweeps=0 if mode == "even" else SWEEPS)
    _share_out[(experts,)](
        counts_RE,
        total_E,
        layer.copy_slot_EC,
        quota_EC,
        sent_EC,
        counts_RE.stride(0),
        experts,
        ranks,
        layer.slots_per_rank,
        ranks_per_node,
        rank,
        least_tokens,
        LOCALITY=locality,
        COPIES=copies,
        EXPERTS=power_of_2(experts),
        RANKS=power_of_2(ranks),
    )
    return sent_EC


def _widened(tables: SplitTables) -> SplitTables:
    """Padded to sizes that other placements have, too."""
    rows = power_of_2(max(_LEAST_REPLICATED, tables.order_LN.shape[1])) - tables.order_LN.shape[1]
    columns = power_of_2(max(2, tables.copy_slot_LEC.shape[2])) - tables.copy_slot_LEC.shape[2]

    def padded(array: NDArray[np.int32], *more: int, fill: int = -1) -> NDArray[np.int32]:
        return np.pad(array, [(0, 0), *((0, each) for each in more)], constant_values=fill)

    return replace(
        tables,
        copy_slot_LEC=padded(tables.copy_slot_LEC, 0, columns),
        order_LN=padded(tables.order_LN, rows),
        ranks_LNC=padded(tables.ranks_LNC, rows, columns),
        count_LN=padded(tables.count_LN, rows, fill=0),
        color_LN=padded(tables.color_LN, rows),
    )


@jit(do_not_specialize=["stride", "me", "least"])
def _share_out(  # type: ignore[no-untyped-def]
    counts,
    totals,
    copy_slots,
    quotas,
    sent,
    stride,
    experts,
    num_ranks,
    slots_per_rank,
    ranks_per_node,
    me,
    least,
    LOCALITY: tl.constexpr,
    COPIES: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, EXPERTS)
    tokens = tl.sum(tl.load(totals + every, mask=every < experts, other=0), axis=0)
    rank_R = tl.arange(0, RANKS)
    left_R = tl.load(counts + rank_R.to(tl.int64) * stride + expert, mask=rank_R < num_ranks, other=0)
    mine_R = rank_R == me
    all_mine = tl.sum(tl.where(mine_R, left_R, 0), axis=0)
    copy_C = tl.arange(0, COPIES)
    slot_C = tl.load(copy_slots + expert * COPIES + copy_C)
    there_C = slot_C >= 0
    rank_C = tl.where(there_C, slot_C, 0).to(tl.int32) // slots_per_rank
    room_C = tl.load(quotas + expert * COPIES + copy_C, mask=there_C, other=0)
    sent_C = room_C * 0
    if LOCALITY:
        # What is on a copy's own rank, then on its node.
        for copy in range(COPIES):
            at = tl.sum(tl.where(copy_C == copy, rank_C, 0), axis=0)
            left_R, room_C, sent_C = _take(left_R, room_C, sent_C, copy_C == copy, rank_R == at, mine_R)
        for copy in range(COPIES):
            node = tl.sum(tl.where(copy_C == copy, rank_C, 0), axis=0) // ranks_per_node
            near_R = rank_R // ranks_per_node == node
            left_R, room_C, sent_C = _take(left_R, room_C, sent_C, copy_C == copy, near_R, mine_R)
    for copy in range(COPIES):
        left_R, room_C, sent_C = _take(left_R, room_C, sent_C, copy_C == copy, rank_R < num_ranks, mine_R)
    at_home_C = tl.where(copy_C == 0, all_mine, 0)
    tl.store(sent + expert * COPIES + copy_C, tl.where(tokens < least, at_home_C, sent_C))


@jit
def _take(left_R, room_C, sent_C, is_copy_C, from_R, mine_R):  # type: ignore[no-untyped-def]
    """One copy takes from these sources, in their order, until its room is full."""
    room = tl.sum(tl.where(is_copy_C, room_C, 0), axis=0)
    given_R = tl.where(from_R, left_R, 0)
    before_R = tl.cumsum(given_R, axis=0) - given_R
    taken_R = tl.minimum(tl.maximum(room - before_R, 0), given_R)
    taken_by_me = tl.sum(tl.where(mine_R, taken_R, 0), axis=0)
    room_C = tl.where(is_copy_C, room_C - tl.sum(taken_R, axis=0), room_C)
    return left_R - taken_R, room_C, tl.where(is_copy_C, sent_C + taken_by_me, sent_C)
