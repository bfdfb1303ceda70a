"""Split each expert's tokens over its copies so that the busiest rank has as little as can be: numba, on counts.

Water-filling by Gauss-Seidel: visit the replicated experts in turn and give each the best split for itself, the others
held still (fill the copies on the lowest ranks up to one level). The sweeps converge to the optimum of the linear
program min max rank load, and with momentum they do so along long chains of copies too: before each sweep every split
goes on by five eighths of its last way. They stop on the optimum's certificate. All arithmetic is in integers - tokens
in fixed point - so that the result is the same on every machine and in a kernel.

Where ranks are not equally fast, the slowest rank's time is what counts. If all are to take time t, a rank of speed s
has room for s * t tokens. One that counts ``(1 - s) * t`` tokens on top of its own is then as full as the fastest, so
the split for equal ranks serves. Where not every rank reaches a level (its copies do not bring it enough tokens) t is
larger than the mean, and halved in between what a split has reached and what none can.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...utils.jit import jit
from .tables import SplitTables

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

Mode = Literal["water_filling", "even", "home"]


def split_totals(
    totals_LE: NDArray[np.integer],
    tables: SplitTables,
    *,
    mode: Mode = "water_filling",
    sweeps: int = SWEEPS,
    layers: slice = slice(None),
    speed_R: NDArray[np.float64] | None = None,
) -> NDArray[np.int64]:
    """Tokens for each copy of each expert.

    Args:
        totals_LE: integer ``[L, E]``, tokens of each expert over all source ranks; sums below 2 ** 60.
        mode: ``"water_filling"``, ``"even"`` (each copy the same, the first copies one more) or ``"home"``.
        sweeps: at most so many Gauss-Seidel sweeps.
        layers: the layers of ``tables`` that the first axis is.
        speed_R: float64 ``[R]``, of each rank, the fastest 1; one of speed 0 has no replicas. None: all alike.

    Returns:
        int64 ``[L, E, C]``, zero where there is no copy; sums over C are ``totals_LE`` exactly. The busiest rank never
        has more than under the even split.
    """
    totals: NDArray[np.int64] = np.ascontiguousarray(totals_LE, dtype=np.int64)
    if totals.shape != tables.copy_slot_LEC[layers].shape[:2]:
        raise ValueError(
            f"counts have shape {totals.shape}, the placement has {tables.copy_slot_LEC[layers].shape[:2]}"
        )
    if speed_R is None or mode != "water_filling":
        none_LR = np.zeros((len(totals), tables.num_ranks), dtype=np.int64)
        return _split(totals, tables, layers, 0 if mode == "even" else sweeps, none_LR, at_home=mode == "home")
    least_L = totals.sum(axis=1) / max(float(speed_R.sum()), 1e-12)
    level_L, reached_L = least_L, np.full(len(least_L), np.inf)
    quota_LEC = np.zeros(tables.copy_slot_LEC[layers].shape, dtype=np.int64)
    for _ in range(SPEED_LEVELS):
        virtual_LR = np.asarray(np.floor(level_L[:, None] * (1.0 - speed_R)), dtype=np.int64)
        tried_LEC = _split(totals, tables, layers, sweeps, virtual_LR)
        used = speed_R > 0
        seconds_LR = tables.sum_by_rank(tried_LEC, layers)[:, used] / speed_R[used]
        tried_L = seconds_LR.max(axis=1, initial=0.0)
        quota_LEC = np.where((tried_L < reached_L)[:, None, None], tried_LEC, quota_LEC)
        least_L = np.where(tried_L > level_L * (1 + SPEED_TOLERANCE), level_L, least_L)
        reached_L = np.minimum(tried_L, reached_L)
        if (reached_L <= least_L * (1 + SPEED_TOLERANCE)).all():
            break
        level_L = (least_L + reached_L) / 2
    return quota_LEC


def _split(
    totals_LE: NDArray[np.int64],
    tables: SplitTables,
    layers: slice,
    sweeps: int,
    virtual_LR: NDArray[np.int64],
    at_home: bool = False,
) -> NDArray[np.int64]:
    """Split tokens over ranks that count virtual tokens, int64 ``[L, R]``, on top of their own."""
    quota_LEC = np.zeros(tables.copy_slot_LEC[layers].shape, dtype=np.int64)
    if at_home:
        quota_LEC[:, :, 0] = totals_LE
        return quota_LEC
    _split_layers(
        totals_LE,
        tables.first_rank_LE[layers],
        tables.order_LN[layers],
        tables.ranks_LNC[layers],
        tables.count_LN[layers],
        sweeps,
        virtual_LR,
        quota_LEC,
    )
    return quota_LEC


@jit(error_model="numpy")
def sweep_copies(
    ranks_NC: NDArray[np.int32],
    count_N: NDArray[np.int32],
    share_NC: NDArray[np.int64],
    load_R: NDArray[np.int64],
) -> None:
    """Give each replicated expert in turn its best split while the others stand still; in place.

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


