"""Weights of copies in dispatches of DeepEP: what all ranks send and get, run against each other in one process."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from test_tree import HOMES, Bank, some_copies
from torch import Tensor

from eplb_runtime.distributed.transports.deepep_rows import ROW_BYTES
from eplb_runtime.placement import EMPTY, HomeRows
from eplb_runtime.replicas import broadcast_plan, multicast
from eplb_runtime.replicas.broadcast_plan import BroadcastPlanner
from eplb_runtime.replicas.multicast import Multicast
from eplb_runtime.replicas.point_to_point import PointToPoint
from eplb_runtime.replicas.row_transport import TransferStage

RANKS, REPLICAS = 12, 2
SLOTS = HOMES + REPLICAS


class LargeBank(Bank):
    """Two tensors, the second of more than a row."""

    def __init__(self, rank: int, replicas: int) -> None:
        super().__init__(rank, replicas)
        wide = self.parameters[0][:, :1].expand(HOMES, 2 * ROW_BYTES // 8 + 5).contiguous()
        self.parameters.append(wide)
        self.wide_copies = torch.full((replicas, wide.shape[1]), -1.0, dtype=torch.float64)

    def replica_rows(self, replica: int) -> list[Tensor]:
        return [*super().replica_rows(replica), self.wide_copies[replica]]

    def gradient_rows(self, replica: int) -> list[Tensor]:
        return [*super().gradient_rows(replica), self.wide_copies[replica]]


class Wire:
    """Takes the place of `deepep_rows.call`: rows of all ranks are taken first, and given out in any order after."""

    def __init__(self) -> None:
        self.sent: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.giving = False
        self.lost = False
        self.most = 0

    def __call__(
        self, rank: int, config: Any, num_ranks: int, rows_NC: Tensor, to_NK: Tensor, numbers_NK: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        self.most = max(self.most, int((to_NK >= 0).sum(dim=1).max()))
        if not self.giving:
            self.sent[rank] = rows_NC.clone(), to_NK, numbers_NK
            raise StopIteration
        rows, numbers = [], []
        for rows_NC, to_NK, numbers_NK in self.sent.values():
            mine = (to_NK == rank).any(dim=1)
            rows.append(rows_NC[mine])
            numbers.append(numbers_NK[mine, 0])
        numbers_M, order_M = torch.cat(numbers).sort()
        assert len(numbers_M) == count
        if self.lost and count:
            numbers_M[0] = 0
        return numbers_M, torch.cat(rows)[order_M].view(torch.uint8).view(-1)


def carry(stages: list[TransferStage], wire: Wire) -> None:
    for calls in zip(*(stage.calls for stage in stages), strict=True):
        for wire.giving in (False, True):
            for stage, one in zip(stages, calls, strict=True):
                with contextlib.suppress(StopIteration):
                    one.run(stage.by)


def linked(
    monkeypatch: pytest.MonkeyPatch, home_RK: np.ndarray, inference: bool = False
) -> tuple[list[LargeBank], list[TransferStage], Wire]:
    wire, arrival = Wire(), torch.zeros(3, dtype=torch.float64)
    monkeypatch.setattr(multicast, "call", wire)
    banks = [LargeBank(rank, REPLICAS) for rank in range(RANKS)]
    stages = []
    for rank, bank in enumerate(banks):
        by_torch = PointToPoint(None, range(RANKS))  # type: ignore[arg-type]
        by = Multicast(rank, None, rank, RANKS, torch.device("cpu"), by_torch)
        linking = BroadcastPlanner(by, rank, 1, 3, lambda *_: arrival)
        with torch.inference_mode(inference):
            weights = linking.plan(0, bank, home_RK, HomeRows(SLOTS, HOMES)).weights
        assert len(weights) == (home_RK != EMPTY).any()
        stages += weights
    return banks, stages, wire


@pytest.fixture(autouse=True)
def no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    from eplb_runtime.replicas import point_to_point

    monkeypatch.setattr(point_to_point.dist, "P2POp", lambda *_, **__: None)


@pytest.mark.parametrize("rows", [1, 2, 1000])
@pytest.mark.parametrize("most", [1, 5, 32])
@pytest.mark.parametrize("seed", range(3))
def test_weights_reach_all_copies(monkeypatch: pytest.MonkeyPatch, seed: int, most: int, rows: int) -> None:
    monkeypatch.setattr(multicast, "MOST_RANKS", most)
    monkeypatch.setattr(multicast, "CALL_ROWS", rows)
    home_RK = some_copies(np.random.default_rng(seed), RANKS, REPLICAS, hot=2 + seed)
    home_RK[seed] = EMPTY
    banks, stages, wire = linked(monkeypatch, home_RK)
    carry(stages, wire)
    for rank, replica in np.ndindex(RANKS, REPLICAS):
        expected = -1.0 if home_RK[rank, replica] == EMPTY else float(home_RK[rank, replica])
        for row in banks[rank].replica_rows(replica):
            assert set(row.tolist()) == {expected}
    assert wire.most <= most
    assert most == 1 or wire.most > 1, "several ranks get the same row"


def test_copies_that_were_placed_in_inference_mode_are_written_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    home_RK = some_copies(np.random.default_rng(0), RANKS, REPLICAS, hot=2)
    banks, stages, wire = linked(monkeypatch, home_RK, inference=True)
    carry(stages, wire)
    for rank, replica in np.argwhere(home_RK != EMPTY):
        assert all(set(row.tolist()) == {home_RK[rank, replica]} for row in banks[rank].replica_rows(replica))


def test_a_row_that_did_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stages, wire = linked(monkeypatch, some_copies(np.random.default_rng(0), RANKS, REPLICAS, hot=2))
    wire.lost = True
    with pytest.raises(RuntimeError, match="rows of copies did not arrive as they were sent"):
        carry(stages, wire)


def test_a_layer_without_copies_calls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stages, _ = linked(monkeypatch, np.full((RANKS, REPLICAS), EMPTY))
    assert stages == []


def test_a_home_that_does_not_lie_in_one_piece_is_refused_and_not_copied() -> None:
    rows = torch.rand(2, 3, 4)
    assert broadcast_plan._live_row(rows, 1).data_ptr() == rows[1].data_ptr()
    with pytest.raises(ValueError, match=r"experts of shape \[4, 3\] do not lie in one piece"):
        broadcast_plan._live_row(rows.mT, 1)
