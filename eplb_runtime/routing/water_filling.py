"""Split each expert's tokens over its copies so that the busiest rank has as little as can be: numba, on counts.

Water-filling by Gauss-Seidel: visit the replicated experts in turn and give each the best split for itself, the others
held still (fill the copies on the lowest ranks up to one level). The sweeps converge to the optimum of the linear
program min max rank load, faster when each split goes half as far again as its own best (over-relaxation); they stop on
the optimum's certificate. All arithmetic is in integers - tokens in fixed point - so that the result is the same on
every machine and in ``water_filling_torch``.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .tables import SplitTables

SWEEPS = 10
FRACTION_BITS = 16
"""Tokens are split in units of 2 ** -16 at the finest, coarser where counts are so large that sums would overflow."""
TOLERANCE_BITS = 10
"""Sweeps stop when the busiest rank is proven to be within 2 ** -10 of the optimum."""
WARM_BITS = 16

Mode = Literal["water_filling", "even"]


def split_totals(
    totals_LE: NDArray[np.integer],
    tables: SplitTables,
    *,
    mode: Mode = "water_filling",
    sweeps: int = SWEEPS,
    warm_LEC: NDArray[np.int64] | None = None,
    layers: slice = slice(None),
) -> NDArray[np.int64]:
    """Tokens for each copy of each expert.

    Args:
        totals_LE: integer ``[L, E]``, tokens of each expert over all source ranks; sums below 2 ** 60.
        mode: ``"water_filling"``, or ``"even"`` (each copy the same, the first copies one more).
        sweeps: at most so many Gauss-Seidel sweeps.
        warm_LEC: int64 ``[L, E, C]``, an earlier result to start from, for like counts; None: the even split.
        layers: the layers of ``tables`` that the first axis stands for.

    Returns:
        int64 ``[L, E, C]``, zero where there is no copy; sums over C are ``totals_LE`` exactly. The busiest rank never
        has more than under the even split.
    """
    slots_LEC = tables.copy_slot_LEC[layers]
    quota_LEC = np.zeros(slots_LEC.shape, dtype=np.int64)
    totals: NDArray[np.int64] = np.ascontiguousarray(totals_LE, dtype=np.int64)
    if totals.shape != slots_LEC.shape[:2]:
        raise ValueError(f"counts have shape {totals.shape}, the placement has {slots_LEC.shape[:2]}")
    _split_layers(
        totals,
        tables.first_rank_LE[layers],
        tables.order_LN[layers],
        tables.ranks_LNC[layers],
        tables.count_LN[layers],
        tables.num_ranks,
        0 if mode == "even" else sweeps,
        quota_LEC if warm_LEC is None else np.ascontiguousarray(warm_LEC, dtype=np.int64),
        warm_LEC is not None,
        quota_LEC,
    )
    return quota_LEC


@njit(nogil=True, cache=True, error_model="numpy")
def sweep_once(
    ranks_NC: NDArray[np.int32],
    count_N: NDArray[np.int32],
    share_NC: NDArray[np.int64],
    load_R: NDArray[np.int64],
    beyond: bool = False,
) -> None:
    """Give each replicated expert in turn its best split while the others stand still; in place.

    With ``beyond``, every copy but the first goes half as far again, and the first takes up the difference; an expert
    for which that would need less than nothing takes its best split.

    The level is ``(n + sum of the m lowest) / m`` for the largest m whose highest rank still lies under it, found by
    dropping ranks above the level of those left. What does not divide goes to the first of the used copies. Two copies
    have a closed form with the same result. (One loop without helper functions: calls with array arguments would cost
    ten times the arithmetic.)
    """
    before_C = np.empty(share_NC.shape[1], dtype=np.int64)
    for index in range(count_N.size):
        copies = count_N[index]
        if copies == 2:
            first, second = ranks_NC[index, 0], ranks_NC[index, 1]
            before = share_NC[index, 0]
            total = before + share_NC[index, 1]
            low, high = load_R[first] - before, load_R[second] - total + before
            give = total + high - low + 1
            give = 0 if give < 0 else give >> 1
            give = total if give > total else give
            if beyond:
                farther = total - give + ((before - give) >> 1)
                if 0 <= farther <= total:
                    give = total - farther
            share_NC[index, 0] = give
            share_NC[index, 1] = total - give
            load_R[first] = low + give
            load_R[second] = high + total - give
        elif copies > 2:
            water = 0
            for copy in range(copies):
                rank = ranks_NC[index, copy]
                water += load_R[rank]
                before_C[copy] = share_NC[index, copy]
                load_R[rank] -= share_NC[index, copy]
            used, level, more = copies, water // copies, water % copies
            while True:
                under, left = 0, water
                for copy in range(copies):
                    base = load_R[ranks_NC[index, copy]]
                    if base <= level:
                        under += 1
                    else:
                        left -= base
                if under == used:
                    break
                used, level, more = under, left // under, left % under
            for copy in range(copies):
                rank = ranks_NC[index, copy]
                share = level - load_R[rank]
                if share < 0:
                    share = 0
                elif more > 0:
                    share += 1
                    more -= 1
                share_NC[index, copy] = share
            if beyond:
                first, possible = share_NC[index, 0], True
                for copy in range(1, copies):
                    step = (share_NC[index, copy] - before_C[copy]) >> 1
                    first -= step
                    possible = possible and share_NC[index, copy] + step >= 0
                if possible and first >= 0:
                    for copy in range(1, copies):
                        share_NC[index, copy] += (share_NC[index, copy] - before_C[copy]) >> 1
                    share_NC[index, 0] = first
            for copy in range(copies):
                load_R[ranks_NC[index, copy]] += share_NC[index, copy]


@njit(nogil=True, cache=True, error_model="numpy")
def is_optimal(
    ranks_NC: NDArray[np.int32],
    count_N: NDArray[np.int32],
    share_NC: NDArray[np.int64],
    load_R: NDArray[np.int64],
    slack: int,
) -> bool:
    """Whether no split can lower the busiest rank by more than ``slack`` units.

    The certificate: the load of the ranks within ``slack`` of the busiest, less what could leave them (experts with a
    copy elsewhere), spread evenly over these ranks, is a lower bound for every split.
    """
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
            if load_R[ranks_NC[index, copy]] >= floor:
                inside += share_NC[index, copy]
            else:
                escapes = True
        if escapes:
            locked -= inside
            if locked < enough:
                return False
    return locked >= enough


@njit(nogil=True, cache=True, error_model="numpy")
def sweep_until_optimal(
    ranks_NC: NDArray[np.int32],
    count_N: NDArray[np.int32],
    share_NC: NDArray[np.int64],
    load_R: NDArray[np.int64],
    sweeps: int,
) -> int:
    """Gauss-Seidel from the split that stands in ``share_NC`` and ``load_R``, changed in place.

    All sweeps but the last possible one go beyond the best of each expert.
    Stops early when the busiest rank is within 2 ** -10 of the mean or of the certificate's bound.

    Returns:
        sweeps done.
    """
    enough = load_R.sum() // load_R.size
    enough += enough >> TOLERANCE_BITS
    for sweep in range(sweeps):
        peak = load_R.max()
        if peak <= enough or is_optimal(ranks_NC, count_N, share_NC, load_R, peak >> TOLERANCE_BITS):
            return sweep
        sweep_once(ranks_NC, count_N, share_NC, load_R, sweep + 1 < sweeps)
    return sweeps


@njit(nogil=True, cache=True, error_model="numpy")
def fraction_bits(total: int, copies: int) -> int:
    """Bits after the binary point that fit: sums of ``copies + 1`` rank loads must stay below 2 ** 62."""
    room = (1 << 62) // (copies + 1)
    bits = FRACTION_BITS
    while bits > 0 and total > (room >> bits):
        bits -= 1
    return bits


@njit(nogil=True, cache=True, error_model="numpy")
def even_shares(total: int, copies: int, share_C: NDArray[np.int64]) -> None:
    """``total // copies`` each, one more to the first few."""
    each = total // copies
    more = total - each * copies
    for copy in range(copies):
        share_C[copy] = each + (1 if copy < more else 0)


