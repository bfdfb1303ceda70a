"""The numbers of a run by name, for whoever collects numbers: Prometheus, TensorBoard, Weights & Biases, MLflow.

All are read off the `RunState`, so they are what the page and the report show. Labels stay few: a layer, a rank, or a
word from a list of ours; never a text. Names of the field are there with ours: overload factors as Megatron logs them,
MaxVio as in the paper on balancing without an auxiliary loss, balancedness as serving engines have it.
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
    with state.locked():
        return [
            *_of_imbalance(state),
            *_of_balance(state),
            _of_expert_work(state),
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
    return _flat(metrics_of(state, progress, 0.0))


def balance_of(state: RunState) -> dict[str, float]:
    """How even the newest measured load was, by the field's names; empty before anything was measured. Inside
    ``locked``."""
    return _flat(_of_balance(state))


def _flat(metrics: Sequence[Metric]) -> dict[str, float]:
    found = {}
    for metric in metrics:
        for labels, value in metric.samples:
            if labels.keys() & {"layer", "rank"} or "timestamp" in metric.name or not np.isfinite(value):
                continue
            words = (metric.name.removeprefix(PREFIX), *labels.values())
            found["/".join(word.replace(" ", "_") for word in words)] = value
    return found


def _of_imbalance(state: RunState) -> list[Metric]:
    measured, planned = state.measured, state.planned
    samples: Samples = []
    if measured is not None:
        samples += _of_kind("measured", measured["imbalance"]) + _of_kind("start", measured["imbalance_start"])
    if planned is not None and planned["by_layer"] is not None:
        samples += _of_kind("predicted", planned["by_layer"][1]) + _of_kind("bound", planned["by_layer"][2])
    told = "Max / mean rank load over layers: measured, as experts stood at the start, predicted, and the bound."
    return [Metric(PREFIX + "imbalance", "gauge", told, samples)]


def _of_balance(state: RunState) -> list[Metric]:
    measured = state.measured
    average = most = cumulative = None
    violation: Samples = []
    balancedness: Samples = []
    if measured is not None:
        imbalance_L, violation_L = measured["imbalance"], measured["max_vio"]
        average, most = float(imbalance_L.mean()), float(imbalance_L.max())
        cumulative = _cumulative_overload(measured["rank_load"][0], state.job.get("layers_of_stage"))
        balance_L = measured["balancedness"]
        balancedness = [({"over": "mean"}, float(balance_L.mean())), ({"over": "min"}, float(balance_L.min()))]
        if violation_L is not None:
            violation = [({"over": "mean"}, float(violation_L.mean())), ({"over": "max"}, float(violation_L.max()))]
    told = "Max / mean - 1 of experts' loads in a step: of the router, the same under any placement."
    return [
        _gauge("avg_overload_factor", "Mean over layers of the busiest rank's tokens over the mean.", average),
        _gauge("max_overload_factor", "Worst layer's busiest rank's tokens over the mean.", most),
        _gauge("max_cum_overload_factor", "Busiest rank's tokens over its stage's layers, over the mean.", cumulative),
        Metric(PREFIX + "max_vio", "gauge", told, violation),
        Metric(
            PREFIX + "balancedness",
            "gauge",
            "Mean / max rank load of a step: mean over steps and layers, and worst layer.",
            balancedness,
        ),
    ]


def _of_expert_work(state: RunState) -> Metric:
    told = "Share of a step from dispatch to combine: measured, given or assumed."
    return Metric(PREFIX + "moe_share", "gauge", told, [({"source": state.share.source}, state.share.value)])


def _cumulative_overload(rank_load_LR: NDArray[np.int64], layers_of_stage: Sequence[int] | None) -> float:
    """Tokens whose activations the busiest rank holds for the backward pass, over those of an even load.

    Megatron (pull request 4110) follows the sum through forwards and backwards. Its peak is the sum over a stage's
    layers where each micro-batch has the same load, which is what counts per step can say.
    """
    ends = np.cumsum(layers_of_stage or [len(rank_load_LR)])[:-1]
    of_stages = [stage_LR.sum(axis=0) for stage_LR in np.split(rank_load_LR, ends)]
    return max((float(load_R.max() / load_R.mean()) for load_R in of_stages if load_R.any()), default=1.0)


def _of_layers_and_ranks(state: RunState) -> list[Metric]:
    measured, planned = state.measured, state.planned
    layers: Samples = []
    violation: Samples = []
    ranks: Samples = []
    if measured is not None:
        if measured["max_vio"] is not None:
            violation = [({"layer": str(layer)}, float(value)) for layer, value in enumerate(measured["max_vio"])]
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
        Metric(PREFIX + "layer_max_vio", "gauge", "Max / mean - 1 of a layer's experts' loads.", violation),
        Metric(PREFIX + "rank_tokens_per_step", "gauge", told, ranks),
    ]


def _of_decisions(state: RunState, progress: Progress) -> list[Metric]:
    decided = [({"decision": d, "reason": r}, float(n)) for (d, r), n in sorted(state.decided.items())]
    phases = [({"phase": phase}, seconds) for phase, seconds in sorted(state.phase_seconds.items())]
    saved = [({"kind": "measured"}, state.saved_seconds), ({"kind": "predicted"}, state.promised_seconds)]
    predicted: Samples = []
    if state.predictions is not None:
        seconds = state.predictions
        predicted = [
            ({"kind": "predicted"}, seconds["predicted_seconds"]),
            ({"kind": "true"}, seconds["true_seconds"]),
        ]
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
        Metric(PREFIX + "judged_seconds", "gauge", "Gains of judged plans: as predicted, and come true.", predicted),
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
        _gauge("balancing", "1 while ranks balance, 0 in rollouts, pauses and at the end.", _is_balancing(state)),
        _counter("rollouts", "How often the balancer was suspended.", state.rollouts),
        _counter("rollout_seconds", "Seconds of rollouts that are over.", state.rollout_seconds),
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
