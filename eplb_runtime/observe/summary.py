"""Summary of a run, in a few lines and as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..load.clock import Progress
from ..utils.tables import counted
from .metrics import balance_of
from .run_state import RunState

SURE_AFTER = 5
"""Judgements of plans, below which nothing is concluded."""
SAVED_TOLD = (
    "the estimate compares with the initial placement, in the steps that were measured",
    "the prediction compares with the placement before each plan, and is discounted by the record of earlier plans",
)
CAME_TRUE_TOLD = "both compare with the placement before each plan, over its horizon, in full"
MOSTLY_TRUE = 0.5
"""Share of predicted seconds below which a change of settings is advised."""


def summary_of(state: RunState, progress: Progress | None = None) -> dict[str, Any]:
    """Return steps, imbalance with and without rebalancing, what was moved, what it cost and saved.

    ``imbalance``: means over layers and measured steps, and of the newest measurement; None: nothing was measured.
    ``balance``: of the newest measurement, by the field's names. Moved experts and bytes: between ranks, in one EP
    group. ``placed_replicas``: replica slots that were given another expert. ``predictions``: None: no plan was judged.
    ``rollouts``: those in which the balancer was suspended.
    """
    with state.locked():
        windows = sum(point["windows"] for point in state.curve)

        def mean(name: str) -> float | None:
            return sum(point[name] * point["windows"] for point in state.curve) / windows if windows else None

        last = None if state.measured is None else float(state.measured["imbalance"].mean())
        away = [link for link in state.moved_experts if link != "inside a rank"]
        return {
            "steps": state.step if progress is None else max(state.step, progress.step),
            "decisions": sum(state.decided.values()),
            "rebalances": state.rebalances,
            "dropped": sum(state.aborts.values()),
            "imbalance": {"start": mean("start_mean"), "measured": mean("mean"), "last": last},
            "balance": balance_of(state),
            "moved_experts": sum(state.moved_experts[link] for link in away),
            "moved_bytes": sum(state.moved_bytes[link] for link in away),
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
    """Return the share of a step in expert work, and where the figure is from."""
    return f"expert work {100 * share:.0f} % of a step ({source})"


def predictions_text(predictions: Mapping[str, float] | None) -> str | None:
    """Return how much of what plans predict comes true, and what to do about it; None: no plan was judged."""
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


def summary_text(summary: dict[str, Any]) -> str:
    """Return the lines that a job prints at its end."""
    imbalance, saved = summary["imbalance"], summary["saved_seconds"]
    lines = [
        f"{counted(summary['steps'], 'step')}, {counted(summary['decisions'], 'decision')}, "
        f"{counted(summary['rebalances'], 'rebalance')}, "
        f"{summary['dropped']} dropped"
    ]
    if imbalance["measured"] is not None:
        last = "" if imbalance["last"] is None else f", {imbalance['last']:.3f} last"  # None: just started again
        lines.append(
            f"imbalance (max / mean rank load, mean over layers): {imbalance['start']:.3f} with the initial "
            f"placement, {imbalance['measured']:.3f} measured{last}"
        )
    placed = summary["placed_replicas"]
    replicas = f"{counted(placed, 'replica')} placed, " if placed else ""
    lines += [
        f"{counted(summary['moved_experts'], 'expert')} moved between ranks, "
        f"{summary['moved_bytes'] / 2**20:.1f} MiB, {replicas}training stopped for {summary['pause_seconds']:.3g} s",
        f"seconds saved: {saved['measured']:.3g} estimated from the measured imbalance; {saved['predicted']:.3g} "
        "predicted by the plans for the steps in which each was in use",
        *(f"  {sentence}" for sentence in SAVED_TOLD),
    ]
    if (text := predictions_text(summary["predictions"])) is not None:
        lines += [text, f"  {CAME_TRUE_TOLD}"]
    work = summary["expert_work"]
    lines.append(f"{expert_work_text(work['share'], work['source'])}: seconds saved are in proportion to it")
    if (rollouts := summary["rollouts"])["count"]:
        times = counted(rollouts["count"], "rollout")
        lines.append(f"suspended for {times}, {rollouts['seconds']:.3g} s in all, which are no part of a step")
    if summary["guard_findings"] or summary["pauses"]:
        found, pauses = counted(summary["guard_findings"], "finding"), counted(summary["pauses"], "pause")
        lines.append(f"{found} of the guard, {pauses}: see the log")
    return "\n  ".join(["the balancer's run:", *lines])
