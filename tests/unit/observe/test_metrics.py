"""Each metric is what its name says, reckoned by hand from the events that a job emits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from observed import (
    CONFIG,
    EXPERT_BYTES,
    INTERVAL,
    LAYERS,
    PHASES,
    RANKS,
    STEP_SECONDS,
    TOPOLOGY,
    decisions,
    records,
    start,
)

from eplb_runtime.events import LoadMeasured, RebalanceCommitted, RebalancePlanned
from eplb_runtime.load.clock import Progress
from eplb_runtime.observe import metrics
from eplb_runtime.observe.metrics import metrics_of
from eplb_runtime.observe.records import Record
from eplb_runtime.observe.run_state import MOST_DECISIONS, MOST_POINTS, RunState, state_of
from eplb_runtime.planner.evaluate import predicted_imbalance

ROUNDS = 5
PROGRESS = Progress(step=31, step_seconds=0.5, idle_seconds=2.0)


def state(found: list[Record] | None = None) -> RunState:
    return state_of(records(ROUNDS) if found is None else found)


def values(of: RunState) -> dict[str, float]:
    """``name{label=value,...}`` and its value."""
    return {
        f"{metric.name}{sorted(labels.items())}": value
        for metric in metrics_of(of, PROGRESS, now=5000.0)
        for labels, value in metric.samples
    }


def value(found: Mapping[str, float], name: str, **labels: str) -> float:
    return found[f"eplb_{name}{sorted(labels.items())}"]


def test_each_metric_is_what_its_name_says() -> None:
    events = [event for heard in decisions(ROUNDS) for event in heard]
    measured = [event for event in events if isinstance(event, LoadMeasured)]
    planned = [event for event in events if isinstance(event, RebalancePlanned)]
    committed = [event for event in events if isinstance(event, RebalanceCommitted)]
    found, last = values(state()), measured[-1]
    close = {"abs": 1e-5}

    by_layer = np.mean(last.imbalance, axis=0)
    at_start = predicted_imbalance(last.load.astype(np.float64), start()).mean(axis=0)
    for kind, row in (("measured", by_layer), ("start", at_start), ("predicted", planned[-1].by_layer[1])):
        assert value(found, "imbalance", kind=kind, over="mean") == pytest.approx(row.mean(), **close)
        assert value(found, "imbalance", kind=kind, over="max") == pytest.approx(row.max(), **close)
        for layer in range(LAYERS):
            assert value(found, "layer_imbalance", kind=kind, layer=str(layer)) == pytest.approx(row[layer], **close)
    assert value(found, "imbalance", kind="bound", over="mean") == pytest.approx(planned[-1].imbalance_bound, **close)
    assert value(found, "avg_overload_factor") == pytest.approx(by_layer.mean(), **close)
    assert value(found, "max_overload_factor") == pytest.approx(by_layer.max(), **close)
    load_TLE = last.load.astype(np.float64)
    violation_L = (load_TLE.max(axis=2) / load_TLE.mean(axis=2) - 1).mean(axis=0)
    for layer in range(LAYERS):
        assert value(found, "layer_max_vio", layer=str(layer)) == pytest.approx(violation_L[layer], **close)
    assert value(found, "max_vio", over="mean") == pytest.approx(violation_L.mean(), **close)
    assert value(found, "max_vio", over="max") == pytest.approx(violation_L.max(), **close)
    assert value(found, "moe_share", source="assumed") == 0.5
    of_steps = 1 / np.array(last.imbalance)  # mean / max of each step; the reciprocal of the mean imbalance is another
    assert value(found, "balancedness", over="mean") == pytest.approx(of_steps.mean(), **close)
    assert value(found, "balancedness", over="min") == pytest.approx(of_steps.mean(axis=0).min(), **close)
    assert abs(of_steps.mean() - (1 / by_layer).mean()) > 2e-5
    tokens_R = np.array([value(found, "rank_tokens_per_step", rank=str(rank)) for rank in range(RANKS)])
    assert value(found, "max_cum_overload_factor") == pytest.approx(tokens_R.max() / tokens_R.mean(), **close)
    tokens = sum(value(found, "rank_tokens_per_step", rank=str(rank)) for rank in range(RANKS))
    assert tokens == pytest.approx(last.load.sum() / INTERVAL, rel=1e-3)

    assert value(found, "placement_epoch") == len(committed) == value(found, "rebalances") > 1
    assert value(found, "placement_age_steps") == PROGRESS.step - committed[-1].step
    decided = Counter(event.decision for event in planned)
    assert value(found, "decisions", decision="rebalance", reason="pays") == decided["rebalance"]
    assert value(found, "decisions", decision="stay", reason="does not pay") == decided["stay"]
    assert value(found, "pause_seconds") == pytest.approx(len(committed) * sum(PHASES.values()))
    for phase, seconds in PHASES.items():
        assert value(found, "phase_seconds", phase=phase) == pytest.approx(len(committed) * seconds)
    assert value(found, "phase_seconds", phase="plan") == pytest.approx(sum(event.plan_seconds for event in planned))
    stood = sum(INTERVAL for event in measured if event.step > committed[0].step)
    assert value(found, "saved_seconds", kind="predicted") == pytest.approx(stood * 2.0 / CONFIG.horizon)
    saved = 0.0
    for event in measured:
        gain = predicted_imbalance(event.load.astype(np.float64), start()) - np.array(event.imbalance)
        saved += INTERVAL * STEP_SECONDS * 0.5 * gain.mean() / np.mean(event.imbalance)
    assert value(found, "saved_seconds", kind="measured") == pytest.approx(saved, abs=1e-4)

    links: Counter[str] = Counter()
    for event in committed:
        for _, _, source, destination in event.transfers:
            ends = start().rank_of(source), start().rank_of(destination)
            away = "inside a node" if len(set(map(TOPOLOGY.node_of, ends))) == 1 else "between nodes"
            links["inside a rank" if ends[0] == ends[1] else away] += 1
    for link in ("inside a rank", "inside a node", "between nodes"):
        assert value(found, "moved_experts", link=link) == links[link]
        assert value(found, "moved_bytes", link=link) == links[link] * EXPERT_BYTES
    assert links["inside a node"] and links["between nodes"]


def test_the_cumulative_overload_is_that_of_the_worst_pipeline_stage() -> None:
    """Ranks of different stages hold different layers, so a sum over all layers would be nobody's."""
    found = records(ROUNDS)
    rank_load_LR = [record for record in found if record["event"] == "LoadMeasured"][-1]["rank_load"][0]
    stages = rank_load_LR[:1].sum(axis=0), rank_load_LR[1:].sum(axis=0)
    worst = max(load_R.max() / load_R.mean() for load_R in stages)
    staged = [{**found[0], "layers_of_stage": [1, LAYERS - 1]}, *found[1:]]
    assert value(values(state(staged)), "max_cum_overload_factor") == pytest.approx(worst)
    assert value(values(state(found)), "max_cum_overload_factor") < worst - 1e-3


