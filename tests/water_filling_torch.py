"""The splitter in torch, on any device: a reference that gives the same integers as ``water_filling`` and ``sources``.

No batch is split by it: counts are on the host anyway, where numba is faster than so many small operations on a device.
Experts of one color share no rank, so a whole color is refilled at once; its result is that of the sweep in order.
Number formats, stops and ties are those of the numba version: both give the same quotas to the last token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from eplb_runtime.moe.routing.tables import SplitTables
from eplb_runtime.moe.routing.water_filling import (
    FRACTION_BITS,
    MOMENTUM_EIGHTHS,
    MOMENTUM_FROM,
    SWEEPS,
    TOLERANCE_BITS,
    WARM_BITS,
    Mode,
)
from eplb_runtime.placement import Placement


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """One layer's ``SplitTables`` on a device.

    Args:
        copy_slot_EC: int64, the slots of each expert's copies; padded with -1.
        first_rank_E: int64, the rank of each expert's first copy.
        order_N: int64, replicated experts, no padding.
        ranks_NC: int64, ranks of their copies; padded with R (a rank of its own that nobody reads).
        exists_NC: bool, whether there is such a copy; true ones come first.
        colors: for each color the range of ``order_N``.
        num_ranks: R.
    """

    copy_slot_EC: Tensor
    first_rank_E: Tensor
    order_N: Tensor
    ranks_NC: Tensor
    exists_NC: Tensor
    colors: tuple[tuple[int, int], ...]
    num_ranks: int

    @classmethod
    def of(cls, placement: Placement, device: torch.device | str = "cpu") -> list[DeviceTables]:
        """One for each layer of ``placement``."""
        tables = SplitTables.of(placement)
        return [cls._of_layer(tables, layer, torch.device(device)) for layer in range(placement.num_layers)]

    @classmethod
    def _of_layer(cls, tables: SplitTables, layer: int, device: torch.device) -> DeviceTables:
        count = int((tables.order_LN[layer] >= 0).sum())
        bounds = list(range(count + 1))

        def long(array: object) -> Tensor:
            return torch.as_tensor(array, dtype=torch.int64).to(device)

        ranks = long(tables.ranks_LNC[layer, :count].copy())
        return cls(
            copy_slot_EC=long(tables.copy_slot_LEC[layer].copy()),
            first_rank_E=long(tables.first_rank_LE[layer].copy()),
            order_N=long(tables.order_LN[layer, :count].copy()),
            ranks_NC=torch.where(ranks < 0, tables.num_ranks, ranks),
            exists_NC=ranks >= 0,
            colors=tuple(pairwise(bounds)),
            num_ranks=tables.num_ranks,
        )


def split_totals(
    totals_E: Tensor,
    tables: DeviceTables,
    *,
    mode: Mode = "water_filling",
    sweeps: int = SWEEPS,
    warm_EC: Tensor | None = None,
) -> Tensor:
    """int64 ``[E, C]``: as ``water_filling.split_totals`` for one layer."""
    quota_EC = torch.zeros(tables.copy_slot_EC.shape, dtype=torch.int64, device=totals_E.device)
    totals_E = totals_E.to(torch.int64)
    quota_EC[:, 0] = totals_E
    if not len(tables.order_N):
        return quota_EC
    totals_N = totals_E[tables.order_N]
    even_NC = _even(totals_N, tables.exists_NC)
    if mode == "even" or sweeps == 0:
        quota_EC[tables.order_N] = even_NC
        return quota_EC
    base_R = torch.zeros(tables.num_ranks + 1, dtype=torch.int64, device=totals_E.device)
    base_R.index_add_(0, tables.first_rank_E, totals_E)
    base_R.index_add_(0, tables.first_rank_E[tables.order_N], -totals_N)
    bits = _fraction_bits(totals_E.sum(), quota_EC.shape[1])
    fixed_N = totals_N << bits
    if warm_EC is None:
        share_NC = _even(fixed_N, tables.exists_NC)
    else:
        share_NC = _warm(fixed_N, warm_EC[tables.order_N], tables.exists_NC)
    load_R = _add(base_R << bits, tables, share_NC)
    share_NC = _sweep_until_optimal(tables, share_NC, load_R, sweeps)
    whole_NC = _round(share_NC, bits, tables.exists_NC)
    worse = _add(base_R, tables, whole_NC)[:-1].max() > _add(base_R, tables, even_NC)[:-1].max()
    quota_EC[tables.order_N] = torch.where(worse, even_NC, whole_NC)
    return quota_EC


def split_counts(
    counts_RE: Tensor,
    tables: DeviceTables,
    *,
    ranks_per_node: int,
    mode: Mode = "water_filling",
    sweeps: int = SWEEPS,
    warm_EC: Tensor | None = None,
    locality: bool = True,
) -> Tensor:
    """Tokens that each source rank sends to each copy: ``sources.split_for_rank`` of all ranks at once.

    Returns:
        int64 ``[R, E, C]``; sums over C are ``counts_RE`` exactly, sums over R are the copies' quotas.
    """
    quota_EC = split_totals(counts_RE.sum(dim=0), tables, mode=mode, sweeps=sweeps, warm_EC=warm_EC)
    sent_REC = torch.zeros((tables.num_ranks, *quota_EC.shape), dtype=torch.int64, device=counts_RE.device)
    sent_REC[:, :, 0] = counts_RE
    if not len(tables.order_N):
        return sent_REC
    left_RN = counts_RE[:, tables.order_N].to(torch.int64)
    room_NC = quota_EC[tables.order_N]
    sent_RNC = torch.zeros((*left_RN.shape, room_NC.shape[1]), dtype=torch.int64, device=counts_RE.device)
    if locality:
        ranks = torch.arange(tables.num_ranks, device=counts_RE.device)
        own_RNC = (tables.ranks_NC == ranks[:, None, None]) & tables.exists_NC
        sent_RNC = torch.minimum(left_RN[:, :, None], room_NC) * own_RNC
        left_RN, room_NC = left_RN - sent_RNC.sum(2), room_NC - sent_RNC.sum(0)
        near = _within_nodes(left_RN, room_NC, tables, ranks_per_node)
        sent_RNC, left_RN, room_NC = sent_RNC + near, left_RN - near.sum(2), room_NC - near.sum(0)
    sent_REC[:, tables.order_N] = sent_RNC + _overlap(left_RN.cumsum(0), left_RN, room_NC.cumsum(1), room_NC)
    return sent_REC


def assign_slots(expert_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor) -> Tensor:
    """The slot that computes each choice of this rank's tokens; the order of tokens decides.

    Args:
        expert_TK: integer ``[T, K]``, logical experts; -1 for no choice.
        sent_EC: int64 ``[E, C]``, this source rank's row of ``split_counts``; its sums over C are at least the choices.
        copy_slot_EC: int64 ``[E, C]`` of the tables.

    Returns:
        int64 ``[T, K]``: the first ``sent_EC[e, 0]`` choices of expert e, in order of (token, k), go to its first copy,
        the next ``sent_EC[e, 1]`` to its second, and so on; -1 stays -1.
    """
    flat = expert_TK.reshape(-1).to(torch.int64)
    order = torch.argsort(flat, stable=True)
    in_order = flat[order]
    place = torch.arange(len(flat), device=flat.device)
    first = torch.searchsorted(in_order, in_order)
    occurrence = torch.empty_like(place)
    occurrence[order] = place - first
    expert = flat.clamp(min=0)
    passed = occurrence[:, None] >= sent_EC.cumsum(1)[expert][:, :-1]
    slot = copy_slot_EC[expert, passed.sum(1)]
    return torch.where(flat < 0, -1, slot).reshape(expert_TK.shape)


def _even(total_N: Tensor, exists_NC: Tensor) -> Tensor:
    copies = exists_NC.sum(1)
    each = total_N // copies
    more = total_N - each * copies
    place = torch.arange(exists_NC.shape[1], device=total_N.device)
    return (each[:, None] + (place < more[:, None])) * exists_NC


def _warm(total_N: Tensor, warm_NC: Tensor, exists_NC: Tensor) -> Tensor:
    warm_NC = warm_NC * exists_NC
    before = warm_NC.sum(1)
    part = (warm_NC << WARM_BITS) // before.clamp(min=1)[:, None]
    share = (total_N >> WARM_BITS)[:, None] * part
    share[:, 0] = total_N - share[:, 1:].sum(1)
    return torch.where((before > 0)[:, None], share, _even(total_N, exists_NC))


def _fraction_bits(total: Tensor, copies: int) -> Tensor:
    bits = torch.arange(FRACTION_BITS + 1, device=total.device)
    room = torch.full((), (1 << 62) // (copies + 1), dtype=torch.int64, device=total.device)
    return (bits * (total <= (room >> bits))).max()


def _add(base_R: Tensor, tables: DeviceTables, share_NC: Tensor) -> Tensor:
    return base_R.index_add(0, tables.ranks_NC.reshape(-1), share_NC.reshape(-1))


def _sweep_until_optimal(tables: DeviceTables, share_NC: Tensor, load_R: Tensor, sweeps: int) -> Tensor:
    """All sweeps run; once the stop holds, what they compute is thrown away, so that nothing waits for the device."""
    enough = load_R[:-1].sum() // tables.num_ranks
    enough = enough + (enough >> TOLERANCE_BITS)
    done = torch.zeros((), dtype=torch.bool, device=load_R.device)
    before_NC = share_NC
    for sweep in range(sweeps):
        done = done | _stop(tables, share_NC, load_R, enough)
        new_NC, new_R = share_NC.clone(), load_R.clone()
        if sweep >= MOMENTUM_FROM:
            step_NC = _momentum(share_NC, before_NC)
            new_NC, new_R = new_NC + step_NC, _add(new_R, tables, step_NC)
        before_NC = share_NC
        for begin, end in tables.colors:
            _refill(tables.ranks_NC[begin:end], tables.exists_NC[begin:end], new_NC[begin:end], new_R)
        share_NC, load_R = torch.where(done, share_NC, new_NC), torch.where(done, load_R, new_R)
    return share_NC


def _momentum(share_NC: Tensor, before_NC: Tensor) -> Tensor:
    step = ((share_NC - before_NC) * MOMENTUM_EIGHTHS) >> 3
    step[:, 0] = -step[:, 1:].sum(1)
    return step * (share_NC + step >= 0).all(1, keepdim=True)


def _stop(tables: DeviceTables, share_NC: Tensor, load_R: Tensor, enough: Tensor) -> Tensor:
    peak = load_R[:-1].max()
    floor = peak - (peak >> TOLERANCE_BITS)
    busy = load_R >= floor
    busy[-1] = False
    at_NC = busy[tables.ranks_NC]
    escapes = (~at_NC & tables.exists_NC).any(1)
    leaves = (share_NC * at_NC).sum(1) * escapes
    return (peak <= enough) | ((load_R * busy).sum() - leaves.sum() >= floor * busy.sum())


def _refill(ranks_NC: Tensor, exists_NC: Tensor, share_NC: Tensor, load_R: Tensor) -> None:
    base = load_R[ranks_NC] - share_NC
    lowest_first = torch.where(exists_NC, base, torch.iinfo(torch.int64).max).sort(dim=1).values
    copies = torch.arange(1, exists_NC.shape[1] + 1, device=base.device)
    water = share_NC.sum(1, keepdim=True) + (lowest_first * exists_NC).cumsum(1)
    level = water // copies
    used = (exists_NC & (lowest_first <= level)).sum(1, keepdim=True)
    level = level.gather(1, used - 1)
    more = water.gather(1, used - 1) - level * used
    wet = exists_NC & (base <= level)
    share_NC.copy_((level - base + (wet.cumsum(1) <= more)) * wet)
    load_R[ranks_NC.reshape(-1)] = (base + share_NC).reshape(-1)


def _round(share_NC: Tensor, bits: Tensor, exists_NC: Tensor) -> Tensor:
    whole = share_NC >> bits
    rest = torch.where(exists_NC, share_NC - (whole << bits), -1)
    missing = (rest * exists_NC).sum(1) >> bits
    order = torch.argsort(rest, dim=1, descending=True, stable=True)
    place = torch.argsort(order, dim=1)
    return whole + (place < missing[:, None])


def _within_nodes(left_RN: Tensor, room_NC: Tensor, tables: DeviceTables, ranks_per_node: int) -> Tensor:
    """What each node's sources, in order, give to the copies of their own node, in order."""
    nodes = tables.num_ranks // ranks_per_node
    before_RN = left_RN.reshape(nodes, ranks_per_node, -1).cumsum(1).reshape(left_RN.shape)
    copy_node = torch.where(tables.exists_NC, tables.ranks_NC // ranks_per_node, -1)
    together = (copy_node[:, :, None] == copy_node[:, None, :]).tril()
    before_NC = (room_NC[:, None, :] * together).sum(2)
    node = torch.arange(tables.num_ranks, device=left_RN.device) // ranks_per_node
    return _overlap(before_RN, left_RN, before_NC, room_NC) * (copy_node == node[:, None, None])


def _overlap(source_end_RN: Tensor, left_RN: Tensor, copy_end_NC: Tensor, room_NC: Tensor) -> Tensor:
    """Lay sources and copies end to end on one line each: what lies side by side goes together."""
    end = torch.minimum(source_end_RN[:, :, None], copy_end_NC)
    begin = torch.maximum((source_end_RN - left_RN)[:, :, None], copy_end_NC - room_NC)
    return (end - begin).clamp(min=0)
