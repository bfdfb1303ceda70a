"""What one rank sends and receives for the copies of a layer, put down once for each placement.

Messages of a stage are posted together, on every rank in the same order; a stage begins when this rank's part of the
one before has ended. Both ends of a message put it into the same stage, as NCCL demands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..experts.slices import local
from ..placement import EMPTY, HomeRows
from .bank import ReplicaBank, slice_of_row
from .tree import Tree, tree_of

_TAGS_PER_CHANNEL = 1 << 12


@dataclass(frozen=True)
class Below:
    """A copy that hangs on this rank: on a home of it, or on a copy.

    Args:
        rank, replica: the copy.
        home_row: of the home that it hangs on; `EMPTY`: it hangs on a copy.
        on_replica: of the copy that it hangs on; `EMPTY`: it hangs on a home.
        part: which slice of the home it is, where copies are slices of homes that are whole elsewhere.
    """

    rank: int
    replica: int
    home_row: int
    on_replica: int
    part: int


@dataclass(frozen=True)
class GradientStage:
    """Gradients on their way up.

    Args:
        messages: of copies that have everything from below them.
        additions: when those have arrived: rows of this rank's copies, and what is added to them, in this order.
    """

    messages: list[dist.P2POp]
    additions: list[tuple[Tensor, Tensor]]

    @torch.no_grad()
    def add(self) -> None:
        for into, arrived in self.additions:
            into.add_(arrived)


@dataclass(frozen=True)
class Links:
    """What one layer exchanges under the placement that stands; memory stays where it is.

    Args:
        lent: copies that hang on homes of this rank, in the order of their slots.
        weights: stages: down from homes to copies, and from these to others.
        gradients: stages: up from copies to those that they hang on.
        arrivals: for each lent copy, one row per trained tensor: the sum of its and all gradients below it.
        anywhere: whether any rank has copies.
    """

    lent: list[Below]
    weights: list[list[dist.P2POp]]
    gradients: list[GradientStage]
    arrivals: list[list[Tensor]]
    anywhere: bool


NONE = Links([], [], [], [], False)


class Linking:
    """Finds what a rank exchanges.

    Args:
        group: the ranks that have each row once, on the weights' device, used by nothing else.
        ranks: all of them, in the order of the rows: the EP group, or, with divided rows, more.
        rank: this one's place among them.
        parts: D, over how many of them the homes of an EP rank are divided. Each has the part of every copy of that
            rank that its place among those says; so an expert has as many trees, one a part, from the rank of its home.
        ranks_per_node: consecutive EP ranks that share a node.
        arrival: memory for a copy's gradient of a tensor: of the copy's number, the tensor's, and its parameter.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        parts: int,
        ranks_per_node: int,
        arrival: Callable[[int, int, Tensor], Tensor],
    ) -> None:
        self._group = group
        self._ranks = ranks
        self._rank = rank
        self._parts = parts
        self._ep_rank, self._part = divmod(rank, parts)
        self._ranks_per_node = ranks_per_node
        self._arrival = arrival

    def link(self, layer: int, bank: ReplicaBank, home_RK: np.ndarray, home_rows: HomeRows) -> Links:
        """``home_RK``: the home slot of what stands in each replica slot, or `EMPTY`."""
        tree = tree_of(home_RK, home_rows.slots_per_rank, self._ranks_per_node)
        holder_RK = home_rows.rank_of(home_RK)
        above_RK = np.where(tree.parent_replica_RK == EMPTY, holder_RK, tree.parent_RK * self._parts + self._part)
        below = [
            Below(ep_rank * self._parts + part, replica, home_row, on, part)
            for ep_rank, replica in np.argwhere((tree.parent_RK == self._ep_rank) & (above_RK == self._rank)).tolist()
            for on in [int(tree.parent_replica_RK[ep_rank, replica])]
            for home_row in [home_rows.row_of(int(home_RK[ep_rank, replica])) if on == EMPTY else EMPTY]
            for part in (range(self._parts) if on == EMPTY else [self._part])
        ]
        held = above_RK[self._ep_rank]
        trained = bank.trained()
        arrivals = [[self._arrival(index, at, p) for at, p in enumerate(trained)] for index in range(len(below))]
        lent = [copy.home_row != EMPTY for copy in below]
        return Links(
            [copy for copy, at_home in zip(below, lent, strict=True) if at_home],
            self._weights(layer, bank, tree, below, held),
            self._gradients(layer, bank, tree, below, arrivals, held),
            [rows for rows, at_home in zip(arrivals, lent, strict=True) if at_home],
            bool((home_RK != EMPTY).any()),
        )

    def _weights(
        self, layer: int, bank: ReplicaBank, tree: Tree, below: Sequence[Below], above_K: np.ndarray
    ) -> list[list[dist.P2POp]]:
        """``above_K``: the ranks that this one's copies hang on."""
        channel = _Channel(2 * layer, self._group, self._ranks)
        stages = []
        for stage in range(tree.stages):
            sends = [
                (copy.rank, row)
                for copy in below
                if tree.depth_RK[copy.rank // self._parts, copy.replica] == stage
                for row in self._rows(bank, copy)
            ]
            receives = [
                (parent, row)
                for replica, parent in self._held(above_K, tree.depth_RK, stage)
                for row in bank.replica_rows(replica)
            ]
            stages.append(channel.messages(sends, receives))
        return stages

    def _gradients(
        self,
        layer: int,
        bank: ReplicaBank,
        tree: Tree,
        below: Sequence[Below],
        arrivals: Sequence[Sequence[Tensor]],
        above_K: np.ndarray,
    ) -> list[GradientStage]:
        channel = _Channel(2 * layer + 1, self._group, self._ranks)
        stages = []
        for stage in range(tree.stages):
            arriving = [
                (copy, rows)
                for copy, rows in zip(below, arrivals, strict=True)
                if tree.height_RK[copy.rank // self._parts, copy.replica] == stage
            ]
            sends = [
                (parent, row)
                for replica, parent in self._held(above_K, tree.height_RK, stage)
                for row in bank.gradient_rows(replica)
            ]
            additions = [
                (into, arrived)
                for copy, rows in arriving
                if copy.on_replica != EMPTY
                for into, arrived in zip(bank.gradient_rows(copy.on_replica), rows, strict=True)
            ]
            messages = channel.messages(sends, [(copy.rank, row) for copy, rows in arriving for row in rows])
            stages.append(GradientStage(messages, additions))
        return stages

    def _held(self, above_K: np.ndarray, stage_RK: np.ndarray, stage: int) -> list[tuple[int, int]]:
        """This rank's replica slots whose turn it is, and the ranks that they hang on."""
        turn_K = np.flatnonzero(stage_RK[self._ep_rank] == stage)
        return [(int(replica), int(above_K[replica])) for replica in turn_K]

    def _rows(self, bank: ReplicaBank, copy: Below) -> list[Tensor]:
        """Weights that a copy gets from this rank, one per tensor: the live memory."""
        if copy.on_replica != EMPTY:
            return bank.replica_rows(copy.on_replica)
        return [
            slice_of_row(local(parameter).detach(), self._parts, copy.part)[copy.home_row]
            for parameter in bank.parameters
        ]


class _Channel:
    """Messages between pairs of ranks. Several channels are on their way at once, and a pair may exchange several rows:
    each message of a pair has a tag of its own."""

    def __init__(self, number: int, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._first_tag = number * _TAGS_PER_CHANNEL
        self._group = group
        self._count: dict[str, Counter[int]] = {"isend": Counter(), "irecv": Counter()}

    def messages(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[dist.P2POp]:
        """``(rank, row)`` each."""
        operations = []
        for kind, rows in ((dist.isend, sends), (dist.irecv, receives)):
            count = self._count[kind.__name__]
            for rank, row in rows:
                tag = self._first_tag + count[rank]
                count[rank] += 1
                as_bytes = row.reshape(-1).view(torch.uint8)
                operations.append(dist.P2POp(kind, as_bytes, self._ranks[rank], self._group, tag=tag))
        return operations


def post(operations: list[dist.P2POp]) -> list[dist.Work]:
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    return works