@njit(nogil=True, cache=True, error_model="numpy")
def warm_shares(total: int, copies: int, warm_C: NDArray[np.int64], share_C: NDArray[np.int64]) -> None:
    """``total`` in the proportions of ``warm_C``, in 2 ** -16ths, the rest to the first copy; even if zero."""
    before = warm_C[:copies].sum()
    if before <= 0:
        even_shares(total, copies, share_C)
        return
    spread = 0
    for copy in range(1, copies):
        part = (warm_C[copy] << WARM_BITS) // before
        share_C[copy] = (total >> WARM_BITS) * part
        spread += share_C[copy]
    share_C[0] = total - spread


@njit(nogil=True, cache=True, error_model="numpy")
def round_shares(share_C: NDArray[np.int64], copies: int, bits: int, quota_C: NDArray[np.int64]) -> None:
    """Whole tokens from shares in fixed point that sum to a whole: largest remainder, ties to the earlier copy."""
    missing = 0
    for copy in range(copies):
        quota_C[copy] = share_C[copy] >> bits
        missing += share_C[copy] - (quota_C[copy] << bits)
    for _ in range(missing >> bits):
        best, best_rest = 0, -1
        for copy in range(copies):
            rest = share_C[copy] - (quota_C[copy] << bits)
            if rest > best_rest:
                best, best_rest = copy, rest
        quota_C[best] += 1  # its remainder is negative from here on


