"""Split each expert's tokens over its copies so that the busiest rank has as little as can be, and tell each rank what
it sends to which copy: numba, on counts, without torch. What that must know of a placement is laid out once.

Water-filling by Gauss-Seidel: visit the replicated experts in turn and give each the best split for itself, the others
held still (fill the copies on the lowest ranks up to one level). The sweeps converge to the optimum of the linear
program min max rank load, and with momentum they do so along long chains of copies too: before each sweep every split
goes on by five eighths of its last way. They stop on the optimum's certificate. All arithmetic is in integers - tokens
in fixed point - so that the result is the same on every machine and in a kernel.

Where ranks are not equally fast, the slowest rank's time is what counts. If all are to take time t, a rank of speed s
has room for s * t tokens. One that counts ``(1 - s) * t`` tokens on top of its own is then as full as the fastest, so
the split for equal ranks serves. Where not every rank reaches a level (its copies do not bring it enough tokens) t is
larger than the mean, and halved in between what a split has reached and what none can.

Shape suffixes of this room: T tokens, K top-k, L layers, E logical experts, C copies of an expert (padded), R ranks, N
replicated experts (padded).
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...placement import Placement
from ...utils.jit import jit

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Speeds = NDArray[np.float64] | None
SWEEPS = 16
"""At most. Measured on 6,844 layers (16 to 64 ranks, one to three replica slots a rank, DeepSeek-V3's loads and
generated ones): after 10 sweeps 29 layers are more than half a percent above the optimum, after 16 none."""
MOMENTUM_EIGHTHS = 5
MOMENTUM_FROM = 2
"""The first sweep with momentum, counted from 0: the first sweeps go where the start has nothing to say."""
FRACTION_BITS = 16
"""Tokens are split in units of 2 ** -16 at the finest, coarser where counts are so large that sums would overflow."""
TOLERANCE_BITS = 10
"""Sweeps stop when the busiest rank is proven to be within 2 ** -10 of the optimum."""
SPEED_TOLERANCE, SPEED_LEVELS = 1e-3, 12
"""A layer whose slowest rank is so near to the level asked for needs no other; at most so many are tried."""


@dataclass(frozen=True, eq=False)
class SplitTables:
    """Copies of every expert by rank, and the order in which a sweep visits the replicated ones.

    Args:
        copy_slot_LEC: int32, the slot of each copy, home first, then ascending; padded with -1.
        first_rank_LE: int32, the rank of each expert's first copy.
        order_LN: int32, the experts with more than one copy, in the order of a sweep; padded with -1.
        ranks_LNC: int32, ``ranks_LNC[l, n]``: the ranks of the copies of expert ``order_LN[l, n]``; padded with -1.
        count_LN: int32, how many they are.
    """

    copy_slot_LEC: Ints
    first_rank_LE: Ints
    order_LN: Ints
    ranks_LNC: Ints
    count_LN: Ints
    num_ranks: int
    slots_per_rank: int

    def of_layer(self, layer: int) -> "SplitTables":
        """Return the tables of one layer (L = 1), which share memory with these."""
        arrays = (name for name, value in vars(self).items() if isinstance(value, np.ndarray))
        return replace(self, **{name: getattr(self, name)[layer : layer + 1] for name in arrays})

    @cached_property
    def has_replicas(self) -> bool:
        """Return whether any expert has more than one copy."""
        return bool(self.count_LN.any())

    def sum_by_rank(self, quota_LEC: Longs) -> Longs:
        """Return int64 ``[L, R]``, the tokens of each rank, from the tokens of each copy."""
        return _sum_by_rank(quota_LEC, self.copy_slot_LEC, self.slots_per_rank, self.num_ranks)

    @classmethod
    def of(cls, placement: Placement) -> "SplitTables":
        """Return the tables of a placement, all of whose experts must have homes."""
        slot = np.asarray(placement.logical_to_physical)
        rank = placement.rank_of(slot).astype(np.int32)
        count = (slot >= 0).sum(axis=2).astype(np.int32)
        orders = [sweep_order(rank[layer], count[layer]) for layer in range(placement.num_layers)]
        width = max(1, max(map(len, orders)))
        order_LN = np.full((placement.num_layers, width), -1, dtype=np.int32)
        for layer, order in enumerate(orders):
            order_LN[layer, : len(order)] = order
        expert = np.maximum(order_LN, 0)
        layers = np.arange(placement.num_layers)[:, None]
        ranks_LNC = np.where(order_LN[:, :, None] < 0, -1, rank[layers, expert]).astype(np.int32)
        count_LN = np.where(order_LN < 0, 0, count[layers, expert]).astype(np.int32)
        first = np.ascontiguousarray(rank[:, :, 0])
        return cls(slot, first, order_LN, ranks_LNC, count_LN, placement.num_ranks, placement.slots_per_rank)


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Rows that this rank sends to each slot, and that each rank sends to its slots; int64, on the host."""

    sent_P: Longs
    received_RS: Longs


