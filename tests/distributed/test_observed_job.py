"""What a real job shows of itself is what it did, reckoned by hand."""

from __future__ import annotations

import json
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from scraping import prometheus_of, scraped
from support import training

from eplb_runtime.events import EventLog, LoadMeasured, RebalanceCommitted
from eplb_runtime.load.series import read_series
from eplb_runtime.observe.events_file import read_events
from eplb_runtime.observe.records import Record
from eplb_runtime.observe.run_folder import state_of_run
from eplb_runtime.observe.server import MOST_CONNECTIONS
from eplb_runtime.observe.start import Shown
from eplb_runtime.observe.summary import summary_of
from eplb_runtime.placement import EMPTY

EXPERTS, RANKS, STEPS, INTERVAL = 8, 2, 12, 3


def train(rank: int, run: str) -> dict[str, object]:
    """A job on changing batches, and what it did, looked at from inside; browsers hang on its page meanwhile."""
    model = make_model("olmoe", experts=EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    balancer = training.attach(model, optimizer, interval=INTERVAL, gate="always", run=run, listen=0)
    model.train()
    hanging = [] if balancer.shown is None else browsers_that_hang(balancer.shown)
    chosen, placements = [], []
    for step in range(STEPS):
        ids = batch_of(rank, step // 4)
        model(input_ids=ids, labels=ids).loss.backward()
        chosen.append(balancer.runtime.counter.counts.clone().numpy())
        placements.append(balancer.placement)
        optimizer.step()
        optimizer.zero_grad()
    shown = balancer.shown
    seen = None if shown is None else looked_at(shown)
    dist.barrier()
    balancer.close()
    for browser in hanging:
        browser.close()
    return {
        "seen": seen,
        "events": [event.to_dict() for event in balancer.events],
        "committed": balancer.events.of_type(RebalanceCommitted),
        "arrays": held(balancer.events),
        "chosen": np.stack(chosen),
        "homes": np.stack([placement.home_rank for placement in placements]),
        "last": balancer.placement.physical_to_logical,
    }


def browsers_that_hang(shown: Shown) -> list[socket.socket]:
    """Half of the connections that the server has, each with half a request."""
    assert shown.server is not None
    made = [socket.create_connection(("127.0.0.1", shown.server.port)) for _ in range(MOST_CONNECTIONS // 2)]
    for browser in made:
        browser.sendall(b"GET /state HTTP/1.1\r\n")
    return made


def looked_at(shown: Shown) -> dict[str, object]:
    """What rank 0's server gives when all has been heard."""
    shown._worker.submit(lambda: None).result(60)
    with urlopen(f"{shown.server.url}state", timeout=60) as answer:
        state = json.load(answer)
    samples = {f"{m.name} {' '.join(labels.values())}".strip(): x for m in shown.metrics() for labels, x in m.samples}
    return {"state": state, "samples": samples, "scraped": seen_by_prometheus(shown)}


def seen_by_prometheus(shown: Shown) -> dict[str, float] | None:
    """None: there is no Prometheus here."""
    if shutil.which("prometheus") is None or find_spec("prometheus_client") is None:
        return None
    assert shown.server is not None
    found = {}
    with TemporaryDirectory() as folder, prometheus_of(shown.server.port, Path(folder)) as address:
        for metric in shown.metrics():
            told = scraped(address, metric.name + ("_total" if metric.kind == "counter" else ""))
            for labels, _ in metric.samples:
                value = told[tuple(sorted(labels.items()))]
                found[f"{metric.name} {' '.join(labels.values())}".strip()] = value
    return found


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


def test_metrics_and_page_of_a_running_job_are_what_it_did(results: list[dict], told: list[Record]) -> None:
    """Reckoned from what ranks saw themselves, not from the log."""
    assert results[1]["seen"] is None  # rank 0 alone shows the job
    seen = results[0]["seen"]
    samples, view = seen["samples"], seen["state"]["view"]
    committed = results[0]["committed"]
    assert samples["eplb_steps"] == seen["state"]["progress"]["step"] == STEPS
    assert samples["eplb_rebalances"] == view["totals"]["rebalances"] == len(committed) > 0
    assert samples["eplb_placement_epoch"] == view["epoch"] == committed[-1].epoch
    assert samples["eplb_placement_age_steps"] == STEPS - committed[-1].step
    received = sum(event.received_bytes for result in results for event in result["committed"])
    assert samples["eplb_moved_bytes inside a node"] == view["totals"]["moved_bytes"]["inside a node"] == received
    assert samples["eplb_moved_experts inside a node"] == sum(event.moved_experts for event in committed)
    assert samples["eplb_pause_seconds"] == pytest.approx(sum(event.pause_seconds for event in committed))
    last = of(told, "LoadMeasured")[-1]
    steps = list(range(last["step"] - last["steps"] - 1, last["step"] - 1))
    chosen = (results[0]["chosen"] + results[1]["chosen"])[steps]
    assert samples["eplb_rank_tokens_per_step 0"] + samples["eplb_rank_tokens_per_step 1"] == pytest.approx(
        chosen.sum() / len(steps)
    )
    static = chosen.reshape(len(steps), -1, RANKS, EXPERTS // RANKS).sum(axis=3)
    at_start = (static.max(axis=2) / static.mean(axis=2)).mean(axis=0)
    assert samples["eplb_imbalance start mean"] == pytest.approx(at_start.mean(), abs=1e-5)
    assert samples["eplb_imbalance start max"] == pytest.approx(at_start.max(), abs=1e-5)


def test_a_real_prometheus_scrapes_a_running_job(results: list[dict]) -> None:
    scraped, samples = results[0]["seen"]["scraped"], results[0]["seen"]["samples"]
    if scraped is None:
        pytest.skip("prometheus is not installed (Debian's package), or prometheus_client")
    moving = {name for name in samples if "timestamp" in name}
    assert {name: scraped[name] for name in scraped.keys() - moving} == pytest.approx(
        {name: samples[name] for name in samples.keys() - moving}
    )
    assert scraped["eplb_steps"] == STEPS and scraped["eplb_rebalances"] > 0


def test_a_run_records_what_the_optimizer_keeps_for_an_expert(results: list[dict], folder: Path) -> None:
    job = read_series(folder)[2]
    assert job.optimizer_bytes == 2 * job.expert_bytes > 0, "AdamW keeps two numbers for each weight"


# -- What a job says of the replicas that its rebalances placed is what its placements say


def train_with_replicas(rank: int, run: str) -> dict[str, object]:
    """The placement after each step, and what was said of each rebalance."""
    model = make_model("olmoe", experts=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    balancer = training.attach(model, optimizer, interval=3, gate="always", replica_slots=1, run=run)
    model.train()
    replicas = [balancer.placement.replicas_LRK]
    for step in range(10):
        training.step(model, optimizer, batch_of(rank, step))
        replicas.append(balancer.placement.replicas_LRK)
    table, committed = str(balancer), balancer.events.of_type(RebalanceCommitted)
    balancer.close()
    return {"replicas": replicas, "told": [event.placed_replicas for event in committed], "table": table} | {
        "lines": [event.brief() for event in committed]
    }


def test_replicas_that_rebalances_placed_are_counted_in_each_view(tmp_path: Path) -> None:
    for result in run_ranks(2, train_with_replicas, str(tmp_path / "run")):
        pairs = zip(result["replicas"], result["replicas"][1:], strict=False)
        placed = [int(((now != before) & (now != EMPTY)).sum()) for before, now in pairs if (now != before).any()]
        assert placed and result["told"] == placed
        assert f"{placed[0]} replica" in result["lines"][0] and "placed" in result["lines"][0]
        assert f"{sum(placed)} replicas placed" in result["table"]
    summary = summary_of(state_of_run(tmp_path / "run"))
    assert summary["placed_replicas"] == sum(placed)
