"""The page of a run as one HTML file: served while the job runs, or with its data inside (a report)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load.series import holds_series
from ..utils.files import FileError
from .events_file import holds_events
from .run_folder import state_of_run
from .run_state import LINKS, RunState
from .summary import expert_work_text, predictions_text, summary_of, summary_text

SCRIPTS = ("draw.js", "page.js")
_JOB = ("started", "package", "layers", "experts", "ranks", "slots_per_rank", "policy", "interval", "replica_slots")
_STATE = ("version", "starts", "step", "standing", "cause", "epoch", "placed_at")
_TOTALS = ("rebalances", "placed_replicas", "pause_seconds", "rollouts", "rollout_seconds", "saved_seconds")


def page(told: Mapping[str, Any] | None = None) -> str:
    """Return the page with its style and scripts inside; nothing else may run in it.

    Args:
        told: what a report shows; None: the page asks its server.
    """
    style, *scripts = ((files(__package__) / "page" / name).read_text() for name in ("page.css", *SCRIPTS))
    hashes = " ".join(_hash(script) for script in scripts)
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {hashes}; connect-src 'self'; img-src data:"
    head = f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">"
    data = ""
    if told is not None:
        content = json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        data = f'<script type="application/json" id="data">{content}</script>\n'
    found = (files(__package__) / "page" / "page.html").read_text()
    for old, new in (
        ('<link rel="stylesheet" href="page.css">', f"{head}\n<style>{style}</style>"),
        (f'<script src="{SCRIPTS[0]}"></script>', f"{data}<script>{scripts[0]}</script>"),
        (f'<script src="{SCRIPTS[1]}"></script>', f"<script>{scripts[1]}</script>"),
    ):
        before, _, after = found.partition(old)
        found = before + new + after
    return found


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
        found: dict[str, Any] = finite(
            {name: getattr(state, name) for name in _STATE}
            | {
                "job": {name: state.job.get(name) for name in _JOB},
                "measured": measured,
                "predictions": predictions_text(state.predictions),
                "expert_work": expert_work_text(state.share.value, state.share.source),
                "placement": _packed(state.placement),
                "placement_before": _packed(state.placement_before),
                "decisions": list(state.decisions),
                "troubles": list(state.troubles),
                "curve": {name: [round(point[name], 6) for point in state.curve] for name in curve},
                "totals": {
                    **{name: getattr(state, name) for name in _TOTALS},
                    "decisions": sum(state.decided.values()),
                    "moved_experts": {link: state.moved_experts[link] for link in LINKS},
                    "moved_bytes": {link: state.moved_bytes[link] for link in LINKS},
                    "phase_seconds": dict(state.phase_seconds),
                },
            }
        )
    return found


def _packed(array: NDArray[Any] | None) -> dict[str, Any] | None:
    if array is None:
        return None
    is_whole = array.dtype.kind == "i" and (not array.size or np.abs(array).max() < 2**31)
    kind, content = ("i4", array.astype("<i4")) if is_whole else ("f8", array.astype("<f8"))
    return {"kind": kind, "shape": list(array.shape), "data": base64.b64encode(content.tobytes()).decode()}


def finite(value: Any) -> Any:
    """Return a value as JSON gives it back, with None in place of numbers that JSON does not have."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


# -- reports ---------------------------------------------------------------------------------------------------------


def report_of(source: Path) -> tuple[str, dict[str, Any], str]:
    """Return the report of a run's folder: the page, and the summary as JSON and in words.

    Raises:
        FileError: it is none.
        OSError: it cannot be read.
    """
    if source.is_dir() and holds_series(source) and not holds_events(source):
        raise FileError(f"{source}: recorded without a balancer: eplb-runtime assess {source} says its imbalance")
    state = state_of_run(source)
    summary = summary_of(state)
    html = page({"title": f"{source.resolve().name}: eplb_runtime", "view": view_of(state)})
    return html, summary, summary_text(summary, source)
