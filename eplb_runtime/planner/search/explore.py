"""Everything that one layer could become: the search from where it stands, and from a few placements made anew.

Each search leaves a track of what it reached and what that costs; the one whose end is best with its price is handed
back. Layers are searched by themselves, so they can share the machine's cores.

Each compiled function is compiled again inside of each that calls it: what is called but a few times a layer, and calls
much, is plain Python. Constants go to compiled functions through ``int()``: numba makes a version for each literal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY
from ...utils.jit import jit
from .descent import GOOD_ENOUGH, LEAST_FALL, REPLICA, SWAP, descend
from .nearness import draw_near
from .pouring import NEAR_AND_LEVEL, pour
from .prices import NOW, Question, Track, crossing_cost, empty_track, judge, price_of_moves, record
from .scenarios import LayerLoads, copy_state, empty_layer, has_copy_on, place_experts, set_replica, settle
from .settle import match_ranks
from .starts import add_chords, pack, pack_near
from .trees import grow_trees

SEARCHED = 2
"""Starts that are searched from, of those tried: the best by what they are and cost."""
NUM_STARTS = 9
HOPELESS = 0.05
"""Nothing is searched from a start made anew that is so much worse than what another has led to. Of 360 searches on six
loads (32 to 256 ranks) a third ends so, and the mean imbalance rises by .0004."""
LITTLE = 0.005
"""With one scenario, what is so near to the bound is not searched for again."""


POURED_FROM = 256
"""Ranks from which on copies are poured before anything is searched: steps times ranks would take seconds."""


class Limits(NamedTuple):
    """How far a layer's search may go.

    Args:
        max_copies: of one expert, home included.
        max_steps: of one search.
        led_by: the first so many scenarios lead a search; all judge where it ends.
        starts_by_all: all loads say, too, from where it is searched; else those that lead.
        lowest: the mean imbalance that no placement gets below.
        stride_K: int64, of the chords.
    """

    max_copies: int
    max_steps: int
    led_by: int
    starts_by_all: bool
    lowest: float
    stride_K: NDArray[np.int64]


class Found(NamedTuple):
    """Where a search ended and how it went.

    Args:
        home_E, replica_RK: int32, home ranks and replica slots where it ended.
        start: at which of the given starts it began.
        begin_home_E, begin_replica_RK: int32, the same there, without replicas beyond the most copies.
    """

    home_E: NDArray[np.int32]
    replica_RK: NDArray[np.int32]
    track: Track
    steps: int
    start: int
    begin_home_E: NDArray[np.int32]
    begin_replica_RK: NDArray[np.int32]

    def after(self, steps: int) -> Found:
        """The same search as if it had ended after so many steps."""
        home_E, replica_RK = self.begin_home_E.copy(), self.begin_replica_RK.copy()
        for kind, expert, second, slot in self.track.step_N4[1 : steps + 1].tolist():
            if kind == SWAP:
                home_E[[expert, second]] = home_E[[second, expert]]
            else:
                replica_RK[second, slot] = expert
        return self._replace(home_E=home_E, replica_RK=replica_RK, steps=steps)


class Starts(NamedTuple):
    """Where a search may begin; the first is where the layer stands.

    Args:
        home_XE: int32, home ranks.
        replica_XRK: int32, replica slots.
    """

    home_XE: NDArray[np.int32]
    replica_XRK: NDArray[np.int32]


@jit(error_model="numpy")
def search_layer(
    load_WE: NDArray[np.int64],
    ballast_WR: NDArray[np.int64],
    question: Question,
    seconds_price: float,
    limits: Limits,
    starts: Starts,
) -> Found:
    """The best of the searches from those starts that are best by what they are and cost.

    Args:
        load_WE, ballast_WR: as in ``scenarios.Layer``.
        seconds_price: imbalance that a second of carrying must be worth.
    """
    slots, count = question.start_replica_RK.shape[1], len(starts.home_XE)
    led_WE, led_WR = load_WE[: limits.led_by], ballast_WR[: limits.led_by]
    layer = empty_layer(led_WE, led_WR, slots, limits.max_copies)
    spare = empty_layer(led_WE, led_WR, slots, limits.max_copies)
    other = empty_layer(led_WE, led_WR, slots, limits.max_copies)
    every = empty_layer(load_WE, ballast_WR, slots, limits.max_copies)
    price_X = np.zeros(count)
    for index in range(count if count > 1 else 0):
        price_X[index] = _price(
            every if limits.starts_by_all else layer,
            starts.home_XE[index],
            starts.replica_XRK[index],
            question,
            seconds_price,
        )
    least = np.inf
    enough = limits.lowest * (1.0 + GOOD_ENOUGH)
    room = limits.max_steps + 2
    for index in np.argsort(price_X, kind="mergesort")[:SEARCHED]:
        hopeless = index > 0 and price_X[index] > least + HOPELESS
        if hopeless or (len(load_WE) == 1 and least <= enough + LITTLE):
            break
        track = empty_track(room)
        place_experts(layer, starts.home_XE[index], starts.replica_XRK[index])
        begin_RK = layer.replica_RK.copy()
        steps, filled = 0, 0
        for _ in range(2):  # descend, try chords in slots left empty, and descend on if some stay
            rest = Track(
                track.value_N[filled:-1], track.moved_N2[filled:], track.seconds_N[filled:], track.step_N4[filled:]
            )
            steps = filled + descend(layer, spare, other, question, rest, enough)
            filled = _fill(layer, spare, question, limits.stride_K, track, steps)
            if filled == steps:
                break
            steps = filled
        if question.crossing_price > 0.0:
            steps = draw_near(layer, spare, other, question, track, steps)
        price = _price(every, layer.home_E, layer.replica_RK, question, seconds_price) if count > 1 else 0.0
        if price < least - LEAST_FALL:
            least = price
            found = Found(
                layer.home_E.copy(), layer.replica_RK.copy(), track, steps, index, starts.home_XE[index], begin_RK
            )
    return found


def pour_anew(
    load_WE: NDArray[np.int64], ballast_WR: NDArray[np.int64], question: Question, limits: Limits
) -> tuple[Found, Starts]:
    """Homes packed anew and copies poured, or the layer as it stands where that is nearly as good; no search.

    Args:
        load_WE, ballast_WR: one scenario.
    """
    load_E, ballast_R = load_WE[0].astype(np.float64), ballast_WR[0].astype(np.float64)
    home_XE, replica_XRK = _current_and_packed(load_E, ballast_R, question)
    layer = empty_layer(load_WE, ballast_WR, question.start_replica_RK.shape[1], limits.max_copies)
    track, peak_W = empty_track(1), np.empty(1)
    enough = limits.lowest * (1.0 + GOOD_ENOUGH) + LITTLE
    place_experts(layer, home_XE[0], replica_XRK[0])
    value, start, tried_RK = judge(layer, peak_W)[0], 0, np.empty_like(question.start_replica_RK)
    least = np.inf
    for near_and_level in NEAR_AND_LEVEL:
        if value <= enough:
            break
        pour(load_E, ballast_R, limits.max_copies, near_and_level, home_XE[1], tried_RK)
        place_experts(layer, home_XE[1], tried_RK)
        value = judge(layer, peak_W)[0]
        if value < least:
            least, start = value, 1
            replica_XRK[1] = tried_RK
    place_experts(layer, home_XE[start], replica_XRK[start])
    record(layer, question, track, 0, judge(layer, peak_W)[0])
    at = layer.home_E, layer.replica_RK
    return Found(*at, track, 0, start, *at), Starts(home_XE, replica_XRK)


def grow_anew(
    load_WE: NDArray[np.int64],
    ballast_WR: NDArray[np.int64],
    variance_E: NDArray[np.float64],
    question: Question,
    seconds_price: float,
    limits: Limits,
) -> Found:
    """Homes packed anew and copies as trees that withstand loads which stray, or the layer as it stands where that is
    worth more for the load known; no search, which would fit the placement to that very load.

    Args:
        load_WE, ballast_WR: one scenario.
        variance_E: of it.
        seconds_price: imbalance that a second of carrying must be worth.
    """
    load_E, ballast_R = load_WE[0].astype(np.float64), ballast_WR[0].astype(np.float64)
    home_XE, replica_XRK = _current_and_packed(load_E, ballast_R, question)
    grow_trees(load_E, variance_E, ballast_R, limits.max_copies, home_XE[1], replica_XRK[1])
    add_chords(load_E, limits.stride_K, home_XE[1], replica_XRK[1])
    layer = empty_layer(load_WE, ballast_WR, question.start_replica_RK.shape[1], limits.max_copies)
    track, worth_X = empty_track(1), np.empty(2)
    for index in range(2):
        place_experts(layer, home_XE[index], replica_XRK[index])
        record(layer, question, track, 0, judge(layer, np.empty(1))[0])
        worth_X[index] = track.value_N[0] + seconds_price * track.seconds_N[0]
    start = int(np.argmin(worth_X))
    place_experts(layer, home_XE[start], replica_XRK[start])
    record(layer, question, track, 0, judge(layer, np.empty(1))[0])
    at = layer.home_E, layer.replica_RK
    return Found(*at, track, 0, start, *at)


def _current_and_packed(
    load_E: NDArray[np.float64], ballast_R: NDArray[np.float64], question: Question
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Two placements, as the layer stands and with homes packed anew: int32 ``[2, E]`` and ``[2, R, K]``; the replica
    slots of the second are to be filled."""
    (ranks, slots), experts = question.start_replica_RK.shape, question.start_home_E.size
    home_XE = np.empty((2, experts), dtype=np.int32)
    replica_XRK = np.empty((2, ranks, slots), dtype=np.int32)
    home_XE[:], replica_XRK[0] = question.start_home_E, question.start_replica_RK
    if experts > ranks:
        pack(load_E, ballast_R, 0, home_XE[1], replica_XRK[1], False)
        match_ranks(question.start_home_E, home_XE[1], replica_XRK[1])
    return home_XE, replica_XRK


