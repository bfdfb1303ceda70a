"""The trees along which weights go to copies and gradients come home: who hangs on whom, and who exchanges what."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from eplb_runtime.placement import EMPTY, HomeRows
from eplb_runtime.replicas import broadcast_plan, point_to_point, tree
from eplb_runtime.replicas.point_to_point import PointToPoint
from eplb_runtime.replicas.tree import NODES_EACH, RANKS_EACH, tree_of

HOMES = 2


def some_copies(rng: np.random.Generator, ranks: int, replicas: int, hot: int) -> np.ndarray:
    """Home slots of what stands in replica slots: few experts have all copies, none on the rank of its home."""
    slots = HOMES + replicas
    homes = rng.permutation([rank * slots + local for rank in range(ranks) for local in range(HOMES)])[:hot]
    home_RK = np.full((ranks, replicas), EMPTY)
    for rank in range(ranks):
        there = [home for home in rng.permutation(homes) if home // slots != rank and rng.random() < 0.8]
        home_RK[rank, : len(there[:replicas])] = there[:replicas]
    return home_RK


def test_on_one_node_copies_hang_on_the_home_and_on_another_on_the_first_of_them() -> None:
    """Nodes of two ranks, three slots a rank: the home of the expert is on rank 0, copies are on all others."""
    home_RK = np.array([[EMPTY], [0], [0], [0], [EMPTY], [0]])
    found = tree_of(home_RK, 3, 2)
    assert found.parent_RK.tolist() == [[EMPTY], [0], [0], [2], [EMPTY], [0]]
    assert found.parent_replica_RK.tolist() == [[EMPTY], [EMPTY], [EMPTY], [0], [EMPTY], [EMPTY]]
    assert found.depth_RK.tolist() == [[EMPTY], [0], [0], [1], [EMPTY], [0]]
    assert found.height_RK.tolist() == [[EMPTY], [0], [1], [0], [EMPTY], [0]]
    assert tree_of(home_RK, 3, 6).parent_RK.tolist() == [[EMPTY], [0], [0], [0], [EMPTY], [0]]


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.booleans()
)
def test_a_tree_enters_each_node_once_and_nobody_has_many_below(
    seed: int, nodes: int, per_node: int, replicas: int, each: int, ragged: bool
) -> None:
    rng, slots = np.random.default_rng(seed), HOMES + replicas
    ranks = nodes * per_node - (ragged and nodes > 1 and per_node > 1)
    home_RK = some_copies(rng, ranks, replicas, hot=int(rng.integers(1, 5)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "NODES_EACH", each)
        patch.setattr(tree, "RANKS_EACH", each + 1)
        found = tree_of(home_RK, slots, per_node)
    crossings, below = set(), Counter()
    for rank, replica in np.argwhere(home_RK != EMPTY).tolist():
        home, parent, on = (
            home_RK[rank, replica],
            found.parent_RK[rank, replica],
            found.parent_replica_RK[rank, replica],
        )
        if on == EMPTY:
            assert parent == home // slots and found.depth_RK[rank, replica] == 0
        else:
            assert home_RK[parent, on] == home
            assert found.depth_RK[rank, replica] == found.depth_RK[parent, on] + 1
        leaves = (home_RK == home) & (found.parent_RK == rank) & (found.parent_replica_RK == replica)
        assert found.height_RK[rank, replica] == found.height_RK[leaves].max(initial=-1) + 1
        far = parent // per_node != rank // per_node
        below[home, parent, far] += 1
        assert below[home, parent, far] <= (each if far else each + 1)
        if far:
            assert (home, rank // per_node) not in crossings
            crossings.add((home, rank // per_node))
    for array_RK in (found.parent_RK, found.parent_replica_RK, found.depth_RK, found.height_RK):
        assert (array_RK[home_RK == EMPTY] == EMPTY).all()


def test_a_hot_home_sends_to_few_others_however_many_copies_it_has() -> None:
    """1,024 ranks in nodes of eight; one expert has a copy on each other rank, and each rank has a second slot with the
    expert of its neighbour. Messages that leave a node and such that stay, of the busiest rank: weights one way,
    gradients the other."""
    ranks, per_node, slots = 1024, 8, 4
    home_RK = np.stack([np.zeros(ranks, int), (np.arange(ranks) + 9) % ranks * slots + 1], axis=1)
    home_RK[0, 0] = EMPTY
    found = tree_of(home_RK, slots, per_node)
    rank_N, replica_N = np.nonzero(home_RK != EMPTY)
    parent_N = found.parent_RK[rank_N, replica_N]
    far_N = parent_N // per_node != rank_N // per_node
    busiest = [int(np.bincount(parent_N[of]).max()) for of in (far_N, ~far_N)]
    assert busiest[0] <= NODES_EACH + 1 and busiest[1] <= RANKS_EACH
    assert np.bincount(home_RK[rank_N, replica_N] // slots).max() == 1024, "from the home alone"
    assert found.stages <= 6


class Bank:
    """One tensor of three numbers a row. Weights are their home slots; gradients are one number for each rank."""

    def __init__(self, rank: int, replicas: int) -> None:
        slots = HOMES + replicas
        self.parameters = [
            torch.arange(rank * slots, rank * slots + HOMES).double().repeat_interleave(3).view(HOMES, 3)
        ]
        self._copies = torch.full((replicas, 3), -1.0, dtype=torch.float64)
        self._gradients = torch.full((replicas, 3), 1 + rank, dtype=torch.float64)

    def trained(self) -> list[torch.Tensor]:
        return self.parameters

    def replica_rows(self, replica: int) -> list[torch.Tensor]:
        return [self._copies[replica]]

    def gradient_rows(self, replica: int) -> list[torch.Tensor]:
        return [self._gradients[replica]]


def carry(stage_of_rank: list[list[Any]]) -> int:
    """What all ranks post together: every message has its other end in the same stage. How many."""
    sent = {(rank, m.peer, m.tag): m.data for rank, ms in enumerate(stage_of_rank) for m in ms if m.op is dist.isend}
    got = {(m.peer, rank, m.tag): m.data for rank, ms in enumerate(stage_of_rank) for m in ms if m.op is dist.irecv}
    assert set(sent) == set(got) and len(sent) + len(got) == sum(map(len, stage_of_rank))
    for key, data in sent.items():
        got[key].copy_(data)
    return len(sent)


@pytest.mark.parametrize("each", [1, 2, 8])
@pytest.mark.parametrize("seed", range(6))
def test_weights_reach_all_copies_and_all_gradients_come_home_once(
    monkeypatch: pytest.MonkeyPatch, seed: int, each: int
) -> None:
    monkeypatch.setattr(tree, "NODES_EACH", each)
    monkeypatch.setattr(tree, "RANKS_EACH", each)
    ranks, per_node, replicas = 12, 3, 2
    slots = HOMES + replicas
    home_RK = some_copies(np.random.default_rng(seed), ranks, replicas, hot=3)
    record = SimpleNamespace(
        isend=dist.isend,
        irecv=dist.irecv,
        P2POp=lambda op, data, peer, group, tag: SimpleNamespace(op=op, data=data, peer=peer, tag=tag),
    )
    monkeypatch.setattr(point_to_point, "dist", record)
    banks = [Bank(rank, replicas) for rank in range(ranks)]
    linked = [
        broadcast_plan.BroadcastPlanner(
            PointToPoint(None, range(ranks)), rank, 1, per_node, lambda *_: torch.zeros(3, dtype=torch.float64)
        ).plan(5, bank, home_RK, HomeRows(slots, HOMES))
        for rank, bank in enumerate(banks)
    ]
    copies = np.argwhere(home_RK != EMPTY).tolist()
    stages = [len(of_rank.weights) for of_rank in linked]
    sent = [carry([of_rank.weights[stage].operations for of_rank in linked]) for stage in range(max(stages))]
    assert sum(sent) == len(copies)
    for rank, replica in copies:
        assert set(banks[rank].replica_rows(replica)[0].tolist()) == {float(home_RK[rank, replica])}
    for stage in range(max(stages)):
        carry([of_rank.gradients[stage].rows.operations for of_rank in linked])
        for of_rank in linked:
            of_rank.gradients[stage].add()
    sums = Counter()
    for rank, of_rank in enumerate(linked):
        for copy, (row,) in zip(of_rank.home_children, of_rank.arrivals, strict=True):
            sums[rank * slots + copy.home_row] += row[0].item()
    expected = Counter()
    for rank, replica in copies:
        expected[int(home_RK[rank, replica])] += 1.0 + rank
    assert sums == expected
    assert (max(stages) > 1) == (each < 8 or per_node > 1)


class DividedBank(Bank):
    """One of two ranks that have an EP rank's homes: one of these, of four numbers that tell slot and column, and of
    every copy two of the four."""

    def __init__(self, rank: int, replicas: int) -> None:
        super().__init__(rank // 2, replicas)
        slot = rank // 2 * (HOMES + replicas) + rank % 2
        self.parameters = [10.0 * slot + torch.arange(4).double().unsqueeze(0)]
        self._copies = torch.full((replicas, 2), -1.0, dtype=torch.float64)
        self._gradients = torch.full((replicas, 2), 1 + rank // 2, dtype=torch.float64)


@pytest.mark.parametrize("each", [1, 8])
@pytest.mark.parametrize("seed", range(4))
def test_slices_of_homes_that_are_divided_over_two_ranks_reach_the_two_of_each_copy(
    monkeypatch: pytest.MonkeyPatch, seed: int, each: int
) -> None:
    monkeypatch.setattr(tree, "NODES_EACH", each)
    monkeypatch.setattr(tree, "RANKS_EACH", each)
    ep_ranks, per_node, replicas = 12, 3, 2
    rows = HomeRows(HOMES + replicas, HOMES, parts=2)
    home_RK = some_copies(np.random.default_rng(seed), ep_ranks, replicas, hot=3)
    record = SimpleNamespace(
        isend=dist.isend,
        irecv=dist.irecv,
        P2POp=lambda op, data, peer, group, tag: SimpleNamespace(op=op, data=data, peer=peer, tag=tag),
    )
    monkeypatch.setattr(point_to_point, "dist", record)
    ranks = range(2 * ep_ranks)
    banks = [DividedBank(rank, replicas) for rank in ranks]
    linked = [
        broadcast_plan.BroadcastPlanner(
            PointToPoint(None, ranks), rank, 2, per_node, lambda *_: torch.zeros(2, dtype=torch.float64)
        ).plan(5, bank, home_RK, rows)
        for rank, bank in enumerate(banks)
    ]
    stages = max(len(of_rank.weights) for of_rank in linked)
    for stage in range(stages):
        carry([of_rank.weights[stage].operations for of_rank in linked])
    expected: Counter[tuple[int, int]] = Counter()
    for ep_rank, replica in np.argwhere(home_RK != EMPTY).tolist():
        home = int(home_RK[ep_rank, replica])
        for part in range(2):
            copy = banks[2 * ep_rank + part].replica_rows(replica)[0].tolist()
            assert copy == [10.0 * home + 2 * part, 10.0 * home + 2 * part + 1]
            expected[home, part] += 1.0 + ep_rank
    for stage in range(stages):
        carry([of_rank.gradients[stage].rows.operations for of_rank in linked])
        for of_rank in linked:
            of_rank.gradients[stage].add()
    sums: Counter[tuple[int, int]] = Counter()
    for rank, of_rank in enumerate(linked):
        for copy, (row,) in zip(of_rank.home_children, of_rank.arrivals, strict=True):
            sums[rows.slot_at(rank * rows.rows + copy.home_row), copy.shard] += row[0].item()
    assert sums == expected and stages > 1
