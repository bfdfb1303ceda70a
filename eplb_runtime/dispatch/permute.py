"""Which row goes where on one rank, in plain torch: the order that rows are sent in, the order that experts want them
in, and the sums that bring a token's choices together again. No communication here.

Shape suffixes of this room: T tokens of this rank, K top-k, N = T * K choices (choice ``t * K + k``), M rows that
arrive here, D model width, R ranks, S slots a rank, P = R * S slots.

What a faster kernel would replace stands here once: `count`, `order_by_slot`, `regroup`, `visits`, `each_once`,
`gather`, `sum_choices` and `sum_bags`. Each is a function of its arguments alone; sums run over a token's choices in
the router's order.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from .manifest import own_first
from .memory import RowMemory


def count(slots_N: Tensor, num_slots: int) -> Tensor:
    """int64 ``[P]``: how many of the choices went to each slot. No host sync."""
    return slots_N.new_zeros(num_slots).scatter_add_(0, slots_N, torch.ones_like(slots_N))


def order_by_slot(slots_N: Tensor, first_slot: int, slots_per_rank: int, num_slots: int) -> Tensor:
    """int64 ``[N]``: choices by slot, choices of one slot in their own order; the slots of this rank come first, so
    that what stays here lies in one piece and what leaves in another, by rank.

    Args:
        first_slot: of this rank, which has ``slots_per_rank``.
    """
    here = (slots_N >= first_slot) & (slots_N < first_slot + slots_per_rank)
    return torch.argsort(torch.where(here, slots_N - num_slots, slots_N), stable=True)


def inverse(permutation_N: Tensor) -> Tensor:
    """int64 ``[N]``: where each element has gone."""
    places = torch.arange(permutation_N.shape[0], device=permutation_N.device)
    return torch.empty_like(permutation_N).index_copy_(0, permutation_N, places)


def regroup(counts_RS: NDArray[np.int64], first: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows that arrive grouped by (source rank, slot), to be grouped by (slot, source rank), ranks ascending.

    Args:
        counts_RS: int64 ``[R, S]``, rows of each group.
        first: the rank whose rows lie before all others as they arrive.

    Returns:
        Two int64 ``[M]`` on ``device``: for each row by slot the place where it arrives; for each as it arrives its
        place by slot.
    """
    arrival_R = own_first(len(counts_RS), first)
    arriving_RS = counts_RS[arrival_R]
    arrives_RS, by_slot_SR = np.empty_like(counts_RS), group_begins(counts_RS.T)
    arrives_RS[arrival_R] = group_begins(arriving_RS)
    shift_RS = arrives_RS - by_slot_SR.T
    # Every group moves as a whole: one number says how far.
    groups = np.stack([shift_RS.T.ravel(), counts_RS.T.ravel(), -shift_RS[arrival_R].ravel(), arriving_RS.ravel()])
    shift, length, shift_back, length_back = torch.from_numpy(groups).to(device, non_blocking=True).unbind(0)
    rows = int(counts_RS.sum())
    place_M = torch.arange(rows, device=device)
    return (
        place_M + torch.repeat_interleave(shift, length, output_size=rows),
        place_M + torch.repeat_interleave(shift_back, length_back, output_size=rows),
    )