@jit(error_model="numpy")
def _price(
    every: LayerLoads,
    home_E: NDArray[np.int32],
    replica_RK: NDArray[np.int32],
    question: Question,
    seconds_price: float,
) -> float:
    """What all scenarios make of a placement, and what going there costs, in imbalance."""
    track = empty_track(1)
    place_experts(every, home_E, replica_RK)
    reached = judge(every, np.empty(every.load_WR.shape[0]))[1] + crossing_cost(every, question)
    record(every, question, track, int(NOW), reached)
    return float(track.value_N[0] + price_of_moves(every, question) + seconds_price * track.seconds_N[0])


@jit(error_model="numpy")
def _fill(
    layer: LayerLoads, spare: LayerLoads, question: Question, stride_K: NDArray[np.int64], track: Track, steps: int
) -> int:
    """Chords into empty slots, one after the other, where the busiest ranks gain by it; returns the steps by then."""
    ranks, slots = layer.replica_RK.shape
    peak_W = np.empty(layer.load_WR.shape[0])
    goal = judge(layer, peak_W)[1] + crossing_cost(layer, question) + price_of_moves(layer, question)
    for slot in range(slots):
        for rank in range(ranks):
            if layer.replica_RK[rank, slot] != EMPTY or steps + 2 >= track.value_N.size:
                continue
            expert = _heaviest(layer, (rank - stride_K[slot]) % ranks, rank)
            if expert == EMPTY:
                continue
            copy_state(layer, spare)
            set_replica(layer, rank, slot, expert)
            settle(layer, 1)
            value, tried = judge(layer, peak_W)
            crossing = crossing_cost(layer, question)
            tried += crossing + price_of_moves(layer, question)
            if tried < goal - LEAST_FALL:
                goal = tried
                steps += 1
                record(layer, question, track, steps, value + crossing)
                track.step_N4[steps, 0], track.step_N4[steps, 1] = int(REPLICA), expert
                track.step_N4[steps, 2], track.step_N4[steps, 3] = rank, slot
            else:
                copy_state(spare, layer)
    return steps