@jit(error_model="numpy")
def go_on(
    ranks_NC: NDArray[np.int32],
    count_N: NDArray[np.int32],
    share_NC: NDArray[np.int64],
    before_NC: NDArray[np.int64],
    load_R: NDArray[np.int64],
) -> None:
    """Take each expert's split farther the way it came from ``before_NC``; in place, ``before_NC`` too. Every copy but
    the first goes on by so many eighths, the first takes up the difference; an expert for which that would need less
    than nothing stays."""
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


@jit(error_model="numpy")
def is_optimal(
    ranks_NC: NDArray[np.int32],
    count_N: NDArray[np.int32],
    share_NC: NDArray[np.int64],
    load_R: NDArray[np.int64],
    slack: int,
) -> bool:
    """Return whether no split can lower the busiest rank by more than ``slack`` units. The certificate: the load of the
    ranks within ``slack`` of the busiest, less what could leave them, spread evenly over them, is a lower bound."""
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


@jit(error_model="numpy")
def sweep_until_optimal(
    ranks_NC: NDArray[np.int32],
    count_N: NDArray[np.int32],
    share_NC: NDArray[np.int64],
    load_R: NDArray[np.int64],
    sweeps: int,
) -> int:
    """Return the Gauss-Seidel sweeps done from the split in ``share_NC`` and ``load_R``, in place; stops when the
    busiest rank is within 2 ** -10 of the mean or of the certificate's bound."""
    enough = load_R.sum() // load_R.size
    enough += enough >> TOLERANCE_BITS
    before_NC = np.empty_like(share_NC)
    for sweep in range(sweeps):
        peak = load_R.max()
        if peak <= enough or is_optimal(ranks_NC, count_N, share_NC, load_R, peak >> TOLERANCE_BITS):
            return sweep
        if sweep >= MOMENTUM_FROM:
            go_on(ranks_NC, count_N, share_NC, before_NC, load_R)
        elif sweep == MOMENTUM_FROM - 1:
            for index in range(count_N.size):
                for copy in range(count_N[index]):
                    before_NC[index, copy] = share_NC[index, copy]
        sweep_copies(ranks_NC, count_N, share_NC, load_R)
    return sweeps


@jit(error_model="numpy")
def fraction_bits(total: int, copies: int) -> int:
    """Bits after the binary point that fit: sums of ``copies + 1`` rank loads must stay below 2 ** 62."""
    room = (1 << 62) // (copies + 1)
    bits = FRACTION_BITS
    while bits > 0 and total > (room >> bits):
        bits -= 1
    return bits


@jit(error_model="numpy")
def even_shares(total: int, copies: int, share_C: NDArray[np.int64]) -> None:
    """``total // copies`` each, one more to the first few."""
    each = total // copies
    more = total - each * copies
    for copy in range(copies):
        share_C[copy] = each + (1 if copy < more else 0)


@jit(error_model="numpy")
def even_splits(
    totals_E: NDArray[np.int64],
    order_N: NDArray[np.int32],
    count_N: NDArray[np.int32],
    quota_EC: NDArray[np.int64],
) -> None:
    """Split each replicated expert evenly."""
    for index in range(order_N.size):
        if count_N[index] > 1:
            even_shares(totals_E[order_N[index]], count_N[index], quota_EC[order_N[index]])


