"""Which row goes where on one rank, in plain torch: the order that rows are sent in, the order that experts want them
in, and the sums that bring a token's choices together again, in the router's order. No communication and no state.

Shape suffixes of this room: T tokens of this rank, K top-k, N = T * K choices (choice ``t * K + k``), M rows that
arrive here, D model width, R ranks, S slots a rank, P = R * S slots.
"""

from functools import cache
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ..experts.compute import SlotCounts

_SMALLEST_POOLED = 1 << 16
"""Bytes. The allocator of the C library gives back smaller ones fast enough."""
_SPARE_EIGHTHS = 1
"""A new buffer is so much larger than was asked for: the number of rows changes from batch to batch."""


class RowMemory:
    """Uninitialised ``[rows, width]`` tensors for rows that travel: on a CPU in buffers that are kept, since fresh ones
    cost a page fault every 4 KiB. A buffer is handed out again when no tensor - and so no graph - holds its storage."""

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._lock = Lock()

    def like(self, example: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised ``[rows, D]`` on the device of ``example`` ``[*, D]``, in its dtype unless ``dtype``
        says another. A large one on a CPU lies in a kept buffer that no tensor uses, or in a new one that is kept."""
        dtype, shape = dtype or example.dtype, (rows, example.shape[1])
        size = rows * example.shape[1] * dtype.itemsize
        if example.device.type != "cpu" or size < _SMALLEST_POOLED or _holders is None:
            return torch.empty(shape, dtype=dtype, device=example.device)
        with self._lock:
            free = [one for one in self._storages if _holders(one._cdata) == 1]  # nobody else's
            free.sort(key=torch.UntypedStorage.nbytes)
            storage = next((one for one in free if one.nbytes() >= size), None)
            if storage is None:  # in the place of a free one that was too small
                storage = torch.UntypedStorage(size + size * _SPARE_EIGHTHS // 8)
                self._storages = [*(one for one in self._storages if not free or one is not free[-1]), storage]
            return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]


# How many hold a storage. Without it (it is not public) nothing is kept.
_holders = getattr(torch._C, "_storage_Use_Count", None)


class Leaving(NamedTuple):
    """What a batch's choices say of what this rank sends, ahead of any exchange. Own rows come first, then by rank.

    Attributes:
        counts_2RW: int64, sent to each rank: choices of each of its slots, then, with ``dedup``, how many tokens, then
            the tag, if there is one; and room for what each rank sends here.
        choice_N: int64, choices by slot, choices of one slot in their own order.
        place_TK: int64, the place of each choice there.
        token_N: int64, the token of each; with ``dedup``, the tokens to send, as many as ``counts_2RW`` says.
        source_row_N1: int64, for each of ``choice_N`` the row of its token among those sent to its rank; None: each
            choice has a row of its own.
    """

    counts_2RW: Tensor
    choice_N: Tensor
    place_TK: Tensor
    token_N: Tensor
    source_row_N1: Tensor | None


class Arriving(NamedTuple):
    """Rows that arrive, those of this rank first, then by rank and slot; wanted by slot, then by rank.

    Attributes:
        arrived_M: int64, for each choice by slot the place where it arrives.
        slot_place_M: int64, for each as it arrives its place by slot.
        row_M: int64, for each choice by slot the place where its token arrives.
        ends_S: int32, where each slot's end.
    """

    arrived_M: Tensor
    slot_place_M: Tensor
    row_M: Tensor
    ends_S: Tensor


def leaving(
    slots_TK: Tensor, rank: int, num_ranks: int, slots_per_rank: int, *, dedup: bool, tag: int | None = None
) -> Leaving:
    """Return which rows this rank sends, in which order, and how many to each slot, without a host sync. ``dedup``: a
    token goes once to each rank that it visits. ``tag``: a number that is sent with the counts; None: none is."""
    slots_N, device, num_slots = slots_TK.reshape(-1), slots_TK.device, num_ranks * slots_per_rank
    # The slots of this rank come first, so that what stays here lies in one piece and what leaves in another, by rank.
    place_P = _places_of_slots(rank * slots_per_rank, slots_per_rank, num_slots, device)
    choice_N = torch.argsort(place_P.index_select(0, slots_N), stable=True)
    place_TK = inverse(choice_N).view(slots_TK.shape)
    counts = [count(slots_N, num_slots).view(num_ranks, slots_per_rank)]
    if dedup:
        rank_TK, place_R = slots_TK // slots_per_rank, _places_of_slots(rank, 1, num_ranks, device)
        visits_TR = visits(rank_TK, num_ranks)
        tokens_R = visits_TR.sum(dim=0)
        begin_R = ((place_R < place_R.unsqueeze(1)) * tokens_R).sum(dim=1)  # own tokens come first
        token_N, within_TR = dedup_tokens(visits_TR, begin_R, slots_N.shape[0])
        source_row_N1 = within_TR.gather(1, rank_TK).view(-1, 1).index_select(0, choice_N)
        counts.append(tokens_R.unsqueeze(1))
    else:
        token_N, source_row_N1 = choice_N // slots_TK.shape[1], None
    if tag is not None:
        counts.append(choice_N.new_full((num_ranks, 1), tag))
    counts_2RW = choice_N.new_empty(2, num_ranks, sum(column.shape[1] for column in counts))
    torch.cat(counts, dim=1, out=counts_2RW[0])
    return Leaving(counts_2RW, choice_N, place_TK, token_N, source_row_N1)


def arriving(
    counts_RW: NDArray[np.int64],
    first: int,
    slots_per_rank: int,
    device: torch.device,
    source_row_M1: Tensor | None = None,
    counts: Tensor | None = None,
) -> Arriving:
    """Return where each row arrives, and its place by slot. ``counts_RW``: what each rank has sent here; ``counts``,
    the same on the device, is for kernels. ``first``: this rank. ``source_row_M1``: `Leaving.source_row_N1` of all
    ranks, in arrival order; None: each choice has a row of its own."""
    counts_RS = counts_RW[:, :slots_per_rank]
    order_R = local_first_order(len(counts_RS), first)
    arriving_RS = counts_RS[order_R]
    arrives_RS, by_slot_SR = np.empty_like(counts_RS), group_begins(counts_RS.T)
    arrives_RS[order_R] = group_begins(arriving_RS)
    shift_RS = arrives_RS - by_slot_SR.T
    # Every group moves as a whole: one number says how far.
    groups = [shift_RS.T.ravel(), counts_RS.T.ravel(), -shift_RS[order_R].ravel(), arriving_RS.ravel()]
    if source_row_M1 is not None:
        groups.append(np.tile(block_offsets(counts_RW[:, slots_per_rank], first), slots_per_rank))
    shift, length, shift_back, length_back, *begin = torch.from_numpy(np.stack(groups)).to(device, non_blocking=True)
    rows = int(counts_RS.sum())
    place_M = torch.arange(rows, device=device)
    arrived_M = place_M + torch.repeat_interleave(shift, length, output_size=rows)
    row_M = arrived_M
    if source_row_M1 is not None:
        row_M = torch.repeat_interleave(begin[0], length, output_size=rows)
        row_M += source_row_M1.view(-1).index_select(0, arrived_M)
    slot_place_M = place_M + torch.repeat_interleave(shift_back, length_back, output_size=rows)
    ends_S = SlotCounts.of(counts_RS.sum(axis=0).tolist(), device).offsets_S
    return Arriving(arrived_M, slot_place_M, row_M, ends_S)


@cache
def _places_of_slots(first_slot: int, slots_per_rank: int, num_slots: int, device: torch.device) -> Tensor:
    """int64 ``[P]``: slots in their order, if those of one rank lie before all others."""
    # Made on the host: two streams may ask for it at once.
    slot_P = torch.arange(num_slots)
    own_P = (slot_P >= first_slot) & (slot_P < first_slot + slots_per_rank)
    return torch.where(own_P, slot_P - first_slot, slot_P + slots_per_rank * (slot_P < first_slot)).to(device)


def count(slots_N: Tensor, num_slots: int) -> Tensor:
    """Return int64 ``[P]``: how many choices each slot has. No host sync."""
    return slots_N.new_zeros(num_slots).scatter_add_(0, slots_N, torch.ones_like(slots_N))


def inverse(permutation_N: Tensor) -> Tensor:
    """Return the inverse permutation, int64 ``[N]``: its element ``permutation_N[i]`` is i."""
    places = torch.arange(permutation_N.shape[0], device=permutation_N.device)
    return torch.empty_like(permutation_N).index_copy_(0, permutation_N, places)


def block_offsets(rows_R: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """Return int64 ``[R]``: where each rank's rows begin if those of rank ``first`` come before all others."""
    order_R, begin_R = local_first_order(len(rows_R), first), np.empty_like(rows_R)
    begin_R[order_R] = group_begins(rows_R[order_R])
    return begin_R


def local_first_order(num_ranks: int, first: int) -> NDArray[np.int64]:
    """Return int64 ``[R]``: rank ``first``, then the other ranks in ascending order."""
    return np.array([first, *(rank for rank in range(num_ranks) if rank != first)])


def group_begins(counts_AB: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each group begins, in the shape of the counts, if groups follow one another in row-major order."""
    block_offsets: NDArray[np.int64] = (np.cumsum(counts_AB) - counts_AB.ravel()).reshape(counts_AB.shape)
    return block_offsets


def visits(rank_TK: Tensor, num_ranks: int) -> Tensor:
    """Return int64 ``[T, R]``: 1 where a token has a choice on a rank, else 0."""
    return rank_TK.new_zeros(rank_TK.shape[0], num_ranks).scatter_(1, rank_TK, 1)


def dedup_tokens(visits_TR: Tensor, begin_R: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return int64 ``[rows]``, the tokens that visit each rank, a rank's from ``begin_R`` on; and int64 ``[T, R]``, the
    place of a token among those that visit the rank."""
    within_TR = visits_TR.cumsum(dim=0) - 1
    # One place more than rows: what is not sent goes there.
    place_TR = torch.where(visits_TR > 0, within_TR + begin_R, rows)
    token_TR = torch.arange(visits_TR.shape[0], device=visits_TR.device).unsqueeze(1).expand_as(place_TR)
    token_U = visits_TR.new_empty(rows + 1).scatter_(0, place_TR.reshape(-1), token_TR.reshape(-1))
    return token_U[:rows], within_TR


def sum_choices(rows_ND: Tensor, place_TK: Tensor, memory: RowMemory, weights_TK: Tensor | None = None) -> Tensor:
    """Return ``[T, D]``: the sum of each token's rows, which are at ``place_TK``, times ``weights_TK`` if given, in the
    router's order. The dtype is the wider of both; products are rounded to it (in float32 on a CPU they need not be),
    and sums are in float32 at least. The result may lie in ``memory``."""
    dtype = rows_ND.dtype if weights_TK is None else torch.promote_types(rows_ND.dtype, weights_TK.dtype)
    if rows_ND.device.type == "cpu" and rows_ND.dtype == dtype == torch.float32 and place_TK.numel():
        # In one pass over the rows, a token's choices one after another; in bfloat16 it would round after each.
        weights_TK = None if weights_TK is None else weights_TK.to(torch.float32)
        return functional.embedding_bag(place_TK, rows_ND, mode="sum", per_sample_weights=weights_TK)
    return sum_one_by_one(rows_ND, place_TK, memory, weights_TK).to(dtype)


def sum_one_by_one(rows_ND: Tensor, place_TK: Tensor, memory: RowMemory, weights_TK: Tensor | None = None) -> Tensor:
    """Return ``[T, D]``, the sums of `sum_choices` as a GPU makes them: each product and each sum is rounded, in
    float32 or a wider dtype. The result may lie in ``memory``."""
    dtype = rows_ND.dtype if weights_TK is None else torch.promote_types(rows_ND.dtype, weights_TK.dtype)
    total_TD = memory.like(rows_ND, place_TK.shape[0], torch.promote_types(dtype, torch.float32)).zero_()
    row_TD = memory.like(rows_ND, place_TK.shape[0])
    for choice, place_T in enumerate(place_TK.unbind(1)):
        torch.index_select(rows_ND, 0, place_T, out=row_TD)
        if weights_TK is None:
            total_TD.add_(row_TD)
        else:
            weight_T1 = weights_TK[:, choice : choice + 1]
            total_TD.add_(row_TD.mul_(weight_T1) if row_TD.dtype == dtype else row_TD * weight_T1)
    return total_TD


def sum_local_choices(
    rows_MD: Tensor, place_UK: Tensor, weights_M: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``[U, D]`` in ``dtype``: the sum of each token's rows that are here (place -1: not here), times
    ``weights_M`` if given, in the router's order; products in the wider dtype, sums in float32 at least."""
    rows_MD = rows_MD if weights_M is None else rows_MD * weights_M.unsqueeze(1)
    here_UK = place_UK >= 0
    place_N, count_U = place_UK[here_UK], here_UK.sum(dim=1)
    if not place_N.shape[0]:
        return rows_MD.new_zeros(place_UK.shape[0], rows_MD.shape[1], dtype=dtype)
    rows_MD = rows_MD.to(torch.promote_types(rows_MD.dtype, torch.float32))
    return functional.embedding_bag(place_N, rows_MD, count_U.cumsum(0) - count_U, mode="sum").to(dtype)