@jit(error_model="numpy")
def _heaviest(layer: LayerLoads, source: int, rank: int) -> int:
    """The home of ``source`` with most tokens a copy that does not stand on ``rank`` and may have one copy more."""
    best, best_load = EMPTY, 0.0
    for index in range(layer.homes_RH.shape[1]):
        expert = int(layer.homes_RH[source, index])
        row = layer.row_E[expert]
        copies = layer.count_N[row] if row >= 0 else 1
        if copies >= layer.ranks_NC.shape[1]:
            continue
        load = 0.0
        for scenario in range(layer.load_WE.shape[0]):
            load += float(layer.load_WE[scenario, expert])
        if load / copies > best_load and not has_copy_on(layer, expert, rank):
            best, best_load = expert, load / copies
    return best


def make_starts(
    load_WE: NDArray[np.int64],
    ballast_WR: NDArray[np.int64],
    question: Question,
    stride_K: NDArray[np.int64],
    anew: bool,
) -> Starts:
    """As the layer stands; with ``anew`` also homes kept or dealt anew, with copies of the hottest, chords, or both."""
    ranks, slots = question.start_replica_RK.shape
    experts = question.start_home_E.size
    load_E, ballast_R = load_WE.sum(axis=0).astype(np.float64), ballast_WR.sum(axis=0).astype(np.float64)
    nearest = anew and question.crossing_price > 0.0
    room = NUM_STARTS if anew else 1
    home_XE = np.empty((room, experts), dtype=np.int32)
    replica_XRK = np.empty((room, ranks, slots), dtype=np.int32)
    home_XE[0], replica_XRK[0] = question.start_home_E, question.start_replica_RK
    count = 1
    for kept in range(2 if anew else 0):
        for hot in range(slots + 1):
            if (hot > 1 and hot < slots) or (slots == 0 and kept == 1):
                continue
            home_XE[count] = question.start_home_E
            pack(load_E, ballast_R, hot, home_XE[count], replica_XRK[count], kept == 1)
            add_chords(load_E, stride_K, home_XE[count], replica_XRK[count])
            if kept == 0:
                match_ranks(question.start_home_E, home_XE[count], replica_XRK[count])
            count += 1
    if nearest:
        pack_near(load_E, question.source_EN, question.ranks_per_node, home_XE[count])
        replica_XRK[count] = EMPTY
        add_chords(load_E, stride_K, home_XE[count], replica_XRK[count])
        count += 1
    if anew and (question.start_replica_RK == EMPTY).any():
        home_XE[count] = question.start_home_E
        replica_XRK[count] = question.start_replica_RK
        add_chords(load_E, stride_K, home_XE[count], replica_XRK[count])
        count += 1
    return Starts(home_XE[:count], replica_XRK[:count])
