"""Plan of what a rank sends and receives for the replicas of a layer; made once per placement.

A stage starts when this rank's part of the previous one has ended. A `RowTransport` moves the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..moe.experts.slices import local
from ..placement import EMPTY, HomeRows
from .bank import ReplicaBank, slice_of_row
from .row_transport import Row, RowTransport, TransferStage
from .tree import Tree, tree_of


@dataclass(frozen=True)
class TreeEdge:
    """A child in a replica's tree whose parent is on this rank: the home, or another replica.

    Args:
        rank, replica: rank and replica slot of the child.
        home_row: row of the home that is its parent; `EMPTY`: its parent is a replica.
        on_replica: replica slot that is its parent; `EMPTY`: its parent is a home.
        shard: number of the slice that the child holds, if homes are divided over ranks.
    """

    rank: int
    replica: int
    home_row: int
    on_replica: int
    shard: int


@dataclass(frozen=True)
class GradientStage:
    """One stage of gradients towards the homes.

    Args:
        rows: gradients of replicas whose children have all arrived.
        additions: to do when those have arrived: rows of this rank's replicas, and what is added to each, in order.
    """

    rows: TransferStage
    additions: list[tuple[Tensor, Tensor]]

    @torch.no_grad()
    def add(self) -> None:
        """Add the children's gradients to those of this rank's replicas."""
        for into, arrived in self.additions:
            into.add_(arrived)


@dataclass(frozen=True)
class BroadcastPlan:
    """What a rank exchanges for one layer under the current placement.

    Args:
        home_children: children of this rank's homes, in the order of their slots.
        weights: stages from homes to replicas, and from these to others.
        gradients: stages from replicas to their parents.
        arrivals: for each of ``home_children``, one row per trained tensor: the summed gradients of its subtree.
        anywhere: whether any rank has replicas.
    """

    home_children: list[TreeEdge]
    weights: list[TransferStage]
    gradients: list[GradientStage]
    arrivals: list[list[Tensor]]
    anywhere: bool


NONE = BroadcastPlan([], [], [], [], False)


class BroadcastPlanner:
    """Makes the plans of one rank.

    Args:
        transport: moves rows among the ranks that hold each row once: the EP group, or more with divided rows.
        rank: this rank's place among them, in the order of the rows.
        num_shards: D, number of ranks over which the homes of an EP rank are divided. Each of these ranks holds its
            slice of every replica of the EP rank, so an expert has one tree per slice, from the rank of its home.
        ranks_per_node: consecutive EP ranks that share a node.
        arrival_memory: returns memory for a child's gradient, from the child's number, the tensor's, and the parameter.
    """

    def __init__(
        self,
        transport: RowTransport,
        rank: int,
        num_shards: int,
        ranks_per_node: int,
        arrival_memory: Callable[[int, int, Tensor], Tensor],
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._num_shards = num_shards
        self._ep_rank, self._shard = divmod(rank, num_shards)
        self._ranks_per_node = ranks_per_node
        self._arrival_memory = arrival_memory

    @torch.inference_mode(False)  # a step inside it places copies that are written outside of it
    def plan(self, layer: int, bank: ReplicaBank, home_RK: np.ndarray, home_rows: HomeRows) -> BroadcastPlan:
        """Plan a layer's exchange; ``home_RK``: home slot of the expert in each replica slot, or `EMPTY`."""
        tree = tree_of(home_RK, home_rows.slots_per_rank, self._ranks_per_node)
        holder_RK = home_rows.rank_of(home_RK)
        above_RK = np.where(tree.parent_replica_RK == EMPTY, holder_RK, tree.parent_RK * self._num_shards + self._shard)
        edges = [
            TreeEdge(ep_rank * self._num_shards + shard, replica, home_row, on, shard)
            for ep_rank, replica in np.argwhere((tree.parent_RK == self._ep_rank) & (above_RK == self._rank)).tolist()
            for on in [int(tree.parent_replica_RK[ep_rank, replica])]
            for home_row in [home_rows.row_of(int(home_RK[ep_rank, replica])) if on == EMPTY else EMPTY]
            for shard in (range(self._num_shards) if on == EMPTY else [self._shard])
        ]
        held = above_RK[self._ep_rank]
        trained = bank.trained()
        arrivals = [[self._arrival_memory(index, at, p) for at, p in enumerate(trained)] for index in range(len(edges))]
        at_homes = [edge.home_row != EMPTY for edge in edges]
        return BroadcastPlan(
            [edge for edge, at_home in zip(edges, at_homes, strict=True) if at_home],
            self._weights(layer, bank, tree, edges, held),
            self._gradients(layer, bank, tree, edges, arrivals, held),
            [rows for rows, at_home in zip(arrivals, at_homes, strict=True) if at_home],
            bool((home_RK != EMPTY).any()),
        )

    def _weights(
        self, layer: int, bank: ReplicaBank, tree: Tree, edges: Sequence[TreeEdge], above_K: np.ndarray
    ) -> list[TransferStage]:
        """Return the stages of weights; ``above_K``: the ranks of the parents of this rank's replicas."""
        channel = self._transport.channel(layer, down=True)
        stages = []
        for stage in range(tree.stages):
            sends = [
                Row(copy.rank, row, at_copy)
                for copy in edges
                if tree.depth_RK[copy.rank // self._num_shards, copy.replica] == stage
                for row, at_copy in zip(self._rows(bank, copy), bank.replica_rows(copy.replica), strict=True)
            ]
            receives = [
                Row(parent, row, row)
                for replica, parent in self._held(above_K, tree.depth_RK, stage)
                for row in bank.replica_rows(replica)
            ]
            stages.append(channel.stage(sends, receives))
        return stages

    def _gradients(
        self,
        layer: int,
        bank: ReplicaBank,
        tree: Tree,
        edges: Sequence[TreeEdge],
        arrivals: Sequence[Sequence[Tensor]],
        above_K: np.ndarray,
    ) -> list[GradientStage]:
        channel = self._transport.channel(layer, down=False)
        stages = []
        for stage in range(tree.stages):
            arriving = [
                (copy, rows)
                for copy, rows in zip(edges, arrivals, strict=True)
                if tree.height_RK[copy.rank // self._num_shards, copy.replica] == stage
            ]
            sends = [
                Row(parent, row, row)
                for replica, parent in self._held(above_K, tree.height_RK, stage)
                for row in bank.gradient_rows(replica)
            ]
            additions = [
                (into, arrived)
                for copy, rows in arriving
                if copy.on_replica != EMPTY
                for into, arrived in zip(bank.gradient_rows(copy.on_replica), rows, strict=True)
            ]
            receives = [
                Row(copy.rank, row, at_copy)
                for copy, rows in arriving
                for row, at_copy in zip(rows, bank.gradient_rows(copy.replica), strict=True)
            ]
            stages.append(GradientStage(channel.stage(sends, receives), additions))
        return stages

    def _held(self, above_K: np.ndarray, stage_RK: np.ndarray, stage: int) -> list[tuple[int, int]]:
        """Return this rank's replica slots of a stage, and the ranks of their parents."""
        due_K = np.flatnonzero(stage_RK[self._ep_rank] == stage)
        return [(int(replica), int(above_K[replica])) for replica in due_K]

    def _rows(self, bank: ReplicaBank, copy: TreeEdge) -> list[Tensor]:
        """Return the weights that a child gets from this rank, one row per tensor: live memory."""
        if copy.on_replica != EMPTY:
            return bank.replica_rows(copy.on_replica)
        return [
            _live_row(slice_of_row(local(parameter).detach(), self._num_shards, copy.shard), copy.home_row)
            for parameter in bank.parameters
        ]


def _live_row(rows: Tensor, row: int) -> Tensor:
    """Return a row in place; raises ValueError if it is not contiguous, since a copy would grow stale."""
    if not rows[row].is_contiguous():
        raise ValueError(
            f"experts of shape {list(rows.shape[1:])} do not lie in one piece, and their copies are read from there: "
            "make the weights contiguous() before fully_shard and attach"
        )
    return rows[row]
