"""The page of a run as one HTML file: served while the job runs, or with its data inside (a report)."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load.series import RecordedJob, holds_series, read_job, read_series
from ..placement import Placement
from ..planner.evaluate import predicted_imbalance
from ..utils.files import FileError, require_readable
from .events_file import holds_events
from .run_folder import state_of_run
from .run_state import LINKS, RunState
from .summary import expert_work_text, predictions_text

SCRIPTS = ("draw.js", "page.js")
MOST_BYTES = 1 << 30
"""Of what `simulate` wrote."""
FEW_RANKS = (8, 4, 2)
"""The first that divides the experts is taken where the job's own ranks say nothing of imbalance."""
_JOB = ("started", "package", "layers", "experts", "ranks", "slots_per_rank", "policy", "interval", "replica_slots")


def page(told: Mapping[str, Any] | None = None) -> str:
    """Return the page with its style and scripts inside; nothing else may run in it.

    Args:
        told: what a report shows; None: the page asks its server.
    """
    style, *scripts = (_asset(name) for name in ("page.css", *SCRIPTS))
    hashes = " ".join(_hash(script) for script in scripts)
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {hashes}; connect-src 'self'; img-src data:"
    head = f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">"
    data = ""
    if told is not None:
        content = json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        data = f'<script type="application/json" id="data">{content}</script>\n'
    found = _asset("page.html")
    for old, new in (
        ('<link rel="stylesheet" href="page.css">', f"{head}\n<style>{style}</style>"),
        (f'<script src="{SCRIPTS[0]}"></script>', f"{data}<script>{scripts[0]}</script>"),
        (f'<script src="{SCRIPTS[1]}"></script>', f"<script>{scripts[1]}</script>"),
    ):
        before, _, after = found.partition(old)
        found = before + new + after
    return found


def _asset(name: str) -> str:
    return (files(__package__) / "page" / name).read_text()


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def view_of(state: RunState) -> dict[str, Any]:
    """Return what the page shows, JSON-able: matrices as base64 of little-endian int32 and float64, no NaN."""
    with state.locked():
        measured = state.measured
        if measured is not None:
            arrays = ("load", "rank_load", "imbalance", "imbalance_start")
            measured = {"step": measured["step"]} | {name: _packed(measured[name]) for name in arrays}
        curve = ("step", "mean", "worst", "start_mean", "step_seconds")
        view = {
            "version": state.version,
            "job": {name: state.job.get(name) for name in _JOB},
            "starts": state.starts,
            "step": state.step,
            "standing": state.standing,
            "cause": state.cause,
            "epoch": state.epoch,
            "placed_at": state.placed_at,
            "measured": measured,
            "predictions": predictions_text(state.predictions),
            "expert_work": expert_work_text(state.share.value, state.share.source),
            "placement": _packed(state.placement),
            "placement_before": _packed(state.placement_before),
            "decisions": list(state.decisions),
            "troubles": list(state.troubles),
            "curve": {name: [round(point[name], 6) for point in state.curve] for name in curve},
            "totals": _totals(state),
        }
    found: dict[str, Any] = finite(view)
    return found


def _totals(state: RunState) -> dict[str, Any]:
    return {
        "decisions": sum(state.decided.values()),
        "rebalances": state.rebalances,
        "moved_experts": {link: state.moved_experts[link] for link in LINKS},
        "moved_bytes": {link: state.moved_bytes[link] for link in LINKS},
        "placed_replicas": state.placed_replicas,
        "pause_seconds": state.pause_seconds,
        "phase_seconds": dict(state.phase_seconds),
        "rollouts": state.rollouts,
        "rollout_seconds": state.rollout_seconds,
        "saved_seconds": state.saved_seconds,
    }


def _packed(array: NDArray[Any] | None) -> dict[str, Any] | None:
    if array is None:
        return None
    is_whole = array.dtype.kind == "i" and (not array.size or np.abs(array).max() < 2**31)
    kind, content = ("i4", array.astype("<i4")) if is_whole else ("f8", array.astype("<f8"))
    return {"kind": kind, "shape": list(array.shape), "data": base64.b64encode(content.tobytes()).decode()}


