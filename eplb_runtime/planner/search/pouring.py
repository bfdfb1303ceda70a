"""Copies by arithmetic alone: what a rank has too much is poured into ranks that have too little, group by group.

A rank with too many tokens gives copies of its heaviest expert to ranks whose lack fits what it has left; these are a
group from then on, with one slot still free, that of the rank which gave, and with what is left over or still lacking.
Groups go on in the same way until each is level. They stay small and their ways short, so that a split finds in a few
sweeps what long chains of copies need hundreds for. It takes as many steps as there are ranks, and no search.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit

NEAR_AND_LEVEL = ((2.0**-4, 2.0**-9), (2.0**-2, 2.0**-8.5), (2.0**-3, 2.0**-8), (2.0**-5, 2.0**-8))
"""Of the mean: how near a rank's lack must be to what another has too much for the two to be paired ahead of others,
and how little above the mean a group is level. The first are best for most loads."""


class Groups(NamedTuple):
    """Groups that have too much and groups that lack tokens, each by the rank whose slot is free.

    Args:
        giver_N, amount_N: ascending by how much it is; ``used[0]`` of them.
        taker_N, lack_N: likewise; ``used[1]``.
        size_R: ranks of each group.
        homes_RH: int64, the experts at home on each rank.
        left_E: tokens that an expert can still give away.
        copies_E: int64, home included.
        mean: tokens of a rank.
    """

    giver_N: NDArray[np.int64]
    amount_N: NDArray[np.float64]
    taker_N: NDArray[np.int64]
    lack_N: NDArray[np.float64]
    used: NDArray[np.int64]
    size_R: NDArray[np.float64]
    homes_RH: NDArray[np.int64]
    left_E: NDArray[np.float64]
    copies_E: NDArray[np.int64]
    mean: float


@jit
def pour(
    load_E: NDArray[np.float64],
    ballast_R: NDArray[np.float64],
    most: int,
    near_and_level: tuple[float, float],
    home_E: NDArray[np.int32],
    replica_RK: NDArray[np.int32],
) -> None:
    """Fill the first replica slot of each rank that lacks tokens.

    Args:
        load_E: tokens of each expert.
        ballast_R: what each rank counts beside its experts.
        most: copies of an expert, home included.
        near_and_level: one of ``NEAR_AND_LEVEL``.
        home_E: int32, home ranks, which stay.
        replica_RK: int32, out; the other slots are left empty.
    """
    near, level = near_and_level
    groups = _single_ranks(load_E, ballast_R, home_E, len(replica_RK))
    replica_RK[:] = EMPTY
    _pour_largest(groups, most, level, replica_RK, True)
    _pair(groups, most, near, replica_RK)
    _pour_largest(groups, most, level, replica_RK, False)


@jit
def _single_ranks(
    load_E: NDArray[np.float64], ballast_R: NDArray[np.float64], home_E: NDArray[np.int32], ranks: int
) -> Groups:
    experts = load_E.size
    homes_RH, filled_R = np.empty((ranks, experts // ranks), dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    over_R = ballast_R.copy()
    for expert in range(experts):
        rank = home_E[expert]
        homes_RH[rank, filled_R[rank]] = expert
        filled_R[rank] += 1
        over_R[rank] += load_E[expert]
    mean = over_R.sum() / ranks
    over_R -= mean
    groups = Groups(
        np.empty(ranks, dtype=np.int64),
        np.empty(ranks),
        np.empty(ranks, dtype=np.int64),
        np.empty(ranks),
        np.zeros(2, dtype=np.int64),
        np.ones(ranks),
        homes_RH,
        load_E.copy(),
        np.ones(experts, dtype=np.int64),
        mean,
    )
    order_R = np.argsort(over_R, kind="mergesort")
    few = np.searchsorted(over_R[order_R], 0.0)
    groups.used[0], groups.used[1] = ranks - few, few
    groups.giver_N[: ranks - few], groups.taker_N[:few] = order_R[few:], order_R[:few][::-1]
    groups.amount_N[: ranks - few], groups.lack_N[:few] = over_R[order_R[few:]], -over_R[order_R[:few][::-1]]
    return groups


@jit
def _pour_largest(groups: Groups, most: int, level: float, replica_RK: NDArray[np.int32], large_only: bool) -> None:
    """Who has most gives to who lacks as much as it has or a little less, until nobody has too much.

    Args:
        large_only: only who has more than anybody lacks.
    """
    while groups.used.min() > 0:
        last = groups.used[0] - 1
        giver, amount = groups.giver_N[last], groups.amount_N[last]
        if large_only and amount < groups.lack_N[groups.used[1] - 1]:
            return
        groups.used[0] = last
        expert = _giveable(groups, giver, most)
        if amount <= level * groups.mean * groups.size_R[giver] or expert == EMPTY:
            continue
        index = max(np.searchsorted(groups.lack_N[: groups.used[1]], amount, side="right") - 1, 0)
        taker, lack = groups.taker_N[index], groups.lack_N[index]
        _take_out(groups.taker_N, groups.lack_N, groups.used[1], index)
        groups.used[1] -= 1
        _join(groups, (giver, amount), (taker, lack), expert, replica_RK)


@jit
def _pair(groups: Groups, most: int, near: float, replica_RK: NDArray[np.int32]) -> None:
    """Ranks whose lack is nearly what another has too much: such groups are level with two ranks."""
    givers, takers = groups.used
    giver_N, amount_N = groups.giver_N[:givers].copy(), groups.amount_N[:givers].copy()
    taker_N, lack_N = groups.taker_N[:takers].copy(), groups.lack_N[:takers].copy()
    is_paired_N = np.zeros(takers, dtype=np.bool_)
    match_N = np.full(givers, -1)
    groups.used[:] = 0
    taker = 0
    for index in range(givers):
        while taker < takers and lack_N[taker] < amount_N[index]:
            taker += 1
        fits = taker < takers and lack_N[taker] < amount_N[index] + near * groups.mean
        if fits and _giveable(groups, giver_N[index], most) != EMPTY:
            match_N[index], is_paired_N[taker] = taker, True
            taker += 1
    for index in range(takers):
        if not is_paired_N[index]:
            groups.used[1] = _sort_in(groups.taker_N, groups.lack_N, groups.used[1], taker_N[index], lack_N[index])
    for index in range(givers):
        giver, amount = giver_N[index], amount_N[index]
        if match_N[index] < 0:
            groups.used[0] = _sort_in(groups.giver_N, groups.amount_N, groups.used[0], giver, amount)
            continue
        given = (taker_N[match_N[index]], lack_N[match_N[index]])
        _join(groups, (giver, amount), given, _giveable(groups, giver, most), replica_RK)


@jit
def _giveable(groups: Groups, rank: int, most: int) -> int:
    """The expert of a rank that has most to give and may have one copy more."""
    given = EMPTY
    for expert in groups.homes_RH[rank]:
        if groups.copies_E[expert] < most and (given == EMPTY or groups.left_E[expert] > groups.left_E[given]):
            given = expert
    return given


@jit
def _join(
    groups: Groups, giver: tuple[int, float], taker: tuple[int, float], expert: int, replica_RK: NDArray[np.int32]
) -> None:
    """A copy of the giver's expert into the taker's free slot; what is then too much or lacking is the giver's."""
    replica_RK[taker[0], 0] = expert
    groups.copies_E[expert] += 1
    groups.left_E[expert] -= min(giver[1], taker[1])
    groups.size_R[giver[0]] += groups.size_R[taker[0]]
    rest = giver[1] - taker[1]
    if rest > 0.0:
        groups.used[0] = _sort_in(groups.giver_N, groups.amount_N, groups.used[0], giver[0], rest)
    else:
        groups.used[1] = _sort_in(groups.taker_N, groups.lack_N, groups.used[1], giver[0], -rest)


@jit
def _sort_in(name_N: NDArray[np.int64], value_N: NDArray[np.float64], used: int, name: int, value: float) -> int:
    """Among ascending values; returns how many there are then."""
    place = np.searchsorted(value_N[:used], value)
    for index in range(used, place, -1):
        name_N[index], value_N[index] = name_N[index - 1], value_N[index - 1]
    name_N[place], value_N[place] = name, value
    return int(used + 1)


@jit
def _take_out(name_N: NDArray[np.int64], value_N: NDArray[np.float64], used: int, place: int) -> None:
    for index in range(place, used - 1):
        name_N[index], value_N[index] = name_N[index + 1], value_N[index + 1]
