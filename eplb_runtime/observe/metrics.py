"""The numbers of a run by name, for whoever collects numbers: Prometheus, TensorBoard, Weights & Biases, MLflow.

All are read off the `RunState`, so they are what the page and the report show. Labels stay few: a layer, a rank, or a
word from a list of ours; never a text. Megatron's words stand where it has them: the overload factor of a layer is its
busiest rank's tokens over the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..load.clock import Progress
from .state import LINKS, RunState

PREFIX = "eplb_"

Samples = list[tuple[dict[str, str], float]]


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
    """All metrics of a run, the same names from the first scrape on.

    Args:
        now: seconds since 1970.
        left_out: events that the observer could not take.
    """
    with state.looking():
        return [
            *_of_balance(state),
            *_of_layers_and_ranks(state),
            *_of_decisions(state, progress),
            *_of_moves(state),
            *_of_trouble(state, left_out),
            _gauge("steps", "Optimizer steps so far.", progress.step),
            _gauge("step_seconds", "Seconds of a training step, smoothed.", progress.step_seconds),
            _gauge("last_step_timestamp_seconds", "When the last step ended, since 1970.", now - progress.idle_seconds),
        ]


def scalars_of(state: RunState, progress: Progress) -> dict[str, float]:
    """The metrics without a layer or rank, for trackers of experiments: ``imbalance/measured/mean`` and so on."""
    found = {}
    for metric in metrics_of(state, progress, 0.0):
        for labels, value in metric.samples:
            if labels.keys() & {"layer", "rank"} or "timestamp" in metric.name or not np.isfinite(value):
                continue
            words = (metric.name.removeprefix(PREFIX), *labels.values())
            found["/".join(word.replace(" ", "_") for word in words)] = value
    return found


def _of_balance(state: RunState) -> list[Metric]:
    measured, planned = state.measured, state.planned
    samples: Samples = []
    factors = _both(None)
    if measured is not None:
        samples += _of_kind("measured", measured["imbalance"]) + _of_kind("start", measured["imbalance_start"])
        factors = _both(measured["imbalance"])
    if planned is not None and planned["by_layer"] is not None:
        samples += _of_kind("predicted", planned["by_layer"][1]) + _of_kind("bound", planned["by_layer"][2])
    told = "Max / mean rank load over layers: measured, as experts stood at the start, predicted, and the bound."
    return [
        Metric(PREFIX + "imbalance", "gauge", told, samples),
        _gauge("avg_overload_factor", "Mean over layers of the busiest rank's tokens over the mean.", factors[0]),
        _gauge("max_overload_factor", "Worst layer's busiest rank's tokens over the mean.", factors[1]),
    ]


def _of_layers_and_ranks(state: RunState) -> list[Metric]:
    measured, planned = state.measured, state.planned
    layers: Samples = []
    ranks: Samples = []
    if measured is not None:
        for kind in ("imbalance", "imbalance_start"):
            word = "measured" if kind == "imbalance" else "start"
            layers += [({"layer": str(layer), "kind": word}, float(x)) for layer, x in enumerate(measured[kind])]
        tokens_R = measured["rank_load"][0].sum(axis=0) / max(1, measured["steps"])
        ranks = [({"rank": str(rank)}, float(tokens)) for rank, tokens in enumerate(tokens_R)]
    if planned is not None and planned["by_layer"] is not None:
        for word, row in (("predicted", planned["by_layer"][1]), ("bound", planned["by_layer"][2])):
            layers += [({"layer": str(layer), "kind": word}, float(x)) for layer, x in enumerate(row)]
    told = "(token, choice) pairs that each rank of the EP group computes in a step, over all layers."
    return [
        Metric(PREFIX + "layer_imbalance", "gauge", "Max / mean rank load of a layer.", layers),
        Metric(PREFIX + "rank_tokens_per_step", "gauge", told, ranks),
    ]


def _of_decisions(state: RunState, progress: Progress) -> list[Metric]:
    decided = [({"decision": d, "reason": r}, float(n)) for (d, r), n in sorted(state.decided.items())]
    phases = [({"phase": phase}, seconds) for phase, seconds in sorted(state.phase_seconds.items())]
    saved = [({"kind": "measured"}, state.saved_seconds), ({"kind": "predicted"}, state.promised_seconds)]
    of_saved = (
        "Seconds saved: by the measured imbalance beside that of the start; as plans predicted for steps they stood."
    )
    return [
        _gauge("placement_epoch", "Commits so far.", state.epoch),
        _gauge("placement_age_steps", "Steps since experts moved.", max(0, progress.step - state.placed_at)),
        Metric(PREFIX + "decisions", "counter", "Decisions, by what was decided and why.", decided),
        _counter("rebalances", "Rebalances that were carried out.", state.rebalances),
        _counter("pause_seconds", "Seconds that training stood still for rebalances.", state.pause_seconds),
        Metric(PREFIX + "phase_seconds", "counter", "Seconds of rank 0 in each phase of planning and moving.", phases),
        Metric(PREFIX + "saved_seconds", "gauge", of_saved, saved),
    ]


def _of_moves(state: RunState) -> list[Metric]:
    experts: Samples = [({"link": link}, float(state.moved_experts[link])) for link in LINKS]
    nbytes: Samples = [({"link": link}, float(state.moved_bytes[link])) for link in LINKS]
    return [
        Metric(PREFIX + "moved_experts", "counter", "Experts that changed their home slot, in one EP group.", experts),
        Metric(PREFIX + "moved_bytes", "counter", "Bytes of experts with their state, in one EP group.", nbytes),
    ]


def _of_trouble(state: RunState, left_out: int) -> list[Metric]:
    aborts = [({"phase": p, "cause": c}, float(n)) for (p, c), n in sorted(state.aborts.items())]
    return [
        _gauge("balancing", "1 while the ranks balance, 0 while they are paused or have ended.", _is_balancing(state)),
        _counter("pauses", "How often the ranks lost each other.", state.pauses),
        Metric(PREFIX + "aborts", "counter", "Rebalances that were dropped, by where and why.", aborts),
        _counter("guard_findings", "Mistakes that the guard found.", state.findings),
        _counter("left_out_events", "Events that could not be shown: a listener was too slow.", left_out),
    ]


def _is_balancing(state: RunState) -> bool:
    return state.standing == "balancing"


def _gauge(name: str, told: str, value: float | None) -> Metric:
    return Metric(PREFIX + name, "gauge", told, [] if value is None else [({}, float(value))])


def _counter(name: str, told: str, value: float) -> Metric:
    return Metric(PREFIX + name, "counter", told, [({}, float(value))])


def _of_kind(kind: str, by_layer: NDArray[np.float64]) -> Samples:
    return [
        ({"kind": kind, "over": "mean"}, float(by_layer.mean())),
        ({"kind": kind, "over": "max"}, float(by_layer.max())),
    ]


def _both(by_layer: NDArray[np.float64] | None) -> tuple[float | None, float | None]:
    return (None, None) if by_layer is None else (float(by_layer.mean()), float(by_layer.max()))