def split_for_rank(
    counts_RE: NDArray[np.integer], tables: SplitTables, rank: int, ranks_per_node: int, speed_R: Speeds = None
) -> tuple[Longs, RowCounts]:
    """Return int64 ``[E, C]``, the tokens that ``rank`` sends to each copy of each expert, and how many rows go where.
    ``counts_RE``: of all ranks, for one layer; ``tables``: of that layer alone. Tokens stay on their own rank, else on
    their node (``ranks_per_node`` consecutive ranks), where quotas allow. ``speed_R``: as for `split_totals`."""
    counts: Longs = np.ascontiguousarray(counts_RE, dtype=np.int64)
    quota_EC = split_totals(counts.sum(axis=0)[None], tables, speed_R=speed_R)[0]
    quotas = tables.copy_slot_LEC[0], quota_EC
    sent_EC, *rows = _share_out(counts, *quotas, rank, ranks_per_node, tables.slots_per_rank)
    return sent_EC, RowCounts(*rows)


def split_totals(totals_LE: NDArray[np.integer], tables: SplitTables, *, speed_R: Speeds = None) -> Longs:
    """Return how many tokens each copy of each expert gets, for the least time of the slowest rank.

    Args:
        totals_LE: integer ``[L, E]``, tokens of each expert over all source ranks; sums below 2 ** 60.
        speed_R: float64 ``[R]``, of each rank, the fastest 1; one of speed 0 has no replicas. None: all alike.

    Returns:
        int64 ``[L, E, C]``, zero where there is no copy; sums over C are ``totals_LE`` exactly. The busiest rank never
            has more than under the even split. ValueError if ``tables`` are of another shape.
    """
    totals: Longs = np.ascontiguousarray(totals_LE, dtype=np.int64)
    if totals.shape != tables.copy_slot_LEC.shape[:2]:
        raise ValueError(f"counts have shape {totals.shape}, the placement has {tables.copy_slot_LEC.shape[:2]}")
    arrays = tables.first_rank_LE, tables.order_LN, tables.ranks_LNC, tables.count_LN
    quota_LEC: Longs = np.zeros(tables.copy_slot_LEC.shape, dtype=np.int64)
    if speed_R is None:
        return _split_layers(totals, arrays, SWEEPS, np.zeros((len(totals), tables.num_ranks), dtype=np.int64))
    least_L = totals.sum(axis=1) / max(float(speed_R.sum()), 1e-12)
    level_L, reached_L, used = least_L, np.full(len(least_L), np.inf), speed_R > 0
    for _ in range(SPEED_LEVELS):
        virtual_LR = np.asarray(np.floor(level_L[:, None] * (1.0 - speed_R)), dtype=np.int64)
        tried_LEC = _split_layers(totals, arrays, SWEEPS, virtual_LR)
        tried_L = (tables.sum_by_rank(tried_LEC)[:, used] / speed_R[used]).max(axis=1, initial=0.0)
        quota_LEC = np.where((tried_L < reached_L)[:, None, None], tried_LEC, quota_LEC)
        least_L = np.where(tried_L > level_L * (1 + SPEED_TOLERANCE), level_L, least_L)
        reached_L = np.minimum(tried_L, reached_L)
        if (reached_L <= least_L * (1 + SPEED_TOLERANCE)).all():
            break
        level_L = (least_L + reached_L) / 2
    return quota_LEC


