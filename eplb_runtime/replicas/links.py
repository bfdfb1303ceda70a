"""What one rank sends and receives for the copies of a layer, put down once for each placement.

A stage begins when this rank's part of the one before has ended; what carries it is a `RowTransport`.
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
from .row_transport import Copied, Row, RowTransport, TransferStage
from .tree import Tree, tree_of


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
        rows: of copies that have everything from below them.
        additions: when those have arrived: rows of this rank's copies, and what is added to them, in this order.
    """

    rows: TransferStage
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
    weights: list[TransferStage]
    gradients: list[GradientStage]
    arrivals: list[list[Tensor]]
    anywhere: bool


NONE = Links([], [], [], [], False)


class Linking:
    """Finds what a rank exchanges.

    Args:
        carrier: carries rows between the ranks that have each once: the EP group, or, with divided rows, more.
        rank: this one's place among them, in the order of the rows.
        parts: D, over how many of them the homes of an EP rank are divided. Each has the part of every copy of that
            rank that its place among those says; so an expert has as many trees, one a part, from the rank of its home.
        ranks_per_node: consecutive EP ranks that share a node.
        arrival: memory for a copy's gradient of a tensor: of the copy's number, the tensor's, and its parameter.
    """

    def __init__(
        self,
        carrier: RowTransport,
        rank: int,
        parts: int,
        ranks_per_node: int,
        arrival: Callable[[int, int, Tensor], Tensor],
    ) -> None:
        self._carrier = carrier
        self._rank = rank
        self._parts = parts
        self._ep_rank, self._part = divmod(rank, parts)
        self._ranks_per_node = ranks_per_node
        self._arrival = arrival

    @torch.inference_mode(False)  # a step inside it places copies that are written outside of it
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
            self._spread(bank, home_RK, home_rows) or self._weights(layer, bank, tree, below, held),
            self._gradients(layer, bank, tree, below, arrivals, held),
            [rows for rows, at_home in zip(arrivals, lent, strict=True) if at_home],
            bool((home_RK != EMPTY).any()),
        )

    def _spread(self, bank: ReplicaBank, home_RK: np.ndarray, home_rows: HomeRows) -> list[TransferStage]:
        """The one stage of a carrier that needs no trees; none: this one does, or there is nothing to carry."""
        experts = []
        for home in np.unique(home_RK[home_RK != EMPTY]).tolist() if self._carrier.spreads else ():
            source, held = int(home_rows.rank_of(np.array(home))), np.argwhere(home_RK == home).tolist()
            here = [row for rank, replica in held if rank == self._rank for row in bank.replica_rows(replica)]
            if source == self._rank:
                here = [_live_row(local(p).detach(), home_rows.row_of(home)) for p in bank.parameters]
            experts.append(Copied(home, source, tuple(rank for rank, _ in held), here))
        return [self._carrier.spread(experts, [row.nbytes for row in bank.replica_rows(0)])] if experts else []

    def _weights(
        self, layer: int, bank: ReplicaBank, tree: Tree, below: Sequence[Below], above_K: np.ndarray
    ) -> list[TransferStage]:
        """``above_K``: the ranks that this one's copies hang on."""
        channel = self._carrier.channel(layer, down=True)
        stages = []
        for stage in range(tree.stages):
            sends = [
                Row(copy.rank, row, at_copy)
                for copy in below
                if tree.depth_RK[copy.rank // self._parts, copy.replica] == stage
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
        below: Sequence[Below],
        arrivals: Sequence[Sequence[Tensor]],
        above_K: np.ndarray,
    ) -> list[GradientStage]:
        channel = self._carrier.channel(layer, down=False)
        stages = []
        for stage in range(tree.stages):
            arriving = [
                (copy, rows)
                for copy, rows in zip(below, arrivals, strict=True)
                if tree.height_RK[copy.rank // self._parts, copy.replica] == stage
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
        """This rank's replica slots whose turn it is, and the ranks that they hang on."""
        turn_K = np.flatnonzero(stage_RK[self._ep_rank] == stage)
        return [(int(replica), int(above_K[replica])) for replica in turn_K]

    def _rows(self, bank: ReplicaBank, copy: Below) -> list[Tensor]:
        """Weights that a copy gets from this rank, one per tensor: the live memory."""
        if copy.on_replica != EMPTY:
            return bank.replica_rows(copy.on_replica)
        return [
            _live_row(slice_of_row(local(parameter).detach(), self._parts, copy.part), copy.home_row)
            for parameter in bank.parameters
        ]


def _live_row(rows: Tensor, row: int) -> Tensor:
    """Raises ValueError: it does not lie in one piece, so that what would leave is a copy of what it is now."""
    if not rows[row].is_contiguous():
        raise ValueError(
            f"experts of shape {list(rows.shape[1:])} do not lie in one piece, and their copies are read from there: "
            "make the weights contiguous() before fully_shard and attach"
        )
    return rows[row]
