"""The page as one file that needs nothing else: of a finished run, or of what `simulate` has played."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..utils.files import FileError, require_readable
from .event_log import holds_events, read_events
from .recorded import RecordedLoad, holds_recorded_load, recorded_load
from .state import RunState, state_of
from .view import view_of

SCRIPTS = ("draw.js", "panels.js", "page.js")
MOST_BYTES = 1 << 30
"""Of what `simulate` wrote."""


def state_of_run(run: Path) -> tuple[RunState, int]:
    """What a run has come to by its events on disk, and how many of them could not be used.

    Raises:
        FileError: there is no log, or it tells of no job.
        OSError: it cannot be read.
    """
    state, left_out = state_of(read_events(run))
    if not state.job:
        raise FileError(f"{run}: its log does not say what job it is of; is it whole?")
    return state, left_out


def report_of(source: Path) -> str:
    """The report of a run's folder, of a recorded load, or of the ``.json`` that ``simulate -o`` writes, as HTML.

    Raises:
        FileError: it is none of them.
        OSError: it cannot be read.
    """
    if holds_recorded_load(source):
        title = f"{source.resolve().name}: recorded without a balancer"
        return _page({"title": title, "simulation": _recording(recorded_load(source))})
    if source.is_dir() or holds_events(source):
        state, _ = state_of_run(source)
        return _page({"title": f"{source.resolve().name}: eplb_runtime", "view": view_of(state)})
    require_readable(source, MOST_BYTES)
    return _page({"title": f"{source.name}: simulated", "simulation": _simulation(source)})


def _page(told: Mapping[str, Any]) -> str:
    """The page with its style, its scripts and what it is to show inside. Nothing else may run in it."""
    style, *scripts = (asset(name) for name in ("page.css", *SCRIPTS))
    data = json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    hashes = " ".join(_hash(script) for script in scripts)
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {hashes}; img-src data:; base-uri 'none'"
    page = asset("index.html")
    tags = "\n".join(f'<script src="{name}"></script>' for name in SCRIPTS)
    inside = "\n".join(f"<script>{script}</script>" for script in scripts)
    head = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    for old, new in (
        ('<meta charset="utf-8">', head),
        ('<link rel="stylesheet" href="page.css">', f"<style>{style}</style>"),
        (tags, f'<script type="application/json" id="data">{data}</script>\n{inside}'),
    ):
        before, found, after = page.partition(old)
        assert found, f"{old!r} is not in the page"
        page = before + new + after
    return page


def asset(name: str) -> str:
    """A part of the page, as text."""
    return (files(__package__) / "page" / name).read_text()


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _simulation(source: Path) -> dict[str, Any]:
    """What the page shows of a simulation."""
    try:
        found = json.loads(source.read_text())
        windows = found["windows"]
        policies = [_policy(summary, windows) for summary in found["policies"]]
        first = min(int(window["window"]) for window in windows)
        json.dumps(policies, allow_nan=False)  # a browser knows no numbers that are none
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(
            f"{source}: neither the folder of a run nor what `eplb-runtime simulate -o FILE.json` writes "
            f"({type(error).__name__}: {error})"
        ) from None
    told = "Each policy plans on the past and is judged on the windows that come next: max / mean rank load by window."
    return {
        "title": f"{len(policies)} policies, {len(policies[0]['imbalance'])} windows" if policies else "nothing",
        "told": told,
        "first_window": first,
        "policies": policies,
    }


def _recording(recorded: RecordedLoad) -> dict[str, Any]:
    """What the page shows of a recorded load: as of a simulation in which nothing moves."""
    by_window = recorded.imbalance_TL.mean(axis=1)
    windows = len(by_window)
    name = f"experts in logical order on {recorded.ranks} ranks"
    return {
        "title": f"{recorded.steps} steps, {windows} windows",
        "told": "Nothing was moved: max / mean rank load by window, mean over layers.",
        "first_window": 0,
        "policies": [
            {
                "policy": name,
                "imbalance": by_window.tolist(),
                "steps": [recorded.job.step_seconds] * windows,
                "mean": float(by_window.mean()),
                "worst": float(recorded.imbalance_TL.max()),
                "balancedness": float((1 / recorded.imbalance_TL).mean()),
                "rebalances": 0,
                "moved_slots": 0,
                "moved_bytes": 0,
                "step_seconds": recorded.job.step_seconds,
            }
        ],
    }


def _policy(summary: Mapping[str, Any], windows: list[Mapping[str, Any]]) -> dict[str, Any]:
    own = [window for window in windows if window["policy"] == summary["policy"]]
    return {
        "policy": str(summary["policy"]),
        "imbalance": [float(window["imbalance_mean"]) for window in own],
        "steps": [float(window["step_seconds"]) for window in own],
        "mean": float(summary["imbalance"]["mean"]),
        "worst": float(summary["imbalance"]["max"]),
        "balancedness": float(summary["balancedness"]["mean"]),
        "rebalances": int(summary["rebalances"]),
        "moved_slots": sum(int(window["moved_slots"]) for window in own),
        "moved_bytes": sum(int(window["bytes_intra_node"]) + int(window["bytes_inter_node"]) for window in own),
        "step_seconds": float(summary["step_seconds"]),
    }