def group_begins(counts_AB: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each group begins when they lie one after another."""
    begins: NDArray[np.int64] = (np.cumsum(counts_AB) - counts_AB.ravel()).reshape(counts_AB.shape)
    return begins


def visits(slots_TK: Tensor, slots_per_rank: int, num_ranks: int) -> Tensor:
    """int64 ``[T, R]``: 1 where a token has a choice on a rank, else 0."""
    visits_TR = slots_TK.new_zeros(slots_TK.shape[0], num_ranks)
    return visits_TR.scatter_(1, slots_TK // slots_per_rank, 1)


def each_once(visits_TR: Tensor, begin_R: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Tokens by the ranks that they visit, in their own order for each.

    Args:
        begin_R: int64, where those of each rank begin.
        rows: how many they are, U.

    Returns:
        int64 ``[U]``, the tokens; int64 ``[T, R]``, which one of a rank's rows a token is, where it visits that rank.
    """
    within_TR = visits_TR.cumsum(dim=0) - 1
    # One place more than rows: what is not sent goes there.
    place_TR = torch.where(visits_TR > 0, within_TR + begin_R, rows)
    token_TR = torch.arange(visits_TR.shape[0], device=visits_TR.device).unsqueeze(1).expand_as(place_TR)
    token_U = visits_TR.new_empty(rows + 1).scatter_(0, place_TR.reshape(-1), token_TR.reshape(-1))
    return token_U[:rows], within_TR


def gather(source: Tensor, index: Tensor, out: Tensor) -> None:
    """``out[i] = source[index[i]]``, both of one dtype."""
    torch.index_select(source, 0, index, out=out)


def sum_choices(rows_ND: Tensor, place_TK: Tensor, memory: RowMemory, weights_TK: Tensor | None = None) -> Tensor:
    """Each token's choices, weighted, summed in the router's order.

    Args:
        rows_ND: ``[N, D]``.
        place_TK: int64 ``[T, K]``: where each choice lies in ``rows_ND``.
        weights_TK: ``[T, K]``; None: ones.

    Returns:
        ``[T, D]`` in the wider of both dtypes; products are rounded to it (in float32 on a CPU they need not be), and
        summed in float32 at least.
    """
    dtype = rows_ND.dtype if weights_TK is None else torch.promote_types(rows_ND.dtype, weights_TK.dtype)
    if rows_ND.device.type == "cpu" and rows_ND.dtype == dtype == torch.float32 and place_TK.numel():
        return _sum_in_one_pass(rows_ND, place_TK, weights_TK)
    tokens, top_k = place_TK.shape
    total_TD = memory.like(rows_ND, tokens, torch.promote_types(dtype, torch.float32))
    one_TD = memory.like(rows_ND, tokens)
    for choice in range(top_k):
        row_TD = total_TD if choice == 0 and total_TD.dtype == rows_ND.dtype else one_TD
        gather(rows_ND, place_TK[:, choice], row_TD)
        if weights_TK is not None:
            weight_T1 = weights_TK[:, choice : choice + 1]
            row_TD = row_TD.mul_(weight_T1) if row_TD.dtype == dtype else row_TD * weight_T1
        if choice > 0:
            total_TD.add_(row_TD)
        elif row_TD is not total_TD:
            total_TD.copy_(row_TD)
    return total_TD.to(dtype)


def bags(bag_U: Tensor, num_bags: int) -> tuple[Tensor, Tensor]:
    """Elements by the bag that each is in, those of a bag in their own order.

    Args:
        bag_U: int64, from 0 to ``num_bags``.

    Returns:
        int64 ``[U]``, the elements; int64 ``[num_bags]``, where each bag begins.
    """
    size_B = count(bag_U, num_bags)
    return torch.argsort(bag_U, stable=True), size_B.cumsum(0) - size_B


def sum_bags(rows_UD: Tensor, element_U: Tensor, begin_B: Tensor, weights_U: Tensor | None = None) -> Tensor:
    """Rows of each bag, weighted, summed one after another in float32 at least: deterministic.

    Args:
        rows_UD: ``[U, D]``.
        element_U, begin_B: of `bags`.
        weights_U: ``[U]``, of the rows; None: ones.

    Returns:
        ``[B, D]`` in the dtype of the rows; zeros for an empty bag.
    """
    dtype = rows_UD.dtype if weights_U is None else torch.promote_types(rows_UD.dtype, weights_U.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    weights = None if weights_U is None else weights_U.index_select(0, element_U).to(dtype)
    if not element_U.shape[0]:
        return rows_UD.new_zeros(begin_B.shape[0], rows_UD.shape[1])
    total_BD = functional.embedding_bag(element_U, rows_UD.to(dtype), begin_B, mode="sum", per_sample_weights=weights)
    return total_BD.to(rows_UD.dtype)


def _sum_in_one_pass(rows_ND: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """In one pass over the rows, a token's choices one after another; in bfloat16 it would round after each."""
    weights_TK = None if weights_TK is None else weights_TK.to(torch.float32)
    return functional.embedding_bag(place_TK, rows_ND, mode="sum", per_sample_weights=weights_TK)
