"""What a rank exchanges for the replicas of a layer: planned once for each placement, posted step after step.

Replicas hang on their home in a tree of two levels. On each node without the home the first replica, counted from the
home on, gets weights from the home and hands them on to the node's others; on the home's node all get them from the
home. Gradients go up the same way. So an expert's weights enter each node once, and its gradients leave each node once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..moe.experts.slices import local
from ..placement import EMPTY, HomeRows
from .bank import ReplicaBank, slice_of_row

_TAGS_PER_STAGE = 1 << 12


class Row(NamedTuple):
    """A row of one tensor on its way between a replica and its parent: the other end's rank, contiguous memory here,
    and memory here that lies as the replica's does there."""

    rank: int
    local: Tensor
    at_replica: Tensor


class Waiting(Protocol):
    """Rows on their way."""

    def wait(self) -> object:
        """Wait, on a GPU in the current stream alone, until rows have arrived and those sent may be overwritten."""


@dataclass(frozen=True)
class RowStage:
    """Rows that travel together, built once for each placement: messages, and what begins rows that need none."""

    operations: list[dist.P2POp]
    by_copies: Sequence[Callable[[], Waiting]] = ()


class PointToPoint:
    """Rows between the ranks that have each row of an expert tensor once, by torch.distributed (gloo or NCCL). The
    group is used by nothing else. All its ranks post the same stages of the same layers in the same order, also those
    that have no rows in one; both ends of a message put it into the same stage, as NCCL demands."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros as memory for rows of replicas or of their gradients on this rank (for `Row.at_replica`)."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def open(self) -> None:
        """Do nothing. A transport that opens the memory of `zeros` to other ranks does it here, collectively."""

    def stage(self, layer: int, down: bool, number: int, sends: Sequence[Row], receives: Sequence[Row]) -> RowStage:
        """Return a stage with a message for each row, none sent yet. ``down``: weights, else gradients; ``number``: 0
        or 1, the stage in that direction. Both ends list the rows between them in the same order."""
        operations, first_tag = [], ((2 * layer + (not down)) * 2 + number) * _TAGS_PER_STAGE
        for kind, rows in ((dist.isend, sends), (dist.irecv, receives)):
            count = Counter[int]()  # several stages are in flight at once, and a pair may exchange several rows
            for row in rows:
                as_bytes, tag = row.local.reshape(-1).view(torch.uint8), first_tag + count[row.rank]
                operations.append(dist.P2POp(kind, as_bytes, self._ranks[row.rank], self._group, tag=tag))
                count[row.rank] += 1
        return RowStage(operations)

    def post(self, stages: Sequence[RowStage]) -> list[Sequence[Waiting]]:
        """Post the messages of all stages as one group and begin their copies, without waiting. Return for each stage
        the works to wait for; NCCL has one for the whole group. Rows must have been computed on the current stream."""
        operations = [operation for stage in stages for operation in stage.operations]
        works = dist.batch_isend_irecv(operations) if operations else []
        ends = accumulate((len(stage.operations) for stage in stages), initial=0)
        of_each = [works[begin:end] for begin, end in pairwise(ends)]
        of_each = of_each if len(works) == len(operations) else [works] * len(stages)
        return [[*(begin() for begin in s.by_copies), *own] for s, own in zip(stages, of_each, strict=True)]


class Child(NamedTuple):
    """A replica whose parent is on this rank.

    Args:
        rank, replica: rank and replica slot of the child.
        on: replica slot that is its parent; `EMPTY`: its parent is a home.
        shard: number of the slice that the child holds, if homes are divided over ranks.
        arrivals: memory for its gradients, one row per trained tensor.
    """

    rank: int
    replica: int
    on: int
    home_row: int
    shard: int
    arrivals: list[Tensor]


@dataclass(frozen=True)
class ReplicaPlan:
    """Exchanges of a rank for one layer under the current placement, in a stage for each level of the trees.

    Args:
        weights: from homes, then from replicas to those that hang on them.
        gradients: of replicas on which none hangs, then of the others.
        additions: between these: rows of this rank's replicas, and what is added to each, in order.
        at_homes: children of this rank's homes, in the order of their slots.
    """

    weights: Sequence[RowStage] = ()
    gradients: Sequence[RowStage] = ()
    additions: Sequence[tuple[Tensor, Tensor]] = ()
    at_homes: Sequence[Child] = ()


def tree_of(
    home_RK: NDArray[np.integer], slots_per_rank: int, ranks_per_node: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each replica's parent in a layer, int64 ``[R, k]`` each: its rank, and its replica slot there (`EMPTY`:
    the home). Empty slots have `EMPTY` in both. ``home_RK``: home slot of each replica's expert, or `EMPTY`."""
    rank_N, replica_N = np.nonzero(home_RK != EMPTY)
    home_N = home_RK[rank_N, replica_N].astype(np.int64)
    root_N = home_N // slots_per_rank
    # Counted from the home on, so that the replicas that hand on differ from expert to expert.
    nodes = -(-len(home_RK) // ranks_per_node)
    node_N = (rank_N // ranks_per_node - root_N // ranks_per_node) % nodes
    place_N = (rank_N % ranks_per_node - root_N % ranks_per_node) % ranks_per_node
    order_N = np.lexsort((place_N, node_N, home_N))
    rank_N, replica_N, home_N, root_N, node_N = (one[order_N] for one in (rank_N, replica_N, home_N, root_N, node_N))
    begins_N = (np.diff(home_N, prepend=EMPTY) != 0) | (np.diff(node_N, prepend=EMPTY) != 0)
    first_N = np.maximum.accumulate(np.where(begins_N, np.arange(home_N.size), 0))
    on_home_N = begins_N | (node_N == 0)
    parent_RK, on_RK = np.full((2, *home_RK.shape), EMPTY, dtype=np.int64)
    parent_RK[rank_N, replica_N] = np.where(on_home_N, root_N, rank_N[first_N])
    on_RK[rank_N, replica_N] = np.where(on_home_N, EMPTY, replica_N[first_N])
    return parent_RK, on_RK


@dataclass(frozen=True)
class ReplicaPlanner:
    """Makes the plans of one rank.

    Args:
        transport: moves rows among the ranks that hold each row once: the EP group, or more with divided rows.
        rank: this rank's place among them, in the order of the rows.
        num_shards: D, ranks that divide an EP rank's homes; each has its slice of every replica, and each slice a tree.
        ranks_per_node: consecutive EP ranks that share a node.
        arrival_memory: returns memory for a child's gradient, from the child's number, the tensor's, and the parameter.
    """

    transport: PointToPoint
    rank: int
    num_shards: int
    ranks_per_node: int
    arrival_memory: Callable[[int, int, Tensor], Tensor]

    @torch.inference_mode(False)  # a step inside it places replicas that are written outside of it
    def plan(self, layer: int, bank: ReplicaBank, home_RK: NDArray[np.integer], home_rows: HomeRows) -> ReplicaPlan:
        """Return what this rank exchanges for a layer, empty without replicas; nothing is sent yet. ``home_RK``: home
        slot of the expert in each replica slot, or `EMPTY`. ValueError: a home's weights are not contiguous."""
        if not (home_RK != EMPTY).any():
            return ReplicaPlan()
        ep_rank, shard = divmod(self.rank, self.num_shards)
        parent_RK, on_RK = tree_of(home_RK, home_rows.slots_per_rank, self.ranks_per_node)
        above_RK = np.where(on_RK == EMPTY, home_rows.rank_of(home_RK), parent_RK * self.num_shards + shard)
        above_RK[home_RK == EMPTY] = EMPTY
        hangs_RK = on_RK != EMPTY
        has_children_RK = np.zeros_like(hangs_RK)
        has_children_RK[parent_RK[hangs_RK], on_RK[hangs_RK]] = True
        children: list[Child] = []
        for there, replica in np.argwhere(above_RK == self.rank).tolist():
            on, row = int(on_RK[there, replica]), int(home_rows.row_of(home_RK[there, replica]))
            for part in range(self.num_shards) if on == EMPTY else [shard]:
                arrivals = [self.arrival_memory(len(children), at, p) for at, p in enumerate(bank.trained())]
                children.append(Child(there * self.num_shards + part, replica, on, row, part, arrivals))

        def stage_of(down: bool, number: int) -> RowStage:
            """Return one stage of the weights (``down``) or of the gradients. Stage 1 has the weights of replicas whose
            parent is a replica, and the gradients of replicas that are parents; stage 0 has the rest."""
            of_replica, later_RK = (bank.replica_rows, hangs_RK) if down else (bank.gradient_rows, has_children_RK)
            with_children = [
                Row(child.rank, *rows)
                for child in children
                if later_RK[child.rank // self.num_shards, child.replica] == number
                for rows in zip(
                    self._weights(bank, child) if down else child.arrivals, of_replica(child.replica), strict=True
                )
            ]
            due_K = np.flatnonzero((later_RK[ep_rank] == number) & (home_RK[ep_rank] != EMPTY)).tolist()
            with_parents = [Row(int(above_RK[ep_rank, k]), row, row) for k in due_K for row in of_replica(k)]
            both = (with_children, with_parents) if down else (with_parents, with_children)
            return self.transport.stage(layer, down, number, *both)

        numbers = range(1 + int(hangs_RK.any()))
        hanging, at_homes = ([child for child in children if (child.on != EMPTY) == hangs] for hangs in (1, 0))
        arrived = [(bank.gradient_rows(child.on), child.arrivals) for child in hanging]
        additions = [pair for rows in arrived for pair in zip(*rows, strict=True)]
        weights, gradients = ([stage_of(down, number) for number in numbers] for down in (True, False))
        return ReplicaPlan(weights, gradients, additions, at_homes)

    def _weights(self, bank: ReplicaBank, child: Child) -> list[Tensor]:
        """Return the weights that a child gets from this rank, one row per tensor: live memory."""
        if child.on != EMPTY:
            return bank.replica_rows(child.on)
        rows = [
            slice_of_row(local(parameter).detach(), self.num_shards, child.shard)[child.home_row]
            for parameter in bank.parameters
        ]
        if odd := [list(row.shape) for row in rows if not row.is_contiguous()]:  # a copy would grow stale
            raise ValueError(
                f"experts of shape {odd[0]} do not lie in one piece, and their copies are read from there: make the "
                "weights contiguous() before fully_shard and attach"
            )
        return rows