@jit(error_model="numpy")
def round_shares(
    share_NC: NDArray[np.int64],
    order_N: NDArray[np.int32],
    count_N: NDArray[np.int32],
    bits: int,
    quota_EC: NDArray[np.int64],
) -> None:
    """Whole tokens from shares in fixed point that sum to a whole: largest remainder, ties to the earlier copy."""
    for index in range(order_N.size):
        copies, expert, missing = count_N[index], order_N[index], 0
        for copy in range(copies):
            quota_EC[expert, copy] = share_NC[index, copy] >> bits
            missing += share_NC[index, copy] & ((1 << bits) - 1)
        for _ in range(missing >> bits):
            best, best_rest = 0, -1
            for copy in range(copies):
                rest = share_NC[index, copy] - (quota_EC[expert, copy] << bits)
                if rest > best_rest:
                    best, best_rest = copy, rest
            quota_EC[expert, best] += 1  # its remainder is negative from here on


@jit(error_model="numpy")
def _peak(
    base_R: NDArray[np.int64],
    order_N: NDArray[np.int32],
    ranks_NC: NDArray[np.int32],
    count_N: NDArray[np.int32],
    quota_EC: NDArray[np.int64],
    load_R: NDArray[np.int64],
) -> int:
    for rank in range(load_R.size):
        load_R[rank] = base_R[rank]
    for index in range(order_N.size):
        for copy in range(count_N[index]):
            load_R[ranks_NC[index, copy]] += quota_EC[order_N[index], copy]
    return int(load_R.max())


@jit(error_model="numpy")
def _split_layers(
    totals_LE: NDArray[np.int64],
    first_rank_LE: NDArray[np.int32],
    order_LN: NDArray[np.int32],
    ranks_LNC: NDArray[np.int32],
    count_LN: NDArray[np.int32],
    sweeps: int,
    virtual_LR: NDArray[np.int64],
    quota_LEC: NDArray[np.int64],
) -> None:
    widest = quota_LEC.shape[2]
    base_R, load_R = np.empty_like(virtual_LR[0]), np.empty_like(virtual_LR[0])
    share_NC = np.zeros((order_LN.shape[1], widest), dtype=np.int64)
    for layer in range(totals_LE.shape[0]):
        order_N, ranks_NC, count_N = order_LN[layer], ranks_LNC[layer], count_LN[layer]
        quota_EC = quota_LEC[layer]
        base_R[:] = virtual_LR[layer]
        total = base_R.sum() + totals_LE[layer].sum()
        for expert in range(totals_LE.shape[1]):
            quota_EC[expert, 0] = totals_LE[layer, expert]
            base_R[first_rank_LE[layer, expert]] += totals_LE[layer, expert]
        for index in range(order_N.size):
            if count_N[index] > 1:
                base_R[first_rank_LE[layer, order_N[index]]] -= totals_LE[layer, order_N[index]]
        even_splits(totals_LE[layer], order_N, count_N, quota_EC)
        even_peak = _peak(base_R, order_N, ranks_NC, count_N, quota_EC, load_R)
        if sweeps == 0:
            continue
        bits = fraction_bits(total, widest)
        for rank in range(load_R.size):
            load_R[rank] = base_R[rank] << bits
        for index in range(order_N.size):
            if count_N[index] > 1:
                even_shares(totals_LE[layer, order_N[index]] << bits, count_N[index], share_NC[index])
                for copy in range(count_N[index]):
                    load_R[ranks_NC[index, copy]] += share_NC[index, copy]
        sweep_until_optimal(ranks_NC, count_N, share_NC, load_R, sweeps)
        round_shares(share_NC, order_N, count_N, bits, quota_EC)
        if _peak(base_R, order_N, ranks_NC, count_N, quota_EC, load_R) > even_peak:
            even_splits(totals_LE[layer], order_N, count_N, quota_EC)
