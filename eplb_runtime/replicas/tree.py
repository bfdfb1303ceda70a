"""Along which ranks an expert's weights reach its copies, and the copies' gradients its home. No messages here.

An expert has a tree. Its root is the home. Nodes with copies hang on the home's node and on each other, so that weights
enter each node once and no rank sends one expert to more than `NODES_EACH` others; inside a node the first copy, or the
home, hands on to `RANKS_EACH` more, and so on. Gradients go up the way that weights came down.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..placement import EMPTY

NODES_EACH, RANKS_EACH = 3, 8
"""So many other nodes, and other ranks of its own node, a rank sends an expert to."""


@dataclass(frozen=True)
class Tree:
    """Where each copy of a layer hangs; int64 ``[R, k]`` each, `EMPTY` where a replica slot holds no copy.

    Args:
        parent_RK: rank that sends the copy its weights, and adds up its gradients.
        parent_replica_RK: replica slot of that rank that holds the expert; `EMPTY`: its home does.
        depth_RK: in which stage weights arrive, from 0: after those of the parent.
        height_RK: in which stage gradients leave, from 0: after those of all copies below.
    """

    parent_RK: NDArray[np.int64]
    parent_replica_RK: NDArray[np.int64]
    depth_RK: NDArray[np.int64]
    height_RK: NDArray[np.int64]

    @property
    def stages(self) -> int:
        return int(self.depth_RK.max(initial=EMPTY)) + 1


def tree_of(home_RK: NDArray[np.int64], slots_per_rank: int, ranks_per_node: int) -> Tree:
    """Return the trees of all experts of a layer, by the home slot of the expert that each replica slot holds."""
    ranks, replicas = home_RK.shape
    rank_N, replica_N = np.nonzero(home_RK != EMPTY)
    home_N = home_RK[rank_N, replica_N].astype(np.int64)
    root_N = home_N // slots_per_rank
    # Counted from the home on, so that the copies that hand on differ from expert to expert.
    node_N = (rank_N // ranks_per_node - root_N // ranks_per_node) % -(-ranks // ranks_per_node)
    place_N = (rank_N % ranks_per_node - root_N % ranks_per_node) % ranks_per_node
    order_N = np.lexsort((place_N, node_N, home_N))
    rank_N, replica_N, home_N, root_N, node_N = (
        array[order_N] for array in (rank_N, replica_N, home_N, root_N, node_N)
    )
    above_N, depth_N = _parents(home_N, node_N)
    hung_N = above_N != EMPTY
    full = np.full((4, ranks, replicas), EMPTY, dtype=np.int64)
    full[:, rank_N, replica_N] = (
        np.where(hung_N, rank_N[above_N], root_N),
        np.where(hung_N, replica_N[above_N], EMPTY),
        depth_N,
        _heights(above_N, depth_N),
    )
    return Tree(*full)


def _parents(home_N: NDArray[np.int64], node_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """On which copy each hangs, `EMPTY`: on the home, and how far below; copies are sorted by home and node, and the
    home's node is 0."""
    copies_N = np.arange(home_N.size)
    starts_home_N = np.diff(home_N, prepend=EMPTY) != 0
    starts_node_N = starts_home_N | (np.diff(node_N, prepend=EMPTY) != 0)
    first_of_home_N = np.maximum.accumulate(np.where(starts_home_N, copies_N, 0))
    first_of_node_N = np.maximum.accumulate(np.where(starts_node_N, copies_N, 0))
    at_home_N = node_N == 0
    leads_N = starts_node_N & ~at_home_N
    # The first copy of each node, numbered from 1 within its expert; the home is number 0.
    leaders_L = np.flatnonzero(leads_N)
    before_N = np.cumsum(leads_N)
    number_N = before_N - (before_N - leads_N)[first_of_home_N]
    above_number_N = np.where(leads_N, (number_N - 1) // NODES_EACH, 0)
    # In a node its first copy is number 0, or the home.
    inside_N = copies_N - first_of_node_N + at_home_N
    above_inside_N = (inside_N - 1) // RANKS_EACH
    above_N = np.where(at_home_N & (above_inside_N == 0), EMPTY, first_of_node_N + above_inside_N - at_home_N)
    index_N = before_N - number_N + above_number_N - 1
    above_leader_N = leaders_L[np.maximum(index_N, 0)] if leaders_L.size else copies_N
    above_N = np.where(leads_N, np.where(above_number_N == 0, EMPTY, above_leader_N), above_N)
    depth_N = _levels(np.where(leads_N, number_N, 0), NODES_EACH) - leads_N
    depth_N = np.where(leads_N, depth_N, 0)
    of_leader_N = np.where(at_home_N, EMPTY, depth_N[first_of_node_N])
    return above_N, np.where(leads_N, depth_N, of_leader_N + _levels(inside_N, RANKS_EACH))


def _levels(number_N: NDArray[np.int64], each: int) -> NDArray[np.int64]:
    """How far below number 0 they are in a tree in which each has so many below it, numbered level by level."""
    levels_N, left_N = np.zeros_like(number_N), number_N.copy()
    while (left_N > 0).any():
        levels_N += left_N > 0
        left_N = np.where(left_N > 0, (left_N - 1) // each, 0)
    return levels_N


def _heights(above_N: NDArray[np.int64], depth_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """How far the lowest copy below each is."""
    height_N = np.zeros_like(depth_N)
    for depth in range(int(depth_N.max(initial=0)), 0, -1):
        children = np.flatnonzero((depth_N == depth) & (above_N != EMPTY))
        np.maximum.at(height_N, above_N[children], height_N[children] + 1)
    return height_N
