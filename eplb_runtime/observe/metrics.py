"""The numbers of a run by name: for Prometheus, TensorBoard, Weights & Biases, MLflow and the summary.

Labels are layers, ranks and words from short lists, never texts. Overload factors are named as Megatron logs them,
MaxVio as in the paper on balancing without an auxiliary loss, balancedness as serving engines have it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..load.clock import Progress
from ..utils.text import counted
from .run_state import LINKS, RunState

PREFIX = "eplb_"
NOT_INSTALLED = "prometheus_client is not installed on rank 0: pip install 'eplb-runtime[metrics]'"

SURE_AFTER = 5
"""Judgements of plans, below which nothing is concluded."""
MOSTLY_TRUE = 0.5
"""Share of predicted seconds below which a change of settings is advised."""


class Metric(NamedTuple):
    """A metric: its name as Prometheus has it (a counter's without ``_total``), ``"gauge"`` or ``"counter"``, what it
    is with the unit, and its values, all with the same labels."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[dict[str, str], float]]


def metrics_of(state: RunState, progress: Progress, now: float, left_out: int = 0) -> list[Metric]:
    """Return all metrics of a run. Their names are the same from the first scrape on. Takes the state's lock. ``now``:
    seconds since 1970. ``left_out``: events that were dropped because listeners were too slow."""
    with state.lock:
        return [
            *_of_load(state),
            *_balance(state),
            *_of_decisions(state, progress),
            _counter("left_out_events", "Events dropped because a listener was too slow.", left_out),
            _gauge("steps", "Optimizer steps so far.", progress.step),
            _gauge("step_seconds", "Seconds of a training step, smoothed.", progress.step_seconds),
            _gauge("last_step_timestamp_seconds", "When the last step ended, since 1970.", now - progress.idle_seconds),
        ]


def scalars_of(state: RunState, progress: Progress) -> dict[str, float]:
    """Return values of `metrics_of` by name, as ``imbalance/measured/mean``, for trackers: without metrics of a layer,
    a rank or a time, and values that are not finite. Takes the state's lock."""
    return _flat(metrics_of(state, progress, 0.0))


def balance_of(state: RunState) -> dict[str, float]:
    """Return overload factors, MaxVio and balancedness of the newest measured load, by name; an empty dict: nothing was
    measured yet. Call with ``state.lock`` held."""
    return _flat(_balance(state))


def _flat(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return values by name and labels, but for those of layers, ranks and times."""
    found = dict[str, float]()
    for labels, value, name in ((*sample, metric.name) for metric in metrics for sample in metric.samples):
        if not labels.keys() & {"layer", "rank"} and "timestamp" not in name and np.isfinite(value):
            found["/".join((name.removeprefix(PREFIX), *labels.values())).replace(" ", "_")] = value
    return found


def _of_load(state: RunState) -> list[Metric]:
    rows: dict[str, NDArray[np.float64]] = {}
    ranks: dict[Any, float] = {}
    violation: dict[Any, float] = {}
    if (measured := state.measured) is not None:
        rows = {"measured": measured["imbalance"], "start": measured["imbalance_start"]}
        ranks = dict(enumerate(measured["rank_load"][0].sum(axis=0) / max(1, measured["steps"])))
        violation = dict(enumerate(measured["max_vio"]))
    if state.by_layer is not None:
        rows |= {"predicted": state.by_layer[1], "bound": state.by_layer[2]}
    over = {(kind, of): value for kind, row_L in rows.items() for of, value in _over(row_L, "max").items()}
    layers = {(layer, kind): value for kind, row_L in rows.items() for layer, value in enumerate(row_L)}
    of_over = "Max / mean rank load over layers: measured, at the start, predicted, the bound."
    tokens, share = "(token, choice) pairs a step of each rank of the EP group, all layers.", state.share
    return [
        _gauge("imbalance", of_over, over, "kind", "over"),
        _gauge("layer_imbalance", "Max / mean rank load of a layer.", layers, "layer", "kind"),
        _gauge("layer_max_vio", "Max / mean - 1 of a layer's experts' loads.", violation, "layer"),
        _gauge("rank_tokens_per_step", tokens, ranks, "rank"),
        _gauge(
            "moe_share",
            "Share of a step from dispatch to combine: measured, given or assumed.",
            {share.source: share.value},
            "source",
        ),
    ]


def _balance(state: RunState) -> list[Metric]:
    average = most = cumulative = None
    violation: dict[Any, float] = {}
    balancedness: dict[Any, float] = {}
    if (measured := state.measured) is not None:
        average, most = float(measured["imbalance"].mean()), float(measured["imbalance"].max())
        cumulative = _cumulative_overload(measured["rank_load"][0], state.job.get("layers_of_stage"))
        balancedness, violation = _over(measured["balancedness"], "min"), _over(measured["max_vio"], "max")
    of_violation = "Max / mean - 1 of experts' loads in a step: the same under any placement."
    of_balance = "Mean / max rank load of a step: mean over steps and layers, and worst."
    return [
        _gauge("avg_overload_factor", "Mean over layers of the busiest rank's tokens over the mean.", average),
        _gauge("max_overload_factor", "Worst layer's busiest rank's tokens over the mean.", most),
        _gauge("max_cum_overload_factor", "Busiest rank's tokens over its stage's layers, over the mean.", cumulative),
        _gauge("max_vio", of_violation, violation, "over"),
        _gauge("balancedness", of_balance, balancedness, "over"),
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
    saved = {"measured": state.saved_seconds, "predicted": state.promised_seconds}
    judged = {kind: (state.predictions or {}).get(f"{kind}_seconds") for kind in ("predicted", "true")}
    judged = {kind: seconds for kind, seconds in judged.items() if seconds is not None}
    experts, nbytes = ({link: moved[link] for link in LINKS} for moved in (state.moved_experts, state.moved_bytes))
    balancing = state.standing == "balancing"
    return [
        _gauge("placement_epoch", "Commits so far.", state.epoch),
        _gauge("placement_age_steps", "Steps since experts moved.", max(0, progress.step - state.placed_at)),
        _counter("decisions", "Decisions, by what was decided and why.", state.decided, "decision", "reason"),
        _counter(
            "phase_seconds", "Seconds of rank 0 in each phase of planning and moving.", state.phase_seconds, "phase"
        ),
        _gauge("saved_seconds", "Seconds saved: from the measured imbalance, and as predicted.", saved, "kind"),
        _gauge("judged_seconds", "Gains of judged plans: as predicted, and come true.", judged, "kind"),
        _counter("moved_experts", "Experts that changed their home slot, in one EP group.", experts, "link"),
        _counter("moved_bytes", "Bytes of experts with their state, in one EP group.", nbytes, "link"),
        _gauge("balancing", "1 while ranks balance, 0 in rollouts, pauses and at the end.", balancing),
        _counter("aborts", "Rebalances that were dropped, by where.", state.aborts, "phase"),
        _counter("guard_findings", "Mistakes that the guard found.", state.findings),
        _counter("rebalances", "Rebalances that were carried out.", state.rebalances),
        _counter("pause_seconds", "Seconds that training stopped for rebalances.", state.pause_seconds),
        _counter("rollouts", "How often the balancer was suspended.", state.rollouts),
        _counter("rollout_seconds", "Seconds of rollouts that are over.", state.rollout_seconds),
        _counter("pauses", "How often the ranks lost each other.", state.pauses),
    ]


def _gauge(name: str, told: str, value: float | Mapping[Any, Any] | None, *labels: str, kind: str = "gauge") -> Metric:
    """Return a metric of one value, of none yet, or of values by the words of its labels."""
    found = value if isinstance(value, Mapping) else {} if value is None else {(): value}
    words = {key if isinstance(key, tuple) else (key,): number for key, number in sorted(found.items())}
    samples = [(dict(zip(labels, map(str, key), strict=True)), float(number)) for key, number in words.items()]
    return Metric(PREFIX + name, kind, told, samples)


def _counter(name: str, told: str, value: float | Mapping[Any, Any], *labels: str) -> Metric:
    return _gauge(name, told, value, *labels, kind="counter")


def _over(by_layer: NDArray[np.float64], worst: str) -> dict[Any, float]:
    return {"mean": float(by_layer.mean()), worst: float(by_layer.max() if worst == "max" else by_layer.min())}


def exposition(metrics: Sequence[Metric]) -> tuple[bytes, str]:
    """Return the text that Prometheus reads, and its content type. ImportError: there is no prometheus_client."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families: list[Any] = []
    for name, kind, told, samples in metrics:
        family: Any = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        families.append(family(name, told, labels=list(samples[0][0]) if samples else []))
        for labels, value in samples:
            families[-1].add_metric(list(labels.values()), value)
    collector: Any = SimpleNamespace(collect=lambda: families)
    return generate_latest(collector), CONTENT_TYPE_LATEST


# -- the summary -------------------------------------------------------------------------------------------------------


def summary_of(state: RunState, progress: Progress | None = None) -> dict[str, Any]:
    """Return the summary of a run, JSON-able: steps, imbalance with and without rebalancing, what was moved, what it
    cost and saved. Takes the state's lock.

    ``imbalance``: means over layers and measured steps, and of the newest measurement; None: nothing was measured.
    ``balance``: of the newest measurement, by the field's names. Moved experts and bytes: between ranks, in one EP
    group. ``placed_replicas``: replica slots that were given another expert. ``predictions``: None: no plan was judged.
    ``rollouts``: those in which the balancer was suspended. ``steps``: the newest. All else is of the state's ``lives``
    (starts of the job), but ``predictions``, which are of the last one.
    """
    with state.lock:
        windows = sum(point["windows"] for point in state.curve)

        def mean(name: str) -> float | None:
            return sum(point[name] * point["windows"] for point in state.curve) / windows if windows else None

        last = None if state.measured is None else float(state.measured["imbalance"].mean())
        return {
            "steps": state.step if progress is None else max(state.step, progress.step),
            "measured_steps": state.measured_steps,
            "lives": state.starts,
            "decisions": sum(state.decided.values()),
            "rebalances": state.rebalances,
            "dropped": sum(state.aborts.values()),
            "imbalance": {"start": mean("start_mean"), "measured": mean("mean"), "last": last},
            "balance": balance_of(state),
            "moved_experts": sum(state.moved_experts[link] for link in LINKS[1:]),
            "moved_bytes": sum(state.moved_bytes[link] for link in LINKS[1:]),
            "placed_replicas": state.placed_replicas,
            "pause_seconds": state.pause_seconds,
            "saved_seconds": {"predicted": state.promised_seconds, "measured": state.saved_seconds},
            "predictions": state.predictions,
            "expert_work": {"share": state.share.value, "source": state.share.source},
            "guard_findings": state.findings,
            "pauses": state.pauses,
            "rollouts": {"count": state.rollouts, "seconds": state.rollout_seconds},
        }


def expert_work_text(share: float, source: str) -> str:
    """Return words for the share of a step in expert work, in percent, and for the source of the figure."""
    return f"expert work {100 * share:.0f} % of a step ({source})"


def predictions_text(predictions: Mapping[str, float] | None) -> str | None:
    """Return words for how much of what plans predict comes true, and what to do about it; None: none was judged."""
    if predictions is None:
        return None
    predicted, true = predictions["predicted_seconds"], predictions["true_seconds"]
    plans, decisions = int(predictions["judged_plans"]), int(predictions["judged_decisions"])
    judged = f"{counted(plans, 'plan')} judged at {counted(decisions, 'decision')}"
    text = f"of {predicted:.3g} s that plans predicted, {max(true, 0.0):.3g} s came true ({judged}"
    if true < 0:
        text += f", which lost {-true:.3g} s"
    if decisions < SURE_AFTER:
        return f"{text}: too few to be sure)"
    return f"{text}): raise interval or window" if true < MOSTLY_TRUE * predicted else f"{text})"


def summary_text(summary: dict[str, Any], run: Path | str | None) -> str:
    """Return a `summary_of` in three lines: rebalances, imbalance; seconds saved or lost, how sure; where to see more,
    with the guard's findings and pauses, if any. ``run``: its folder; None: the last line says how to keep it."""
    imbalance, work, saved = summary["imbalance"], summary["expert_work"], summary["saved_seconds"]["measured"]
    lives = " in all lives"
    line = f"the balancer's run: {counted(summary['rebalances'], 'rebalance')} in "
    line += f"{counted(summary['measured_steps'], 'measured step')}{lives * (summary['lives'] > 1)}"
    if imbalance["measured"] is not None:
        last = "" if imbalance["last"] is None else f", {imbalance['last']:.3f} last"  # None: just started again
        line += f"; imbalance {imbalance['start']:.3f} as it was, {imbalance['measured']:.3f} with moves{last}"
    found, pauses = counted(summary["guard_findings"], "finding"), counted(summary["pauses"], "pause")
    troubled = summary["guard_findings"] or summary["pauses"]
    troubles = f"; {found} of the guard, {pauses}: see the log" if troubled else ""
    look = "BalancerConfig(run=FOLDER) keeps all of it" if run is None else f"eplb-runtime report {run} shows all of it"
    sure = f"{expert_work_text(work['share'], work['source'])}; "
    sure += predictions_text(summary["predictions"]) or "no prediction could be checked: too few to be sure"
    return f"{line}\n  about {abs(saved):.3g} s {'lost' if saved < 0 else 'saved'}: {sure}\n  {look}{troubles}"
