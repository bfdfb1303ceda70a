"""The numbers of a run by name: for Prometheus, TensorBoard, Weights & Biases, MLflow and the summary.

Labels are layers, ranks and words from short lists, never texts. Overload factors are named as Megatron logs them,
MaxVio as in the paper on balancing without an auxiliary loss, balancedness as serving engines have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load.clock import Progress
from .run_state import LINKS, RunState

PREFIX = "eplb_"
NOT_INSTALLED = "prometheus_client is not installed on rank 0: pip install 'eplb-runtime[metrics]'"

Samples = list[tuple[dict[str, str], float]]
_COUNTERS = {
    "rebalances": "Rebalances that were carried out.",
    "pause_seconds": "Seconds that training stopped for rebalances.",
    "rollouts": "How often the balancer was suspended.",
    "rollout_seconds": "Seconds of rollouts that are over.",
    "pauses": "How often the ranks lost each other.",
}
"""Totals of a state under the same name."""


@dataclass(frozen=True)
class Metric:
    """One metric with all its samples.

    Args:
        name: as Prometheus has it, a counter's without ``_total``.
        kind: ``"gauge"`` or ``"counter"``.
        help: one sentence, with the unit.
        samples: labels and value; all with the same labels.
    """

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[dict[str, str], float]]


def metrics_of(state: RunState, progress: Progress, now: float, left_out: int = 0) -> list[Metric]:
    """Return all metrics of a run; their names are the same from the first scrape on.

    Args:
        now: seconds since 1970.
        left_out: events that were dropped because listeners were too slow.
    """
    with state.locked():
        return [
            *_of_load(state),
            *_balance(state),
            *_of_decisions(state, progress),
            *(_counter(name, told, getattr(state, name)) for name, told in _COUNTERS.items()),
            _counter("left_out_events", "Events that could not be shown: a listener was too slow.", left_out),
            _gauge("steps", "Optimizer steps so far.", progress.step),
            _gauge("step_seconds", "Seconds of a training step, smoothed.", progress.step_seconds),
            _gauge("last_step_timestamp_seconds", "When the last step ended, since 1970.", now - progress.idle_seconds),
        ]


def scalars_of(state: RunState, progress: Progress) -> dict[str, float]:
    """Return the metrics without a layer or rank, for trackers: ``imbalance/measured/mean`` and so on."""
    return _flat(metrics_of(state, progress, 0.0))


def balance_of(state: RunState) -> dict[str, float]:
    """Return how even the newest measured load was, by the field's names; empty before. Call inside ``locked``."""
    return _flat(_balance(state))


def _flat(metrics: Iterable[Metric]) -> dict[str, float]:
    found = {}
    for metric in metrics:
        for labels, value in metric.samples:
            if labels.keys() & {"layer", "rank"} or "timestamp" in metric.name or not np.isfinite(value):
                continue
            words = (metric.name.removeprefix(PREFIX), *labels.values())
            found["/".join(word.replace(" ", "_") for word in words)] = value
    return found


def _of_load(state: RunState) -> list[Metric]:
    measured = state.measured or {}
    rows: dict[str, NDArray[np.float64]] = {}
    violation: Sequence[float] | NDArray[np.float64] = []
    ranks: Sequence[float] | NDArray[np.float64] = []
    if measured:
        rows = {"measured": measured["imbalance"], "start": measured["imbalance_start"]}
        ranks = measured["rank_load"][0].sum(axis=0) / max(1, measured["steps"])
        violation = measured["max_vio"]
    if state.by_layer is not None:
        rows |= {"predicted": state.by_layer[1], "bound": state.by_layer[2]}
    over = [({"kind": kind, **labels}, x) for kind, row_L in rows.items() for labels, x in _over(row_L, "max")]
    layers = [({"layer": str(layer), "kind": kind}, x) for kind, row_L in rows.items() for layer, x in enumerate(row_L)]
    share = [({"source": state.share.source}, state.share.value)]
    return [
        _gauge("imbalance", "Max / mean rank load over layers: measured, at the start, predicted, the bound.", over),
        _gauge("layer_imbalance", "Max / mean rank load of a layer.", layers),
        _gauge("layer_max_vio", "Max / mean - 1 of a layer's experts' loads.", _by("layer", enumerate(violation))),
        _gauge(
            "rank_tokens_per_step",
            "(token, choice) pairs a step of each rank of the EP group, all layers.",
            _by("rank", enumerate(ranks)),
        ),
        _gauge("moe_share", "Share of a step from dispatch to combine: measured, given or assumed.", share),
    ]


