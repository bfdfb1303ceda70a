"""The trees along which weights go to copies and gradients come home: who hangs on whom, and who exchanges what."""

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
from eplb_runtime.replicas import plan as planning
from eplb_runtime.replicas.plan import PointToPoint, ReplicaPlan, ReplicaPlanner, tree_of

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
    parent_RK, on_RK = tree_of(home_RK, 3, 2)
    assert parent_RK.tolist() == [[EMPTY], [0], [0], [2], [EMPTY], [0]]
    assert on_RK.tolist() == [[EMPTY], [EMPTY], [EMPTY], [0], [EMPTY], [EMPTY]]
    assert tree_of(home_RK, 3, 6)[0].tolist() == [[EMPTY], [0], [0], [0], [EMPTY], [0]]


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_a_tree_enters_each_node_once(seed: int, nodes: int, per_node: int, replicas: int, ragged: bool) -> None:
    rng, slots = np.random.default_rng(seed), HOMES + replicas
    ranks = nodes * per_node - (ragged and nodes > 1 and per_node > 1)
    home_RK = some_copies(rng, ranks, replicas, hot=int(rng.integers(1, 5)))
    parent_RK, on_RK = tree_of(home_RK, slots, per_node)
    crossings = set()
    for rank, replica in np.argwhere(home_RK != EMPTY).tolist():
        home, parent, on = home_RK[rank, replica], parent_RK[rank, replica], on_RK[rank, replica]
        if on == EMPTY:
            assert parent == home // slots
        else:
            assert home_RK[parent, on] == home and on_RK[parent, on] == EMPTY, "two levels"
            assert parent // per_node == rank // per_node != home // slots // per_node
        if parent // per_node != rank // per_node:
            assert (home, rank // per_node) not in crossings
            crossings.add((home, rank // per_node))
    for array_RK in (parent_RK, on_RK):
        assert (array_RK[home_RK == EMPTY] == EMPTY).all()


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


def planned(patch: pytest.MonkeyPatch, banks: list[Any], home_RK: np.ndarray, per_node: int) -> list[ReplicaPlan]:
    """Plans of all ranks, with messages that are looked at and not sent."""
    record = SimpleNamespace(
        isend=dist.isend,
        irecv=dist.irecv,
        P2POp=lambda op, data, peer, group, tag: SimpleNamespace(op=op, data=data, peer=peer, tag=tag),
    )
    patch.setattr(planning, "dist", record)
    parts, transport = len(banks) // len(home_RK), PointToPoint(None, range(len(banks)))  # type: ignore[arg-type]
    rows = HomeRows(HOMES + home_RK.shape[1], HOMES, parts)
    return [
        ReplicaPlanner(
            transport, rank, parts, per_node, lambda index, at, p, bank=bank: torch.zeros_like(bank.gradient_rows(0)[0])
        ).plan(5, bank, home_RK, rows)
        for rank, bank in enumerate(banks)
    ]


def carry_all(plans: list[ReplicaPlan]) -> int:
    """Weights to all replicas, and all gradients home; how many rows of weights."""
    stages = range(len(plans[0].weights))
    sent = sum(carry([plan.weights[stage].operations for plan in plans]) for stage in stages)  # type: ignore[attr-defined]
    for stage in stages:
        carry([plan.gradients[stage].operations for plan in plans])
        for plan in plans:
            for into, arrived in () if stage else plan.additions:
                into.add_(arrived)
    return sent


@pytest.mark.parametrize("per_node", [1, 3, 12])
@pytest.mark.parametrize("seed", range(6))
def test_weights_reach_all_copies_and_all_gradients_come_home_once(
    monkeypatch: pytest.MonkeyPatch, seed: int, per_node: int
) -> None:
    ranks, replicas = 12, 2
    home_RK = some_copies(np.random.default_rng(seed), ranks, replicas, hot=3)
    banks = [Bank(rank, replicas) for rank in range(ranks)]
    plans = planned(monkeypatch, banks, home_RK, per_node)
    copies = np.argwhere(home_RK != EMPTY).tolist()
    assert carry_all(plans) == len(copies)
    expected: Counter[int] = Counter()
    for rank, replica in copies:
        assert set(banks[rank].replica_rows(replica)[0].tolist()) == {float(home_RK[rank, replica])}
        expected[int(home_RK[rank, replica])] += 1.0 + rank
    sums: Counter[int] = Counter()
    for rank, plan in enumerate(plans):
        for child in plan.at_homes:
            sums[rank * (HOMES + replicas) + child.home_row] += child.arrivals[0][0].item()
    assert sums == expected
    assert len(plans[0].weights) == (2 if per_node == 3 else 1)


class DividedBank(Bank):
    """One of two ranks that have an EP rank's homes: one of these, of four numbers that tell slot and column, and of
    every copy two of the four."""

    def __init__(self, rank: int, replicas: int) -> None:
        super().__init__(rank // 2, replicas)
        slot = rank // 2 * (HOMES + replicas) + rank % 2
        self.parameters = [10.0 * slot + torch.arange(4).double().unsqueeze(0)]
        self._copies = torch.full((replicas, 2), -1.0, dtype=torch.float64)
        self._gradients = torch.full((replicas, 2), 1 + rank // 2, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(4))
def test_slices_of_homes_that_are_divided_over_two_ranks_reach_the_two_of_each_copy(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    ep_ranks, replicas = 12, 2
    rows = HomeRows(HOMES + replicas, HOMES, parts=2)
    home_RK = some_copies(np.random.default_rng(seed), ep_ranks, replicas, hot=3)
    banks = [DividedBank(rank, replicas) for rank in range(2 * ep_ranks)]
    plans = planned(monkeypatch, banks, home_RK, per_node=3)
    carry_all(plans)
    expected: Counter[tuple[int, int]] = Counter()
    for ep_rank, replica in np.argwhere(home_RK != EMPTY).tolist():
        home = int(home_RK[ep_rank, replica])
        for part in range(2):
            copy = banks[2 * ep_rank + part].replica_rows(replica)[0].tolist()
            assert copy == [10.0 * home + 2 * part, 10.0 * home + 2 * part + 1]
            expected[home, part] += 1.0 + ep_rank
    sums: Counter[tuple[int, int]] = Counter()
    for rank, plan in enumerate(plans):
        for child in plan.at_homes:
            sums[rows.slot_at(rank * rows.rows + child.home_row), child.shard] += child.arrivals[0][0].item()
    assert sums == expected and len(plans[0].weights) == 2


def test_weights_of_all_layers_are_posted_as_one_group_of_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport without groups gives what to wait for message by message, one with them for all."""
    banks = [Bank(rank, 1) for rank in range(2)]
    plans = planned(monkeypatch, banks, np.array([[3], [0]]), 2)
    groups: list[list[Any]] = []
    monkeypatch.setattr(planning.dist, "batch_isend_irecv", lambda ops: groups.append(ops) or ops, raising=False)
    transport, stages = PointToPoint(None, range(2)), [plan.weights[0] for plan in plans]  # type: ignore[arg-type]
    works = transport.post(stages)
    assert len(groups) == 1 and works == [stage.operations for stage in stages]
    monkeypatch.setattr(planning.dist, "batch_isend_irecv", lambda ops: ["all"])
    assert transport.post(stages) == [["all"], ["all"]]
