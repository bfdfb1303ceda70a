"""How many copies each expert should have when a rank has two slots.

Then the counts decide and the packing does not: for given counts, the best packing folds the sorted copies, heaviest
with lightest. Giving spare slots to the hottest copies keeps the maximum copy low but leaves hot copies with heavy
partners; a second copy for a middling expert makes two light partners. This room searches over the counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...utils.jit import jit
from .packing import FloatArray, PackedLayer

AIMS = (0.005, 0.005, 0.02, 0.001, 0.02, 0.001)
"""How far below the best maximum each round of the search aims, as a share. Even rounds try first the experts that
would make the most and heaviest copies light, odd rounds those with the lightest copies."""


@jit
def search_counts(layer: PackedLayer, floor: float, max_trials: int) -> int:
    """Move spare slots between experts while that lowers the heaviest pair; changes ``copies`` and ``unit``.

    First-improvement descent on the tokens above a target just below the best maximum found, over exchanges (one copy
    less of one expert, one more of another) that can help the heaviest pair: by making copies light enough to stand
    beside its heavier half, or by making that half lighter.

    Args:
        layer: two slots a rank; ``copies`` gives the start.
        floor: stop when the heaviest pair is at most this many tokens.
        max_trials: exchanges to evaluate.

    Returns:
        Exchanges evaluated.
    """
    num_ranks = layer.expert.shape[0]
    experts = layer.weight.size
    weight, count = layer.weight, layer.copies
    copies = np.empty(2 * num_ranks)
    trial = np.empty(2 * num_ranks + 1)
    _sorted_copies(weight, count, copies)
    best, _ = _heaviest_pair(copies)
    best_count = count.copy()
    givers = np.empty(experts, dtype=np.int64)
    takers = np.empty(experts, dtype=np.int64)
    trials = 0
    fruitless = 0
    aim = 0
    while best > floor and trials < max_trials and fruitless < len(AIMS):
        target = max(best * (1.0 - AIMS[aim]), floor)
        excess = _excess(copies, target, np.inf)
        found = False
        while excess > 0.0 and trials < max_trials:
            num_givers, num_takers = _candidates(weight, count, copies, target, aim % 2 == 0, givers, takers)
            giver = taker = -1
            for giver_index in range(num_givers):
                for taker_index in range(num_takers):
                    if givers[giver_index] == takers[taker_index]:
                        continue
                    trials += 1
                    _exchange(copies, trial, weight, count, givers[giver_index], takers[taker_index])
                    lower = _excess(trial[: copies.size], target, excess)
                    if lower < excess:
                        excess = lower
                        giver, taker = givers[giver_index], takers[taker_index]
                    if giver >= 0 or trials >= max_trials:
                        break
                if giver >= 0 or trials >= max_trials:
                    break
            if giver < 0:
                break
            copies[:] = trial[: copies.size]
            count[giver] -= 1
            count[taker] += 1
            heaviest, _ = _heaviest_pair(copies)
            if heaviest < best:
                best = heaviest
                best_count[:] = count
                found = True
        if found:
            fruitless = 0
        else:
            fruitless += 1
            aim = (aim + 1) % len(AIMS)
        if not np.array_equal(count, best_count):
            count[:] = best_count
            _sorted_copies(weight, count, copies)
    layer.unit[:] = weight / count
    return trials


@jit
def _candidates(
    weight: FloatArray,
    count: NDArray[np.int32],
    copies: FloatArray,
    target: float,
    heaviest_first: bool,
    givers: NDArray[np.int64],
    takers: NDArray[np.int64],
) -> tuple[int, int]:
    """The experts that may lose a copy, lightest copies first, and those whose further copy helps the heaviest pair."""
    num_ranks = copies.size // 2
    _, light = _heaviest_pair(copies)
    heavy = copies[copies.size - 1 - light]
    room = target - heavy
    num_givers = num_takers = 0
    for expert in range(weight.size):
        unit = weight[expert] / count[expert]
        if count[expert] > 1 and weight[expert] / (count[expert] - 1) <= target:
            givers[num_givers] = expert
            num_givers += 1
        if count[expert] < num_ranks:
            lighter = weight[expert] / (count[expert] + 1)
            if lighter <= room < unit or lighter < heavy <= unit:
                takers[num_takers] = expert
                num_takers += 1
    key = weight / count
    givers[:num_givers] = givers[np.argsort(key[givers[:num_givers]], kind="mergesort")]
    if heaviest_first:
        key = -key * (count + 1)
    takers[:num_takers] = takers[np.argsort(key[takers[:num_takers]], kind="mergesort")]
    return num_givers, num_takers


@jit
def _sorted_copies(weight: FloatArray, count: NDArray[np.int32], copies: FloatArray) -> None:
    slot = 0
    for expert in range(weight.size):
        for _ in range(count[expert]):
            copies[slot] = weight[expert] / count[expert]
            slot += 1
    copies.sort()


@jit
def _heaviest_pair(copies: FloatArray) -> tuple[float, int]:
    """Tokens of the heaviest pair, and the place of its lighter half."""
    best = -1.0
    place = 0
    last = copies.size - 1
    for index in range(copies.size // 2):
        pair = copies[index] + copies[last - index]
        if pair > best:
            best = pair
            place = index
    return best, place


@jit
def _excess(copies: FloatArray, target: float, limit: float) -> float:
    """Tokens above ``target``, over all pairs; or any number from ``limit`` on, as soon as that is reached."""
    last = copies.size - 1
    pairs = copies.size // 2
    total = 0.0
    for start in range(0, pairs, 64):
        for index in range(start, min(start + 64, pairs)):
            above = copies[index] + copies[last - index] - target
            if above > 0.0:
                total += above
        if total >= limit:
            break
    return total


@jit(error_model="numpy")
def _exchange(
    copies: FloatArray, trial: FloatArray, weight: FloatArray, count: NDArray[np.int32], giver: int, taker: int
) -> None:
    """Into ``trial``: the sorted copies after ``giver`` lost one and ``taker`` got one more.

    Both experts' old copies leave the list and their new ones, heavier and lighter, come in; what lies between is
    carried over piece by piece.
    """
    given, taken = count[giver], count[taker]
    heavier, lighter = weight[giver] / (given - 1), weight[taker] / (taken + 1)
    giver_out, giver_in = _place(copies, weight[giver] / given), _place(copies, heavier)
    taker_out, taker_in = _place(copies, weight[taker] / taken), _place(copies, lighter)
    read = written = 0
    # in order of place; at one place what comes in goes before what leaves
    giver_done = taker_done = giver_came = taker_came = False
    for _ in range(4):
        place, event = copies.size + 1, -1
        if not taker_came:
            place, event = taker_in, 0
        if not giver_came and (giver_in < place or (giver_in == place and heavier < lighter)):
            place, event = giver_in, 1
        if not giver_done and giver_out < place:
            place, event = giver_out, 2
        if not taker_done and taker_out < place:
            place, event = taker_out, 3
        for index in range(read, place):
            trial[written] = copies[index]
            written += 1
        read = max(read, place)
        if event == 0:
            taker_came = True
            for _copy in range(taken + 1):
                trial[written] = lighter
                written += 1
        elif event == 1:
            giver_came = True
            for _copy in range(given - 1):
                trial[written] = heavier
                written += 1
        elif event == 2:
            giver_done = True
            read += given
        else:
            taker_done = True
            read += taken
    for index in range(read, copies.size):
        trial[written] = copies[index]
        written += 1


@jit(error_model="numpy")
def _place(values: FloatArray, wanted: float) -> int:
    """The first place in sorted ``values`` that is not below ``wanted``."""
    low, high = 0, values.size
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low
