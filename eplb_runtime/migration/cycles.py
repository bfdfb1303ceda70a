"""Which moves can be committed together, and in which round: compiled searches over the graph of moves between ranks.

The experts that change ranks in a layer are edges of a graph over ranks in which every rank has as many edges in as
out. A cycle of edges that visits a rank at most once is the least that can be committed: afterwards every rank has its
number of homes again, and no rank holds more than one staged expert for it.

Shape suffixes: M moves of all layers, sorted by layer; L layers; N cycles; R ranks of all groups of ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..utils.jit import jit

Ints = NDArray[np.int64]


@jit
def cut_into_permutations(first_L: Ints, source_M: Ints, destination_M: Ints, num_ranks: int) -> Ints:
    """Return the cycle of each move, int64 ``[M]``, numbered over all layers, permutation by permutation. A layer's
    moves are coloured so that in one colour no rank sends or receives twice, with as many colours as its busiest rank
    has moves, one by one along alternating paths (Koenig's theorem on bipartite multigraphs); ranks with fewer moves
    are filled up with experts that stay."""
    cycle_M = np.full(source_M.size, -1, np.int64)
    cycles = 0
    for layer in range(first_L.size - 1):
        begin, moves = first_L[layer], first_L[layer + 1] - first_L[layer]
        if moves == 0:
            continue
        leaving_RC = _coloured(source_M[begin : begin + moves], destination_M[begin : begin + moves], num_ranks)
        for colour in range(leaving_RC.shape[1]):
            for rank in range(num_ranks):
                move = leaving_RC[rank, colour]
                if move >= moves or cycle_M[begin + move] >= 0:
                    continue
                while cycle_M[begin + move] < 0:
                    cycle_M[begin + move] = cycles
                    move = leaving_RC[destination_M[begin + move], colour]
                cycles += 1
    return cycle_M


@jit
def _coloured(source: Ints, destination: Ints, num_ranks: int) -> Ints:
    """int64 ``[R, C]``: the move that leaves each rank in each colour; numbers from ``len(source)`` on: none does."""
    moves = source.size
    degree = np.zeros(num_ranks, np.int64)
    for move in range(moves):
        degree[source[move]] += 1
    colours = degree.max()
    edges = num_ranks * colours
    tail, head = np.empty(edges, np.int64), np.empty(edges, np.int64)
    for move in range(moves):  # arrays assigned whole take seconds to compile
        tail[move], head[move] = source[move], destination[move]
    edge = moves
    for rank in range(num_ranks):
        for _ in range(colours - degree[rank]):
            tail[edge] = head[edge] = rank
            edge += 1
    leaving = np.full((num_ranks, colours), -1, np.int64)
    coming = np.full((num_ranks, colours), -1, np.int64)
    colour = np.full(edges, -1, np.int64)
    path = np.empty(2 * num_ranks + 2, np.int64)
    for edge in range(edges):
        a, b = tail[edge], head[edge]
        free_a = free_b = -1
        for c in range(colours):
            if leaving[a, c] < 0:
                free_a = c
                if coming[b, c] < 0:
                    break
            elif coming[b, c] < 0:
                free_b = c
        if coming[b, free_a] >= 0:
            # Exchange the two colours along the path that begins at b, so that free_a becomes free there. It cannot
            # reach a: it would have to come by free_a, which is free there.
            length, rank, at_head, wanted = 0, b, True, free_a
            following = coming[b, free_a]
            while following >= 0:
                path[length] = following
                length += 1
                rank = tail[following] if at_head else head[following]
                at_head = not at_head
                wanted = free_a + free_b - wanted
                following = coming[rank, wanted] if at_head else leaving[rank, wanted]
            for step in range(length):
                leaving[tail[path[step]], colour[path[step]]] = -1
                coming[head[path[step]], colour[path[step]]] = -1
            for step in range(length):
                other = free_a + free_b - colour[path[step]]
                colour[path[step]] = other
                leaving[tail[path[step]], other] = path[step]
                coming[head[path[step]], other] = path[step]
        colour[edge] = free_a
        leaving[a, free_a] = edge
        coming[b, free_a] = edge
    return leaving


@jit
def cut_into_short_cycles(first_L: Ints, source_M: Ints, destination_M: Ints, num_ranks: int) -> Ints:
    """The cycle of each move as above, the shortest first that goes through the rank with the most moves left."""
    cycle_M = np.full(source_M.size, -1, np.int64)
    seen, arrived_by = np.full(num_ranks, -1, np.int64), np.empty(num_ranks, np.int64)
    queue = np.empty(num_ranks, np.int64)
    cycles = searches = 0
    for layer in range(first_L.size - 1):
        begin, end = first_L[layer], first_L[layer + 1]
        left = np.zeros(num_ranks, np.int64)
        for move in range(begin, end):
            left[source_M[move]] += 1
        first = np.zeros(num_ranks + 1, np.int64)
        for rank in range(num_ranks):
            first[rank + 1] = first[rank] + left[rank]
        place = first[:-1].copy()
        by_rank = np.empty(end - begin, np.int64)
        for move in range(begin, end):
            by_rank[place[source_M[move]]] = move
            place[source_M[move]] += 1
        while left.max() > 0:
            start = left.argmax()
            searches += 1
            queue[0] = start
            read, written, closing = 0, 1, -1
            while closing < 0:
                rank = queue[read]
                read += 1
                for index in range(first[rank], first[rank + 1]):
                    move = by_rank[index]
                    reached = destination_M[move]
                    if cycle_M[move] >= 0:
                        continue
                    if reached == start:
                        closing = move
                        break
                    if seen[reached] != searches:
                        seen[reached] = searches
                        arrived_by[reached] = move
                        queue[written] = reached
                        written += 1
            move = closing
            while True:
                cycle_M[move] = cycles
                left[source_M[move]] -= 1
                if source_M[move] == start:
                    break
                move = arrived_by[source_M[move]]
            cycles += 1
    return cycle_M


@jit
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
    words, used, size = 4, 0, np.int64(-1)  # a word is of 63 rounds: the sign bit stays out of it
    every = np.int64(2**63 - 1)
    load = np.zeros((words * 63, num_ranks), np.int64)
    room = np.full((num_ranks, words), every)  # a bit for each round in which a rank has room for one more expert
    round_N = np.empty(order_N.size, np.int64)
    for cycle in order_N:
        begin, end = first_N[cycle], first_N[cycle + 1]
        if bytes_N[cycle] != size:
            size = bytes_N[cycle]
            for rank in range(num_ranks):
                for number in range(used):
                    bit = np.int64(1) << (number % 63)
                    if load[number, rank] + size <= budget:
                        room[rank, number // 63] |= bit
                    else:
                        room[rank, number // 63] &= ~bit
        word = 0
        common = np.int64(0)
        while common == 0:
            if word == words:
                load = np.concatenate((load, np.zeros_like(load)))
                room = np.concatenate((room, np.full_like(room, every)), axis=1)
                words *= 2
            common = every
            for index in range(begin, end):
                common &= room[rank_M[index], word]
            word += 1
        number = (word - 1) * 63
        while common & 1 == 0:
            common >>= 1
            number += 1
        round_N[cycle] = number
        used = max(used, number + 1)
        for index in range(begin, end):
            rank = rank_M[index]
            load[number, rank] += size
            if load[number, rank] + size > budget:
                room[rank, number // 63] &= ~(np.int64(1) << (number % 63))
    return round_N, load[:used]


@jit
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
    num_layers, num_experts = home_LE.shape
    transfers = np.empty((2 * expert_M.size + (home_LE != target_LE).sum(), 5), np.int64)
    count = 0
    at = np.empty(num_experts, np.int64)
    who = np.empty(max(home_LE.max(), target_LE.max()) + 1, np.int64)
    for layer in range(num_layers):
        target = target_LE[layer]
        if (home_LE[layer] == target).all():
            continue
        who[:] = -1
        for expert in range(num_experts):
            at[expert] = home_LE[layer, expert]
            who[at[expert]] = expert
        begin, end = first_L[layer], first_L[layer + 1]
        while True:
            number = round_M[begin] if begin < end else round_L[layer]
            behind = begin
            before = at.copy()
            while behind < end and round_M[behind] == number:
                who[at[expert_M[behind]]] = -1
                behind += 1
            for make_room in (False, True):
                for move in range(begin, behind):
                    expert = expert_M[move]
                    slot = target[expert]
                    there = who[slot]
                    if (there >= 0) != make_room or there == expert:
                        continue
                    if make_room:
                        free = target[there]
                        if free // slots_per_rank != slot // slots_per_rank or who[free] >= 0:
                            free = slot // slots_per_rank * slots_per_rank
                            while who[free] >= 0:
                                free += 1
                        at[there], who[free] = free, there
                    at[expert], who[slot] = slot, expert
            if behind == end:
                at = target.copy()
            for expert in range(num_experts):
                if at[expert] != before[expert]:
                    transfers[count, 0], transfers[count, 1], transfers[count, 2] = number, layer, expert
                    transfers[count, 3], transfers[count, 4] = before[expert], at[expert]
                    count += 1
            begin = behind
            if begin == end:
                break
    return transfers[:count]
