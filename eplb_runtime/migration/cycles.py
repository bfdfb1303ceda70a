"""Which moves can be committed together, and in which round: searches over the graph of moves between ranks.

The experts that change ranks in a layer are edges of a graph over ranks in which every rank has as many edges in as
out. A cycle of edges that visits a rank at most once is the least that can be committed: afterwards every rank has its
number of homes again, and no rank holds more than one staged expert for it.

Shape suffixes: M moves of all layers, sorted by layer; L layers; N cycles; R ranks of all groups of ranks.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def cut_into_permutations(first_L: Ints, source_M: Ints, destination_M: Ints, num_ranks: int) -> Ints:
    """Return the cycle of each move, int64 ``[M]``, numbered over all layers, permutation by permutation. A layer's
    moves are coloured so that in one colour no rank sends or receives twice, with as many colours as its busiest rank
    has moves, one by one along alternating paths (Koenig's theorem on bipartite multigraphs); ranks with fewer moves
    are filled up with experts that stay."""
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


def cut_into_short_cycles(first_L: Ints, source_M: Ints, destination_M: Ints, num_ranks: int) -> Ints:
    """The cycle of each move as above, the shortest first that goes through the rank with the most moves left."""
    source, destination = source_M.tolist(), destination_M.tolist()
    cycle = [-1] * len(source)
    cycles = 0
    for begin, end in pairwise(first_L.tolist()):
        left_R = np.bincount(source_M[begin:end], minlength=num_ranks)
        by_rank: list[list[int]] = [[] for _ in range(num_ranks)]
        for move in range(begin, end):
            by_rank[source[move]].append(move)
        while left_R.any():
            start = int(left_R.argmax())
            arrived_by: dict[int, int] = {}
            move = _closing(start, by_rank, destination, cycle, arrived_by)
            while True:
                cycle[move] = cycles
                left_R[source[move]] -= 1
                if source[move] == start:
                    break
                move = arrived_by[source[move]]
            cycles += 1
    return np.array(cycle, dtype=np.int64)


def _closing(
    start: int, by_rank: list[list[int]], destination: list[int], cycle: list[int], arrived_by: dict[int, int]
) -> int:
    """Return the move without a cycle that leads back to ``start`` in the fewest. ``arrived_by``: out, the move that
    reaches each rank on the way."""
    queue = [start]
    for rank in queue:
        for move in by_rank[rank]:
            reached = destination[move]
            if cycle[move] >= 0:
                continue
            if reached == start:
                return move
            if reached not in arrived_by:
                arrived_by[reached] = move
                queue.append(reached)
    raise AssertionError("every rank has as many moves in as out")


def first_fit(
    order_N: Ints, first_N: Ints, rank_M: Ints, bytes_N: Ints, num_ranks: int, budget: int
) -> tuple[Ints, Ints]:
    """The round of each cycle, int64 ``[N]``: the first in which all its ranks have room; and the loads.

    Args:
        order_N: the order in which cycles choose; those of equal ``bytes_N`` follow one another.
        first_N: int64 ``[N + 1]``, where each cycle's ranks begin in ``rank_M``.
        rank_M: the ranks of the cycles, ``0 .. R - 1`` over all groups; in a cycle each sends and receives once.
        bytes_N: of each expert of a cycle.
        budget: bytes that a rank may receive in a round, at least the largest of ``bytes_N``.

    Returns:
        The rounds, and int64 ``[rounds, R]``: bytes that each rank receives (and sends) in each.
    """
    every = -1  # a bit for each round
    room = [every] * num_ranks  # those in which a rank has room for one more expert
    load: list[list[int]] = []
    first, ranks, nbytes = first_N.tolist(), rank_M.tolist(), bytes_N.tolist()
    size, round_N = -1, np.empty(order_N.size, np.int64)
    for cycle in order_N.tolist():
        here = ranks[first[cycle] : first[cycle + 1]]
        if nbytes[cycle] != size:
            size = nbytes[cycle]
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
    return round_N, np.array(load, dtype=np.int64).reshape(-1, num_ranks)


def follow_slots(
    first_L: Ints, expert_M: Ints, round_M: Ints, home_LE: Ints, target_LE: Ints, slots_per_rank: int, round_L: Ints
) -> Ints:
    """Where experts go, slot by slot, so that every round leaves a whole placement behind.

    An expert from another rank takes its last slot at once; one that is there and stays for now makes room by taking
    a slot that has been left. In a layer's last round everybody else takes the last slot too.

    Args:
        first_L: int64 ``[L + 1]``, where each layer's moves begin; within a layer they are sorted by round.
        expert_M, round_M: the moves between ranks.
        home_LE, target_LE: home slots before and after.
        round_L: of layers in which experts change slots within ranks alone.

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