def test_troubles_and_progress_are_counted() -> None:
    found = values(state())
    assert value(found, "aborts", phase="staged", cause="checksum") == 1
    assert value(found, "pauses") == value(found, "guard_findings") == value(found, "balancing") == 1
    assert value(found, "steps") == 31 and value(found, "step_seconds") == 0.5
    assert value(found, "last_step_timestamp_seconds") == 4998.0
    paused = [record for record in records(1) if record["event"] != "BalancingResumed"]
    assert value(values(state(paused)), "balancing") == 0


def test_a_month_of_events_does_not_grow_the_state() -> None:
    """Nor the number of series; and totals and the curve stay right."""
    grown, once = RunState(), records(2, with_troubles=True)
    grown.apply(once[0])
    for _ in range(800):
        for record in once[1:]:
            grown.apply(record)
    names = len(values(grown))
    assert len(grown.curve) <= MOST_POINTS and len(grown.decisions) == MOST_DECISIONS
    assert sum(point["windows"] for point in grown.curve) == 1600
    assert sum(point["steps"] for point in grown.curve) == 1600 * INTERVAL
    mean = sum(point["mean"] * point["windows"] for point in grown.curve) / 1600
    assert mean == pytest.approx(np.mean([np.mean(r["imbalance"]) for r in once if r["event"] == "LoadMeasured"]))
    assert names == len(values(state_of(once)))


def test_a_cause_or_reason_never_becomes_a_label() -> None:
    found = records(1)
    for number in range(50):
        abort = {"event": "RebalanceAborted", "phase": f"phase {number}", "cause": f"cause {number}", "epoch": 1}
        found.append({**abort, "step": number, "time": 0.0, "committed_layers": [], "left_layers": []})
    names = [name for name in values(state(found)) if name.startswith("eplb_aborts")]
    assert len(names) == 2


def test_prometheus_reads_back_what_stands() -> None:
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    assert client is not None
    of = state()
    text, content_type = metrics.exposition(metrics_of(of, PROGRESS, 5000.0))
    assert content_type.startswith("text/plain")
    read = {
        f"{sample.name.removesuffix('_total')}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert read == values(of)
