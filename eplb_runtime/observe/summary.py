"""Summary of a run, in a few lines and as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..load.clock import Progress
from ..utils.tables import counted
from .metrics import balance_of
from .run_state import LINKS, RunState

SURE_AFTER = 5
"""Judgements of plans, below which nothing is concluded."""
MOSTLY_TRUE = 0.5
"""Share of predicted seconds below which a change of settings is advised."""


def summary_of(state: RunState, progress: Progress | None = None) -> dict[str, Any]:
    """Return steps, imbalance with and without rebalancing, what was moved, what it cost and saved.

    ``imbalance``: means over layers and measured steps, and of the newest measurement; None: nothing was measured.
    ``balance``: of the newest measurement, by the field's names. Moved experts and bytes: between ranks, in one EP
    group. ``placed_replicas``: replica slots that were given another expert. ``predictions``: None: no plan was judged.
    ``rollouts``: those in which the balancer was suspended. ``steps``: the newest. All else is of the state's ``lives``
    (starts of the job), but for predictions where ``judged_before``.
    """
    with state.locked():
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
            "judged_before": state.judged_before,
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


def summary_text(summary: dict[str, Any], run: Path | str | None) -> str:
    """Return three lines, of which a job prints its own at its end: imbalance, time saved, and where to look."""
    imbalance, work, saved = summary["imbalance"], summary["expert_work"], summary["saved_seconds"]["measured"]
    lives = " in all lives"
    line = f"the balancer's run: {counted(summary['rebalances'], 'rebalance')} in "
    line += f"{counted(summary['measured_steps'], 'measured step')}{lives * (summary['lives'] > 1)}"
    if imbalance["measured"] is not None:
        last = "" if imbalance["last"] is None else f", {imbalance['last']:.3f} last"  # None: just started again
        line += f"; imbalance {imbalance['start']:.3f} as it was, {imbalance['measured']:.3f} with moves{last}"
    judged = int((summary["predictions"] or {}).get("judged_decisions", 0))
    found, pauses = counted(summary["guard_findings"], "finding"), counted(summary["pauses"], "pause")
    troubled = summary["guard_findings"] or summary["pauses"]
    troubles = f"; {found} of the guard, {pauses}: see the log" if troubled else ""
    look = "BalancerConfig(run=FOLDER) keeps all of it" if run is None else f"eplb-runtime report {run} shows all of it"
    sure = f"{expert_work_text(work['share'], work['source'])}, predictions judged {counted(judged, 'time')}"
    sure += f"{lives * summary['judged_before']}{': too few to be sure' * (judged < SURE_AFTER)}"
    return f"{line}\n  about {abs(saved):.3g} s {'lost' if saved < 0 else 'saved'}: {sure}\n  {look}{troubles}"