@jit
def sweep_copies(ranks_NC: Ints, count_N: Ints, share_NC: Longs, load_R: Longs) -> None:
    """Give each replicated expert in turn its best split, the others held still; ``share_NC`` and ``load_R`` change.

    The level is ``(n + sum of the m lowest) / m`` for the largest m whose highest rank still lies under it, found by
    dropping ranks above the level of those left. What does not divide goes to the first of the used copies. Two copies
    have a closed form with the same result. (One loop without helper functions: calls with array arguments would cost
    ten times the arithmetic, signed indices a tenth of it.)
    """
    for index in range(count_N.size):
        copies = count_N[index]
        if copies == 2:
            first, second = np.uintp(ranks_NC[index, 0]), np.uintp(ranks_NC[index, 1])
            before = share_NC[index, 0]
            total = before + share_NC[index, 1]
            low, high = load_R[first] - before, load_R[second] - total + before
            give = total + high - low + 1
            give = 0 if give < 0 else give >> 1
            give = total if give > total else give
            share_NC[index, 0] = give
            share_NC[index, 1] = total - give
            load_R[first] = low + give
            load_R[second] = high + total - give
        elif copies > 2:
            water = 0
            for copy in range(copies):
                rank = np.uintp(ranks_NC[index, copy])
                water += load_R[rank]
                load_R[rank] -= share_NC[index, copy]
            used, level, more = copies, water // copies, water % copies
            while True:
                under, left = 0, water
                for copy in range(copies):
                    base = load_R[np.uintp(ranks_NC[index, copy])]
                    if base <= level:
                        under += 1
                    else:
                        left -= base
                if under == used:
                    break
                used, level, more = under, left // under, left % under
            for copy in range(copies):
                rank = np.uintp(ranks_NC[index, copy])
                share = level - load_R[rank]
                if share < 0:
                    share = 0
                elif more > 0:
                    share += 1
                    more -= 1
                share_NC[index, copy] = share
                load_R[rank] += share


@jit
def go_on(ranks_NC: Ints, count_N: Ints, share_NC: Longs, before_NC: Longs, load_R: Longs) -> None:
    """Do one momentum step, in place: change each expert's shares by five eighths of their change since ``before_NC``,
    and ``load_R`` with them. The first copy takes up the difference; an expert whose share would become negative stays.
    ``before_NC`` becomes the shares before the step."""
    for index in range(count_N.size):
        first, possible = share_NC[index, 0], True
        for copy in range(1, count_N[index]):
            share = share_NC[index, copy]
            step = ((share - before_NC[index, copy]) * MOMENTUM_EIGHTHS) >> 3
            before_NC[index, copy] = step
            first -= step
            possible = possible and share + step >= 0
        possible = possible and first >= 0
        for copy in range(1, count_N[index]):
            step = before_NC[index, copy]
            before_NC[index, copy] = share_NC[index, copy]
            if possible:
                share_NC[index, copy] += step
                load_R[np.uintp(ranks_NC[index, copy])] += step
        if possible:
            load_R[ranks_NC[index, 0]] += first - share_NC[index, 0]
            share_NC[index, 0] = first


@jit
def is_optimal(ranks_NC: Ints, count_N: Ints, share_NC: Longs, load_R: Longs, slack: int) -> bool:
    """Return whether it is proven that no split lowers the busiest rank by more than ``slack`` units. A lower bound:
    the load of ranks within ``slack`` of the busiest, less what could leave them, spread evenly over them."""
    peak = load_R.max()
    floor = peak - slack
    locked, crowd = 0, 0
    for rank in range(load_R.size):
        if load_R[rank] >= floor:
            locked += load_R[rank]
            crowd += 1
    enough = (peak - slack) * crowd
    for index in range(count_N.size):
        inside, escapes = 0, False
        for copy in range(count_N[index]):
            if load_R[np.uintp(ranks_NC[index, copy])] >= floor:
                inside += share_NC[index, copy]
            else:
                escapes = True
        if escapes:
            locked -= inside
            if locked < enough:
                return False
    return locked >= enough


