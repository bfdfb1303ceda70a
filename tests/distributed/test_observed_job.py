"""What a real job shows of itself is what it did, reckoned by hand."""

import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch.distributed as dist
from support.job import Job, Run
from support.moe_models import batch_of
from support.ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.events import LoadMeasured, RebalanceCommitted
from eplb_runtime.load.series import read_series
from eplb_runtime.observe.events_file import Record, read_events
from eplb_runtime.observe.metrics import summary_of
from eplb_runtime.observe.run_state import state_of_run
from eplb_runtime.observe.start import Observers
from eplb_runtime.placement import EMPTY

EXPERTS, RANKS, STEPS, INTERVAL = 8, 2, 12, 3


def observed(rank: int, run: str, replica_slots: int = 0) -> dict[str, Any]:
    """A job on changing batches, and what it did, looked at from inside."""
    settings = {"interval": INTERVAL, "lag": 1, "run": run, "listen": 0, "replica_slots": replica_slots}
    job = Run(
        rank, Job(planner=eplb.plan, settings=settings, batches=lambda rank, step: batch_of(rank, step // 4))
    ).attach()
    balancer, chosen, placements = job.balancer, [], []
    shown = balancer.shown
    for _ in range(STEPS):
        job.backward(job.forward())
        chosen.append(balancer.runtime.counter.counts.clone().numpy())
        placements.append(balancer.placement)
        job.update()
    placements.append(balancer.placement)
    seen = None if shown is None else looked_at(shown)
    table = str(balancer)
    dist.barrier()
    balancer.close()
    return {
        "seen": seen,
        "table": table,
        "events": [event.to_dict() for event in balancer.events],
        "committed": balancer.events.of_type(RebalanceCommitted),
        "arrays": sum(event.load is not None for event in balancer.events.of_type(LoadMeasured)),
        "chosen": np.stack(chosen),
        "homes": np.stack([placement.home_rank for placement in placements]),
        "replicas": [placement.replicas_LRK for placement in placements],
        "last": balancer.placement.physical_to_logical,
    }


def looked_at(shown: Observers) -> dict[str, object]:
    """What rank 0's server gives when all has been heard."""
    shown._events._threads[0].submit(lambda: None).result(60)
    with urlopen(f"{shown.server.url}state", timeout=60) as answer:
        state = json.load(answer)
    samples = {f"{m.name} {' '.join(labels.values())}".strip(): x for m in shown.metrics() for labels, x in m.samples}
    return {"state": state, "samples": samples}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict]:
    return run_ranks(RANKS, observed, str(folder))


@pytest.fixture(scope="module")
def told(results: list[dict], folder: Path) -> list[Record]:
    return read_events(folder)


def of(told: list[Record], name: str) -> list[Record]:
    return [record for record in told if record["event"] == name]


def steps_of(record: Record) -> list[int]:
    """Steps that a measurement is of: one step of lag."""
    return list(range(record["step"] - record["steps"] - 1, record["step"] - 1))


def chosen_in(results: list[dict], steps: list[int]) -> np.ndarray:
    """What routers of both ranks chose, ``[steps, L, E]``."""
    return (results[0]["chosen"] + results[1]["chosen"])[steps]


def at_start(chosen: np.ndarray) -> np.ndarray:
    """Load of each rank by the placement at the start, ``[steps, L, R]``."""
    return chosen.reshape(len(chosen), -1, RANKS, EXPERTS // RANKS).sum(axis=3)


def imbalance(load: np.ndarray) -> np.ndarray:
    return load.max(axis=2) / load.mean(axis=2)


def test_rank_0_writes_down_what_happened(results: list[dict], told: list[Record], folder: Path) -> None:
    assert told[0]["event"] == "JobAttached" and told[0]["ranks"] == told[0]["world_size"] == RANKS
    assert told[-1]["event"] == "BalancingEnded" and results[0]["arrays"] == 0
    own = [(event["event"], event["step"]) for event in results[0]["events"]]
    assert [(record["event"], record["step"]) for record in told[1:]] == own
    job = read_series(folder)[2]
    assert job.optimizer_bytes == 2 * job.expert_bytes > 0, "AdamW keeps two numbers for each weight"


def test_the_load_of_each_rank_is_what_routers_chose(results: list[dict], told: list[Record]) -> None:
    """Without copies a token is computed at its expert's home."""
    homes, measured = results[0]["homes"], of(told, "LoadMeasured")
    assert len(measured) >= 3
    for record in measured:
        steps = steps_of(record)
        chosen = chosen_in(results, steps)
        by_rank = np.stack([(chosen * (homes[steps] == rank)).sum(axis=2) for rank in range(RANKS)], axis=2)
        assert np.array_equal(record["load"][0], chosen.sum(axis=0))
        for number, (load, name) in enumerate([(by_rank, "imbalance"), (at_start(chosen), "imbalance_start")]):
            assert np.array_equal(record["rank_load"][number], load.sum(axis=0))
            assert np.allclose(record[name], imbalance(load), atol=1e-6)
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
    seen, committed = results[0]["seen"], results[0]["committed"]
    samples, view = seen["samples"], seen["state"]["view"]
    assert samples["eplb_steps"] == seen["state"]["progress"]["step"] == STEPS
    assert samples["eplb_rebalances"] == view["totals"]["rebalances"] == len(committed) > 0
    assert samples["eplb_placement_epoch"] == view["epoch"] == committed[-1].epoch
    assert samples["eplb_placement_age_steps"] == STEPS - committed[-1].step
    received = sum(event.received_bytes for result in results for event in result["committed"])
    assert samples["eplb_moved_bytes inside a node"] == view["totals"]["moved_bytes"]["inside a node"] == received
    assert samples["eplb_moved_experts inside a node"] == sum(event.moved_experts for event in committed)
    assert samples["eplb_pause_seconds"] == pytest.approx(sum(event.pause_seconds for event in committed))
    steps = steps_of(of(told, "LoadMeasured")[-1])
    chosen = chosen_in(results, steps)
    of_ranks = sum(samples[f"eplb_rank_tokens_per_step {rank}"] for rank in range(RANKS))
    assert of_ranks == pytest.approx(chosen.sum() / len(steps))
    static = imbalance(at_start(chosen)).mean(axis=0)
    assert samples["eplb_imbalance start mean"] == pytest.approx(static.mean(), abs=1e-5)
    assert samples["eplb_imbalance start max"] == pytest.approx(static.max(), abs=1e-5)


def test_replicas_that_rebalances_placed_are_counted_in_each_view(tmp_path: Path) -> None:
    for result in run_ranks(RANKS, observed, str(tmp_path), 1):
        pairs = zip(result["replicas"], result["replicas"][1:], strict=False)
        placed = [int(((now != before) & (now != EMPTY)).sum()) for before, now in pairs if (now != before).any()]
        assert placed and [event.placed_replicas for event in result["committed"]] == placed
        line = result["committed"][0].brief()
        assert f"{placed[0]} replica" in line and "placed" in line
        assert f"{sum(placed)} replicas placed" in result["table"]
    assert summary_of(state_of_run(tmp_path))["placed_replicas"] == sum(placed)
