"""Schedules transfers of experts in rounds: a pure function of two placements and the byte sizes.

Every rank computes the same schedule from the same placements. A round is the unit of commit: a valid placement holds
before and after it, so a rebalance that breaks off between rounds leaves a valid one. The experts that change ranks in
a layer are edges of a graph over ranks in which every rank has as many edges in as out. A cycle of edges that visits a
rank at most once is the least that can be committed: afterwards every rank has its number of homes again, and no rank
holds more than one staged expert for it.

Shape suffixes: M moves of all layers, sorted by layer; L layers; N cycles; R ranks of all groups of ranks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..placement import EMPTY, HomeRows, Placement

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Transfer:
    """Transfer of an expert with its state from its home slot to its next one; a copy at the commit if in one rank."""

    layer: int
    expert: int
    source_slot: int
    destination_slot: int


@dataclass(frozen=True, eq=False)
class Round:
    """Transfers that are staged and committed together.

    Args:
        number: of the round, from 0.
        transfers: int64 ``[T, 4]``, rows as `Transfer`, sorted by layer and expert. All read the placement before the
            round.
        layers: layers whose maps this round changes.
        finished: those of them that reach the target in it.
    """

    number: int
    transfers: Ints
    layers: tuple[int, ...]
    finished: tuple[int, ...]

    def moved(self, home_rows: HomeRows) -> int:
        """Return the number of experts that change their rank."""
        return int(np.not_equal(*home_rows.rank_of(self.transfers[:, 2:]).T).sum())


@dataclass(frozen=True, eq=False)
class TransferSchedule:
    """All rounds from one placement to another.

    Args:
        current, target: home layout.
        transfers: int64 ``[T, 5]``: the round, then as `Round.transfers`; sorted.
        last_round: int64 ``[L]``, round in which each layer reaches the target; -1: it does not change.
        load: int64 ``[rounds, R']``, bytes that each rank receives from others in each round; ``R'`` is R times the
            number of groups of ranks that hold different layers.
    """

    current: Placement
    target: Placement
    transfers: Ints
    last_round: Ints
    load: Ints

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        ends = np.searchsorted(self.transfers[:, 0], np.arange(self.num_rounds + 1)).tolist()
        rounds = []
        for number, (begin, end) in enumerate(pairwise(ends)):
            rows, finished = self.transfers[begin:end, 1:], np.flatnonzero(self.last_round == number)
            layers = np.union1d(rows[:, 0], finished)
            rounds.append(Round(number, rows, tuple(layers.tolist()), tuple(finished.tolist())))
        return tuple(rounds)

    @property
    def num_rounds(self) -> int:
        return int(self.last_round.max(initial=-1)) + 1

    def after(self, placement: Placement, round_: Round) -> Placement:
        """Return the placement that a round makes of ``placement``: homes moved, and replica slots changed or emptied.
        Its epoch is one more; after the last round it is at least the target's."""
        map_LP, home_LE = placement.physical_to_logical.copy(), placement.require_homes().copy()
        layer, expert, _, slot = round_.transfers.T
        map_LP[layer, slot] = expert
        home_LE[layer, expert] = slot
        if self.current.replica_slots:
            self._clear_replicas_of_homes(map_LP, layer, expert, slot)
            finished = list(round_.finished)
            map_LP[finished] = self.target.physical_to_logical[finished]
        epoch = placement.epoch + 1
        if round_.number == self.num_rounds - 1:
            epoch = max(epoch, self.target.epoch)
        return placement.stepped(map_LP, home_LE, epoch)

    def _clear_replicas_of_homes(self, map_LP: NDArray[np.int32], layer: Ints, expert: Ints, slot: Ints) -> None:
        """Empty the replica slots of experts whose home has come to the same rank."""
        placement = self.current
        first = slot // placement.slots_per_rank * placement.slots_per_rank + placement.homes_per_rank
        slots = first[:, None] + np.arange(placement.replica_slots)
        transfer, replica = np.nonzero(map_LP[layer[:, None], slots] == expert[:, None])
        map_LP[layer[transfer], slots[transfer, replica]] = EMPTY

    def digest(self) -> bytes:
        """Return 16 bytes, equal on two ranks when they send and expect the same experts in the same order."""
        hasher = hashlib.blake2b(self.target.digest().encode(), digest_size=16)
        for array in (self.transfers, self.last_round, self.load):
            hasher.update(array.astype("<i8").tobytes())
        return hasher.digest()


def make_schedule(
    current: Placement,
    target: Placement,
    expert_bytes: Sequence[int],
    budget_bytes: int,
    holders: Sequence[int] | None = None,
    by_layer: bool = False,
    parts: int = 1,
) -> TransferSchedule:
    """Return the rounds that move experts from ``current`` to ``target``, both in the home layout.

    Homes travel. Replica slots only change their map, since replicas are refreshed from their homes after every
    optimizer step and every commit. In a round no rank receives more than the budget: ``budget_bytes``, or the largest
    expert if that is more. An expert may change its slot on a rank on the way.

    Args:
        expert_bytes: per layer, bytes of an expert with its whole state.
        budget_bytes: bytes of experts from other ranks that a rank can stage.
        holders: per layer, a number that names the ranks that hold it: layers of different ranks (pipeline stages) do
            not share a budget. None: the same ranks hold all of them.
        by_layer: each round is of one layer, so that layers can be committed one by one.
        parts: D, number of ranks over which each home is divided: experts travel between ``R D`` ranks then.
    """
    home_rows = current.home_rows(parts)
    size_L = np.asarray(expert_bytes, dtype=np.int64)
    place_LE, target_LE = (home_rows.place_of(p.require_homes().astype(np.int64)) for p in (current, target))
    source_LE, destination_LE = place_LE // home_rows.rows, target_LE // home_rows.rows
    layer_M, expert_M = np.nonzero(source_LE != destination_LE)
    source_M = np.ascontiguousarray(source_LE[layer_M, expert_M])
    destination_M = np.ascontiguousarray(destination_LE[layer_M, expert_M])
    first_L = np.searchsorted(layer_M, np.arange(current.num_layers + 1))
    group_L = np.zeros_like(size_L) if holders is None else np.unique(holders, return_inverse=True)[1].astype(np.int64)
    holders_of_layer = current.num_ranks * parts
    num_ranks = int(group_L.max(initial=0) + 1) * holders_of_layer

    cycle_M = cut_into_permutations(first_L, source_M, destination_M, holders_of_layer)
    rank_M = source_M + group_L[layer_M] * holders_of_layer
    budget = max(budget_bytes, int(size_L.max(initial=1)))
    changed = np.flatnonzero((current.physical_to_logical != target.physical_to_logical).any(axis=1)).tolist()
    round_M, last_round = np.empty_like(layer_M), np.full(current.num_layers, -1, dtype=np.int64)
    loads: list[list[int]] = []
    for layers in [[layer] for layer in changed] if by_layer else [changed] * bool(changed):
        here, last_round[layers] = np.isin(layer_M, layers), len(loads)
        cycles = np.unique(cycle_M[here], return_inverse=True)[1]
        rounds, load = _first_fit(cycles, size_L[layer_M[here]], rank_M[here], num_ranks, budget)
        round_M[here] = rounds + len(loads)
        loads += load or [[0] * num_ranks]  # a round without transfers: slots within ranks, or replicas, change alone
    order = _in_order(round_M)
    order = order[_in_order(layer_M[order])]
    rows = follow_slots(first_L, expert_M[order], round_M[order], place_LE, target_LE, home_rows.rows, last_round)
    rows[:, 3:] = home_rows.slot_at(rows[:, 3:])
    np.maximum.at(last_round, layer_M, round_M)
    loads_TR = np.array(loads, dtype=np.int64).reshape(-1, num_ranks)
    return TransferSchedule(current, target, rows[_in_order(rows[:, 0])], last_round, loads_TR)


def _in_order(keys: Ints) -> Ints:
    """Indices that sort the keys, stably. Counts of layers and rounds are mostly small enough for a radix sort."""
    small = keys.max(initial=0) <= np.iinfo(np.uint16).max
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")


def cut_into_permutations(first_L: Ints, source_M: Ints, destination_M: Ints, num_ranks: int) -> Ints:
    """Return the cycle of each move, int64 ``[M]``, numbered over all layers. Layer l has the moves ``first_L[l]`` to
    ``first_L[l + 1]``. They are coloured so that in one colour no rank sends or receives twice, with as many colours as
    its busiest rank has moves, one by one along alternating paths (Koenig's theorem on bipartite multigraphs); experts
    that stay fill up ranks with fewer moves."""
    source, destination = source_M.tolist(), destination_M.tolist()
    cycle = [-1] * len(source)
    cycles = 0
    for begin, end in pairwise(first_L.tolist()):
        if begin == end:
            continue
        moves = end - begin
        leaving_CR = _coloured(source[begin:end], destination[begin:end], num_ranks)
        for leaving in leaving_CR:
            for move in leaving:
                if move >= moves or cycle[begin + move] >= 0:
                    continue
                while cycle[begin + move] < 0:
                    cycle[begin + move] = cycles
                    move = leaving[destination[begin + move]]
                cycles += 1
    return np.array(cycle, dtype=np.int64)


def _coloured(source: list[int], destination: list[int], num_ranks: int) -> list[list[int]]:
    """``[C][R]``: the move that leaves each rank in each colour; numbers from ``len(source)`` on: none does."""
    degree = np.bincount(source, minlength=num_ranks).tolist()
    colours = max(degree)
    stays = [rank for rank in range(num_ranks) for _ in range(colours - degree[rank])]
    tail, head = source + stays, destination + stays
    leaving = [[-1] * num_ranks for _ in range(colours)]
    coming = [[-1] * num_ranks for _ in range(colours)]
    colour = [-1] * len(tail)
    for edge, (a, b) in enumerate(zip(tail, head, strict=True)):
        free_a = free_b = -1
        for c in range(colours):
            if leaving[c][a] < 0:
                free_a = c
                if coming[c][b] < 0:
                    break
            elif coming[c][b] < 0:
                free_b = c
        if coming[free_a][b] >= 0:
            # Exchange the two colours along the path that begins at b, so that free_a becomes free there. It cannot
            # reach a: it would have to come by free_a, which is free there.
            path, at_head, wanted = list[int](), True, free_a
            following = coming[free_a][b]
            while following >= 0:
                path.append(following)
                rank = tail[following] if at_head else head[following]
                at_head = not at_head
                wanted = free_a + free_b - wanted
                following = (coming if at_head else leaving)[wanted][rank]
            for step in path:
                leaving[colour[step]][tail[step]] = coming[colour[step]][head[step]] = -1
            for step in path:
                colour[step] = free_a + free_b - colour[step]
                leaving[colour[step]][tail[step]] = coming[colour[step]][head[step]] = step
        colour[edge] = free_a
        leaving[free_a][a] = coming[free_a][b] = edge
    return leaving


def _first_fit(cycle_M: Ints, size_M: Ints, rank_M: Ints, num_ranks: int, budget: int) -> tuple[Ints, list[list[int]]]:
    """Return the round of each move, the first in which all ranks of its cycle have room, and the bytes that each rank
    receives (and sends) in each. Cycles of the largest experts come first; of those, as the layers come.

    Args:
        cycle_M: from 0; in a cycle each rank sends and receives once.
        size_M: bytes of the experts, equal within a cycle.
        budget: bytes that a rank may receive in a round, at least the largest of ``size_M``.
    """
    first_N = np.concatenate([[0], np.cumsum(np.bincount(cycle_M))])
    by_cycle = np.argsort(cycle_M, kind="stable")
    size_N = size_M[by_cycle[first_N[:-1]]]
    first, ranks, sizes = first_N.tolist(), rank_M[by_cycle].tolist(), size_N.tolist()
    every = -1  # a bit for each round
    room = [every] * num_ranks  # those in which a rank has room for one more expert
    load: list[list[int]] = []
    size, round_N = -1, np.empty(len(sizes), np.int64)
    for cycle in np.argsort(-size_N, kind="stable").tolist():
        here = ranks[first[cycle] : first[cycle + 1]]
        if sizes[cycle] != size:
            size = sizes[cycle]
            room = [every] * num_ranks
            for number, of_round in enumerate(load):
                for rank in range(num_ranks):
                    if of_round[rank] + size > budget:
                        room[rank] &= ~(1 << number)
        common = every
        for rank in here:
            common &= room[rank]
        number = (common & -common).bit_length() - 1
        round_N[cycle] = number
        if number == len(load):
            load.append([0] * num_ranks)
        for rank in here:
            load[number][rank] += size
            if load[number][rank] + size > budget:
                room[rank] &= ~(1 << number)
    return round_N[cycle_M], load


def follow_slots(
    first_L: Ints, expert_M: Ints, round_M: Ints, home_LE: Ints, target_LE: Ints, slots_per_rank: int, round_L: Ints
) -> Ints:
    """Return where experts go, slot by slot, so that every round leaves a whole placement behind.

    An expert from another rank takes its last slot at once; one that is there and stays for now makes room by taking a
    slot that has been left. In a layer's last round everybody else takes the last slot too.

    Args:
        first_L: int64 ``[L + 1]``, where each layer's moves begin; within a layer they are sorted by round.
        expert_M, round_M: the moves between ranks.
        home_LE, target_LE: home slots before and after.
        round_L: the round of each layer in which experts change slots within ranks alone.

    Returns:
        int64 ``[T, 5]``, rows ``(round, layer, expert, slot before that round, slot after it)``, also within a rank.
    """
    expert, round_of, rows = expert_M.tolist(), round_M.tolist(), list[tuple[int, ...]]()
    for layer, (begin, end) in enumerate(pairwise(first_L.tolist())):
        at, target = home_LE[layer].tolist(), target_LE[layer].tolist()
        if at == target:
            continue
        who = [-1] * (max(*at, *target) + 1)
        for one, slot in enumerate(at):
            who[slot] = one
        while True:
            number = round_of[begin] if begin < end else int(round_L[layer])
            behind = begin
            before = at.copy()
            while behind < end and round_of[behind] == number:
                who[at[expert[behind]]] = -1
                behind += 1
            for make_room in (False, True):
                for one in expert[begin:behind]:
                    slot = target[one]
                    there = who[slot]
                    if (there >= 0) != make_room or there == one:
                        continue
                    if make_room:
                        free = target[there]
                        if free // slots_per_rank != slot // slots_per_rank or who[free] >= 0:
                            free = slot // slots_per_rank * slots_per_rank
                            while who[free] >= 0:
                                free += 1
                        at[there], who[free] = free, there
                    at[one], who[slot] = slot, one
            if behind == end:
                at = target
            moved = (one for one, (now, then) in enumerate(zip(at, before, strict=True)) if now != then)
            rows += [(number, layer, one, before[one], at[one]) for one in moved]
            begin = behind
            if begin == end:
                break
    return np.array(rows, dtype=np.int64).reshape(-1, 5)
