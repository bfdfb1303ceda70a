"""What a real job shows of itself is what it did, reckoned by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.events import EventLog, LoadMeasured, RebalanceCommitted
from eplb_runtime.observe.event_log import read_events
from eplb_runtime.observe.records import Record

EXPERTS, RANKS, STEPS, INTERVAL = 8, 2, 12, 3


def train(rank: int, run: str) -> dict[str, object]:
    """A job on changing batches, and what it did, looked at from inside."""
    model = make_model("olmoe", experts=EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = eplb.BalancerConfig(interval=INTERVAL, gate="always", dense_gradients="allreduce", run=run)
    balancer = eplb.attach(model, optimizer, config=config)
    model.train()
    chosen, placements = [], []
    for step in range(STEPS):
        ids = batch_of(rank, step // 4)
        model(input_ids=ids, labels=ids).loss.backward()
        chosen.append(balancer._counted.clone().numpy())
        placements.append(balancer.placement)
        optimizer.step()
        optimizer.zero_grad()
    balancer.close()
    return {
        "events": [event.to_dict() for event in balancer.events],
        "committed": balancer.events.of_type(RebalanceCommitted),
        "arrays": held(balancer.events),
        "chosen": np.stack(chosen),
        "homes": np.stack([placement.home_rank for placement in placements]),
        "last": balancer.placement.physical_to_logical,
    }


def held(events: EventLog) -> int:
    return sum(event.load is not None for event in events.of_type(LoadMeasured))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict]:
    return run_ranks(RANKS, train, str(folder))


@pytest.fixture(scope="module")
def told(results: list[dict], folder: Path) -> list[Record]:
    return read_events(folder)


def of(told: list[Record], name: str) -> list[Record]:
    return [record for record in told if record["event"] == name]


def test_rank_0_writes_down_what_happened(results: list[dict], told: list[Record]) -> None:
    assert [record["event"] for record in told[1:]] == [event["event"] for event in results[0]["events"]]
    assert told[0]["event"] == "JobAttached" and told[0]["ranks"] == told[0]["world_size"] == RANKS
    assert told[-1]["event"] == "BalancingEnded"
    for record, event in zip(told[1:], results[0]["events"], strict=True):
        assert record["step"] == event["step"]
    assert results[0]["arrays"] == 0


def test_the_load_of_each_rank_is_what_routers_chose(results: list[dict], told: list[Record]) -> None:
    """Without copies a token is computed at its expert's home."""
    chosen = results[0]["chosen"] + results[1]["chosen"]
    homes = results[0]["homes"]
    measured = of(told, "LoadMeasured")
    assert len(measured) >= 3
    for record in measured:
        steps = range(record["step"] - record["steps"] - 1, record["step"] - 1)  # one step of lag
        by_rank = np.array([[[chosen[s, layer, homes[s, layer] == r].sum() for r in range(RANKS)]
                             for layer in range(chosen.shape[1])] for s in steps])  # fmt: skip
        assert np.array_equal(record["load"][0], chosen[list(steps)].sum(axis=0))
        assert np.array_equal(record["rank_load"][0], by_rank.sum(axis=0))
        assert np.allclose(record["imbalance"], by_rank.max(axis=2) / by_rank.mean(axis=2), atol=1e-6)
        static = chosen[list(steps)].reshape(len(steps), -1, RANKS, EXPERTS // RANKS).sum(axis=3)
        assert np.array_equal(record["rank_load"][1], static.sum(axis=0))
        assert np.allclose(record["imbalance_start"], static.max(axis=2) / static.mean(axis=2), atol=1e-6)
        assert record["step_seconds"] > 0


def test_transfers_are_what_ranks_received(results: list[dict], told: list[Record]) -> None:
    committed = of(told, "RebalanceCommitted")
    assert committed
    for number, record in enumerate(committed):
        layer, _, source, destination = record["transfers"][0].T
        away = source != destination
        nbytes = sum(record["expert_bytes"][one] for one in layer[away])
        assert nbytes == sum(result["committed"][number].received_bytes for result in results)
        assert away.sum() == record["moved_experts"] > 0
        assert sum(record["phase_seconds"].values()) <= record["pause_seconds"] + 1e-3
    assert np.array_equal(committed[-1]["placement"][0], results[0]["last"])