@jit
def sweep_until_optimal(ranks_NC: Ints, count_N: Ints, share_NC: Longs, load_R: Longs, sweeps: int) -> None:
    """Do at most ``sweeps`` Gauss-Seidel sweeps, which change ``share_NC`` and ``load_R`` in place. Stop when the
    busiest rank is within 2 ** -10 of the mean, or `is_optimal` proves it within 2 ** -10 of the optimum."""
    enough = load_R.sum() // load_R.size
    enough += enough >> TOLERANCE_BITS
    before_NC = np.empty_like(share_NC)
    for sweep in range(sweeps):
        peak = load_R.max()
        if peak <= enough or is_optimal(ranks_NC, count_N, share_NC, load_R, peak >> TOLERANCE_BITS):
            return
        if sweep >= MOMENTUM_FROM:
            go_on(ranks_NC, count_N, share_NC, before_NC, load_R)
        elif sweep == MOMENTUM_FROM - 1:
            before_NC[:] = share_NC
        sweep_copies(ranks_NC, count_N, share_NC, load_R)


@jit
def even_shares(totals_E: Longs, order_N: Ints, count_N: Ints, bits: int, share_NC: Longs) -> None:
    """Write even shares of replicated experts to ``share_NC``, in units of 2 ** -bits; first copies get one more."""
    for index in range(order_N.size):
        copies = count_N[index]
        if copies > 1:
            total = totals_E[order_N[index]] << bits
            each, more = total // copies, total % copies
            for copy in range(copies):
                share_NC[index, copy] = each + (1 if copy < more else 0)


@jit
def round_shares(share_NC: Longs, count_N: Ints, bits: int) -> None:
    """Round shares in units of 2 ** -bits tokens to whole tokens, in place, with the same sums: largest remainder
    first, ties to the earlier copy."""
    mask = (1 << bits) - 1
    for index in range(count_N.size):
        missing = 0
        for copy in range(count_N[index]):
            missing += share_NC[index, copy] & mask
        for _ in range(missing >> bits):
            best = 0
            for copy in range(1, count_N[index]):
                if share_NC[index, copy] & mask > share_NC[index, best] & mask:
                    best = copy
            share_NC[index, best] += mask + 1 - (share_NC[index, best] & mask)
        for copy in range(count_N[index]):
            share_NC[index, copy] >>= bits


@jit
def fill_loads(base_R: Longs, ranks_NC: Ints, count_N: Ints, share_NC: Longs, bits: int, load_R: Longs) -> int:
    """Fill ``load_R`` with ``base_R`` tokens plus shares, in units of 2 ** -bits tokens; return the highest load."""
    for rank in range(load_R.size):
        load_R[rank] = base_R[rank] << bits
    for index in range(count_N.size):
        for copy in range(count_N[index]):
            load_R[ranks_NC[index, copy]] += share_NC[index, copy]
    return int(load_R.max())


@jit
def _split_layers(totals_LE: Longs, arrays: tuple[Ints, ...], sweeps: int, virtual_LR: Longs) -> Longs:
    """Split over ranks that count ``virtual_LR`` tokens on top of their own; ``arrays``: of `SplitTables`. Without
    sweeps each copy has the same, the first copies one more."""
    first_rank_LE, order_LN, ranks_LNC, count_LN = arrays
    widest = ranks_LNC.shape[2]
    quota_LEC = np.zeros((*totals_LE.shape, widest), dtype=np.int64)
    load_R, share_NC = np.empty_like(virtual_LR[0]), np.zeros((order_LN.shape[1], widest), dtype=np.int64)
    for layer in range(totals_LE.shape[0]):
        totals_E, quota_EC, base_R = totals_LE[layer], quota_LEC[layer], virtual_LR[layer].copy()
        order_N, ranks_NC, count_N = order_LN[layer], ranks_LNC[layer], count_LN[layer]
        for expert in range(totals_E.size):
            quota_EC[expert, 0] = totals_E[expert]
            base_R[first_rank_LE[layer, expert]] += totals_E[expert]
        total = base_R.sum()
        for index in range(order_N.size):
            if count_N[index] > 1:
                base_R[first_rank_LE[layer, order_N[index]]] -= totals_E[order_N[index]]
        even_shares(totals_E, order_N, count_N, 0, share_NC)
        even_peak = fill_loads(base_R, ranks_NC, count_N, share_NC, 0, load_R)
        if sweeps > 0:
            # Sums of so many rank loads and one more must stay below 2 ** 62.
            bits, room = FRACTION_BITS, (1 << 62) // (widest + 1)
            while bits > 0 and total > (room >> bits):
                bits -= 1
            even_shares(totals_E, order_N, count_N, bits, share_NC)
            fill_loads(base_R, ranks_NC, count_N, share_NC, bits, load_R)
            sweep_until_optimal(ranks_NC, count_N, share_NC, load_R, sweeps)
            round_shares(share_NC, count_N, bits)
            if fill_loads(base_R, ranks_NC, count_N, share_NC, 0, load_R) > even_peak:
                even_shares(totals_E, order_N, count_N, 0, share_NC)
        for index in range(order_N.size):
            for copy in range(count_N[index]):
                quota_EC[order_N[index], copy] = share_NC[index, copy]
    return quota_LEC