def _balance(state: RunState) -> list[Metric]:
    measured = state.measured
    average = most = cumulative = None
    violation: Samples = []
    balancedness: Samples = []
    if measured is not None:
        average, most = float(measured["imbalance"].mean()), float(measured["imbalance"].max())
        cumulative = _cumulative_overload(measured["rank_load"][0], state.job.get("layers_of_stage"))
        balancedness = _over(measured["balancedness"], "min")
        violation = _over(measured["max_vio"], "max")
    return [
        _gauge("avg_overload_factor", "Mean over layers of the busiest rank's tokens over the mean.", average),
        _gauge("max_overload_factor", "Worst layer's busiest rank's tokens over the mean.", most),
        _gauge("max_cum_overload_factor", "Busiest rank's tokens over its stage's layers, over the mean.", cumulative),
        _gauge("max_vio", "Max / mean - 1 of experts' loads in a step: the same under any placement.", violation),
        _gauge("balancedness", "Mean / max rank load of a step: mean over steps and layers, and worst.", balancedness),
    ]


def _cumulative_overload(rank_load_LR: NDArray[np.int64], layers_of_stage: Sequence[int] | None) -> float:
    """Return the tokens whose activations the busiest rank holds for the backward pass, over those of an even load.

    Megatron (pull request 4110) follows the sum through forwards and backwards. Its peak is the sum over a stage's
    layers where each micro-batch has the same load, which is what counts per step can say.
    """
    ends = np.cumsum(layers_of_stage or [len(rank_load_LR)])[:-1]
    of_stages = [stage_LR.sum(axis=0) for stage_LR in np.split(rank_load_LR, ends)]
    return max((float(load_R.max() / load_R.mean()) for load_R in of_stages if load_R.any()), default=1.0)


def _of_decisions(state: RunState, progress: Progress) -> list[Metric]:
    decided: Samples = [({"decision": d, "reason": r}, n) for (d, r), n in sorted(state.decided.items())]
    aborts: Samples = [({"phase": p, "cause": c}, n) for (p, c), n in sorted(state.aborts.items())]
    saved = {"measured": state.saved_seconds, "predicted": state.promised_seconds}
    judged = state.predictions or {}
    predicted = {kind: judged[f"{kind}_seconds"] for kind in ("predicted", "true") if judged}
    experts, nbytes = ({link: moved[link] for link in LINKS} for moved in (state.moved_experts, state.moved_bytes))
    phases = dict(sorted(state.phase_seconds.items()))
    balancing = state.standing == "balancing"
    return [
        _gauge("placement_epoch", "Commits so far.", state.epoch),
        _gauge("placement_age_steps", "Steps since experts moved.", max(0, progress.step - state.placed_at)),
        _counter("decisions", "Decisions, by what was decided and why.", decided),
        _counter("phase_seconds", "Seconds of rank 0 in each phase of planning and moving.", _by("phase", phases)),
        _gauge("saved_seconds", "Seconds saved: by the measured imbalance; as plans predicted.", _by("kind", saved)),
        _gauge("judged_seconds", "Gains of judged plans: as predicted, and come true.", _by("kind", predicted)),
        _counter("moved_experts", "Experts that changed their home slot, in one EP group.", _by("link", experts)),
        _counter("moved_bytes", "Bytes of experts with their state, in one EP group.", _by("link", nbytes)),
        _gauge("balancing", "1 while ranks balance, 0 in rollouts, pauses and at the end.", balancing),
        _counter("aborts", "Rebalances that were dropped, by where and why.", aborts),
        _counter("guard_findings", "Mistakes that the guard found.", state.findings),
    ]


def _gauge(name: str, told: str, value: float | Samples | None, kind: str = "gauge") -> Metric:
    """Return a metric of labelled samples, of one value, or of none yet."""
    if not isinstance(value, list):
        value = [] if value is None else [({}, value)]
    return Metric(PREFIX + name, kind, told, [(labels, float(number)) for labels, number in value])


def _counter(name: str, told: str, value: float | Samples) -> Metric:
    return _gauge(name, told, value, "counter")


def _by(label: str, values: Mapping[Any, float] | Iterable[tuple[Any, float]]) -> Samples:
    """Return samples with one label each."""
    return [({label: str(name)}, value) for name, value in dict(values).items()]


def _over(by_layer: NDArray[np.float64], worst: str) -> Samples:
    extreme = by_layer.max() if worst == "max" else by_layer.min()
    return [({"over": "mean"}, float(by_layer.mean())), ({"over": worst}, float(extreme))]


# -- Prometheus, by its own client library ---------------------------------------------------------------------------


class MetricsCollector:
    """A collector for a registry of prometheus_client, also for one of the job's own; ``read`` returns the current
    metrics and is called at each scrape."""

    def __init__(self, read: Callable[[], Sequence[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric in self._read():
            family: Any = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                metric.name, metric.help, labels=list(metric.samples[0][0]) if metric.samples else []
            )
            for labels, value in metric.samples:
                family.add_metric(list(labels.values()), value)
            yield family


def exposition(read: Callable[[], Sequence[Metric]]) -> tuple[bytes, str]:
    """Return the text that Prometheus reads, and its content type; raises ``ImportError`` where prometheus_client is
    missing."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(MetricsCollector(read))
    return generate_latest(registry), CONTENT_TYPE_LATEST