def finite(value: Any) -> Any:
    """Return a value with None in place of numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list) else value


# -- reports ---------------------------------------------------------------------------------------------------------


def report_of(source: Path) -> str:
    """Return the report of a run's folder, of a recorded load, or of the ``.json`` of ``simulate -o``, as HTML.

    Raises:
        FileError: it is none of them.
        OSError: it cannot be read.
    """
    name = source.resolve().name
    if holds_recorded_load(source):
        return page({"title": f"{name}: recorded without a balancer", "simulation": recorded_load(source).simulation()})
    if source.is_dir() or holds_events(source):
        state, _ = state_of_run(source)
        return page({"title": f"{name}: eplb_runtime", "view": view_of(state)})
    require_readable(source, MOST_BYTES)
    return page({"title": f"{name}: simulated", "simulation": _simulation(source)})


def _simulation(source: Path) -> dict[str, Any]:
    try:
        found = json.loads(source.read_text())
        windows = found["windows"]
        policies = [_policy(summary, windows) for summary in found["policies"]]
        first = min(int(window["window"]) for window in windows)
        json.dumps(policies, allow_nan=False)  # NaN is no JSON
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(
            f"{source}: neither the folder of a run nor what `eplb-runtime simulate -o FILE.json` writes "
            f"({type(error).__name__}: {error})"
        ) from None
    return {
        "standing": "simulated",
        "subtitle": f"{len(policies)} policies, {len(policies[0]['imbalance'])} windows" if policies else "nothing",
        "told": "Each policy plans on the past and is judged on the next windows: max / mean rank load by window.",
        "first_window": first,
        "policies": policies,
    }


def _policy(summary: Mapping[str, Any], windows: list[Mapping[str, Any]]) -> dict[str, Any]:
    own = [window for window in windows if window["policy"] == summary["policy"]]
    return {
        "policy": str(summary["policy"]),
        "imbalance": [float(window["imbalance_mean"]) for window in own],
        "mean": float(summary["imbalance"]["mean"]),
        "worst": float(summary["imbalance"]["max"]),
        "balancedness": float(summary["balancedness"]["mean"]),
        "rebalances": int(summary["rebalances"]),
        "moved_bytes": sum(int(window["bytes_intra_node"]) + int(window["bytes_inter_node"]) for window in own),
        "step_seconds": float(summary["step_seconds"]),
    }


@dataclass(frozen=True)
class RecordedLoad:
    """A load that was recorded without a balancer, and its imbalance with experts in logical order.

    Args:
        ranks: EP size that it is of: the job's, or one of ``FEW_RANKS``; 1: nothing divides the experts.
        experts: E.
        steps: training steps in which tokens were recorded.
        imbalance_TL: float64 ``[T, L]``, max / mean rank load of each window.
        job: what the record says.
    """

    ranks: int
    experts: int
    steps: int
    imbalance_TL: NDArray[np.float64]
    job: RecordedJob

    def fields(self) -> dict[str, Any]:
        """Return the summary that ``eplb-runtime report --json`` prints."""
        windows, layers = self.imbalance_TL.shape
        imbalance = {"mean": self.imbalance_TL.mean(), "p95": np.percentile(self.imbalance_TL, 95)}
        return {
            "ranks": self.ranks,
            "layers": layers,
            "experts": self.experts,
            "windows": windows,
            "steps": self.steps,
            "imbalance": {name: float(x) for name, x in {**imbalance, "max": self.imbalance_TL.max()}.items()},
            "imbalance_by_layer": self.imbalance_TL.mean(axis=0).tolist(),
        }

    def simulation(self) -> dict[str, Any]:
        """Return what the page shows: a simulation in which nothing moves."""
        policy = {
            "policy": f"experts in logical order on {self.ranks} ranks",
            "imbalance": self.imbalance_TL.mean(axis=1).tolist(),
            "mean": float(self.imbalance_TL.mean()),
            "worst": float(self.imbalance_TL.max()),
            "balancedness": float((1 / self.imbalance_TL).mean()),
            "rebalances": 0,
            "moved_bytes": 0,
            "step_seconds": self.job.step_seconds,
        }
        return {
            "standing": "recorded",
            "subtitle": f"{self.steps} steps, {len(self.imbalance_TL)} windows",
            "told": "Nothing was moved: max / mean rank load by window, mean over layers.",
            "first_window": 0,
            "policies": [policy],
        }


def holds_recorded_load(folder: Path) -> bool:
    """Return whether a folder holds a recorded load and no job of a balancer."""
    return folder.is_dir() and holds_series(folder) and not holds_events(folder)


def recorded_load(folder: Path) -> RecordedLoad:
    """Read the folder of ``eplb.record``.

    Raises:
        FileError: a file is broken, or no token has been recorded yet.
        OSError: it cannot be read.
    """
    try:
        load_TLE, steps = read_series(folder)
        job = read_job(folder)
    except FileError as error:
        raise FileError(f"{folder}: {error}") from None
    has_tokens_T = load_TLE.any(axis=(1, 2))  # others are of steps in evaluation mode
    if not has_tokens_T.any():
        raise FileError(f"{folder}: no token has been recorded yet")
    load_TLE, num_steps = load_TLE[has_tokens_T], int(np.array(steps)[has_tokens_T].sum())
    layers, experts = load_TLE.shape[1:]
    own = job.ep_size if job.ep_size > 1 else job.ranks
    is_own = own > 1 and experts % own == 0
    ranks = own if is_own else next((ranks for ranks in FEW_RANKS if experts % ranks == 0), 1)
    imbalance_TL = predicted_imbalance(load_TLE.astype(np.float64), Placement.initial(layers, experts, ranks, 0))
    return RecordedLoad(ranks, experts, num_steps, imbalance_TL, job)