@njit(nogil=True, cache=True, error_model="numpy")
def _peak(
    base_R: NDArray[np.int64],
    order_N: NDArray[np.int32],
    ranks_NC: NDArray[np.int32],
    count_N: NDArray[np.int32],
    quota_EC: NDArray[np.int64],
    load_R: NDArray[np.int64],
) -> int:
    load_R[:] = base_R
    for index in range(order_N.size):
        for copy in range(count_N[index]):
            load_R[ranks_NC[index, copy]] += quota_EC[order_N[index], copy]
    return int(load_R.max())


@njit(nogil=True, cache=True, error_model="numpy")
def _split_layers(
    totals_LE: NDArray[np.int64],
    first_rank_LE: NDArray[np.int32],
    order_LN: NDArray[np.int32],
    ranks_LNC: NDArray[np.int32],
    count_LN: NDArray[np.int32],
    num_ranks: int,
    sweeps: int,
    warm_LEC: NDArray[np.int64],
    is_warm: bool,
    quota_LEC: NDArray[np.int64],
) -> None:
    widest = quota_LEC.shape[2]
    base_R, load_R = np.empty(num_ranks, dtype=np.int64), np.empty(num_ranks, dtype=np.int64)
    share_NC = np.zeros((order_LN.shape[1], widest), dtype=np.int64)
    for layer in range(totals_LE.shape[0]):
        order_N, ranks_NC, count_N = order_LN[layer], ranks_LNC[layer], count_LN[layer]
        quota_EC = quota_LEC[layer]
        base_R[:] = 0
        total = 0
        for expert in range(totals_LE.shape[1]):
            tokens = totals_LE[layer, expert]
            quota_EC[expert, 0] = tokens
            base_R[first_rank_LE[layer, expert]] += tokens
            total += tokens
        for index in range(order_N.size):
            if count_N[index] > 1:
                expert = order_N[index]
                base_R[first_rank_LE[layer, expert]] -= totals_LE[layer, expert]
                even_shares(totals_LE[layer, expert], count_N[index], quota_EC[expert])
        even_peak = _peak(base_R, order_N, ranks_NC, count_N, quota_EC, load_R)
        if sweeps == 0:
            continue
        bits = fraction_bits(total, widest)
        for rank in range(num_ranks):
            load_R[rank] = base_R[rank] << bits
        for index in range(order_N.size):
            if count_N[index] > 1:
                expert = order_N[index]
                if is_warm:
                    tokens = totals_LE[layer, expert] << bits
                    warm_shares(tokens, count_N[index], warm_LEC[layer, expert], share_NC[index])
                else:
                    even_shares(totals_LE[layer, expert] << bits, count_N[index], share_NC[index])
                for copy in range(count_N[index]):
                    load_R[ranks_NC[index, copy]] += share_NC[index, copy]
        sweep_until_optimal(ranks_NC, count_N, share_NC, load_R, sweeps)
        for index in range(order_N.size):
            if count_N[index] > 1:
                round_shares(share_NC[index], count_N[index], bits, quota_EC[order_N[index]])
        if _peak(base_R, order_N, ranks_NC, count_N, quota_EC, load_R) > even_peak:
            for index in range(order_N.size):
                if count_N[index] > 1:
                    expert = order_N[index]
                    even_shares(totals_LE[layer, expert], count_N[index], quota_EC[expert])