@jit
def _share_out(
    counts_RE: Longs, copy_slot_EC: Ints, quota_EC: Longs, me: int, ranks_per_node: int, slots_per_rank: int
) -> tuple[Longs, Longs, Longs]:
    """Own rank; then each node by itself, sources in order against copies in order; then everybody likewise."""
    num_ranks, sent_EC = counts_RE.shape[0], np.zeros(quota_EC.shape, dtype=np.int64)
    sent_P = np.zeros(num_ranks * slots_per_rank, dtype=np.int64)
    received_RS = np.zeros((num_ranks, slots_per_rank), dtype=np.int64)
    left_R, room_C = np.empty(num_ranks, dtype=np.int64), np.empty(quota_EC.shape[1], dtype=np.int64)
    sent_CR = np.empty((quota_EC.shape[1], num_ranks), dtype=np.int64)
    for expert in range(copy_slot_EC.shape[0]):
        copies = 1
        while copies < copy_slot_EC.shape[1] and copy_slot_EC[expert, copies] >= 0:
            copies += 1
        if copies > 1:
            left_R[:], room_C[:], sent_CR[:] = counts_RE[:, expert], quota_EC[expert], 0
            for reach in range(3):
                width = 1 if reach == 0 else ranks_per_node if reach == 1 else num_ranks
                for copy in range(copies):
                    first = copy_slot_EC[expert, copy] // slots_per_rank // width * width
                    for rank in range(first, first + width):
                        if room_C[copy] == 0:
                            break
                        tokens = min(left_R[rank], room_C[copy])
                        sent_CR[copy, rank] += tokens
                        left_R[rank] -= tokens
                        room_C[copy] -= tokens
        for copy in range(copies):
            slot = copy_slot_EC[expert, copy]
            here = slot // slots_per_rank == me
            if copies == 1:
                for rank in range(num_ranks) if here else range(me, me + 1):
                    sent_CR[0, rank] = counts_RE[rank, expert]
            sent_EC[expert, copy] = sent_P[slot] = sent_CR[copy, me]
            if here:
                for rank in range(num_ranks):
                    received_RS[rank, slot % slots_per_rank] = sent_CR[copy, rank]
    return sent_EC, sent_P, received_RS


@jit
def _sum_by_rank(quota_LEC: Longs, slot_LEC: Ints, slots_per_rank: int, ranks: int) -> Longs:
    rank_load_LR = np.zeros((slot_LEC.shape[0], ranks), dtype=np.int64)
    for at in np.ndindex(slot_LEC.shape):
        if slot_LEC[at] >= 0:
            rank_load_LR[at[0], slot_LEC[at] // slots_per_rank] += quota_LEC[at]
    return rank_load_LR


def sweep_order(rank_EC: Ints, count_E: Ints) -> Ints:
    """Return the replicated experts, int32, by color of a greedy coloring: experts of one color share no rank. The more
    copies an expert has, the earlier it is colored, and listed within its color."""
    several = np.flatnonzero(count_E > 1)
    replicated: Ints = several[np.lexsort((several, -count_E[several]))].astype(np.int32)
    color_N, colors_R = [], [0] * (int(rank_EC.max(initial=0)) + 1)  # colors: a bit for each
    for ranks, count in zip(rank_EC[replicated].tolist(), count_E[replicated].tolist(), strict=True):
        taken = 0
        for rank in ranks[:count]:
            taken |= colors_R[rank]
        color = ~taken & (taken + 1)
        for rank in ranks[:count]:
            colors_R[rank] |= color
        color_N.append(color.bit_length())
    return replicated[np.argsort(np.array(color_N, dtype=np.int64), kind="stable")]
