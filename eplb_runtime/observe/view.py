"""What the page and the report show, as one JSON object: the state of a run in a form that a browser unpacks quickly.

Matrices go as base64 of little-endian int32 and float64; everything else as plain JSON, without numbers that JSON does
not know.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load.clock import Progress
from .state import LINKS, RunState
from .summary import expert_work_text, predictions_text

_JOB = (
    "job",
    "started",
    "package",
    "layers",
    "experts",
    "ranks",
    "slots_per_rank",
    "ranks_per_node",
    "world_size",
    "policy",
    "gate",
    "interval",
    "replica_slots",
    "horizon_steps",
)
MOST_LINKS = 64
"""Ranks up to which traffic is shown rank by rank; beyond, node by node."""


def view_of(state: RunState) -> dict[str, Any]:
    """The whole of it; see the page's script for who uses what."""
    with state.locked():
        measured, planned = state.measured, state.planned
        view = {
            "version": state.version,
            "job": {name: state.job.get(name) for name in _JOB},
            "starts": state.starts,
            "step": state.step,
            "time": state.time,
            "standing": state.standing,
            "cause": state.cause,
            "epoch": state.epoch,
            "placed_at": state.placed_at,
            "measured": None if measured is None else _measured(measured),
            "planned": None if planned is None else _planned(planned),
            "predictions": predictions_text(state.predictions),
            "moe_share": state.share.value,
            "expert_work": expert_work_text(state.share.value, state.share.source),
            "placement": _packed(state.placement),
            "placement_before": _packed(state.placement_before),
            "decisions": list(state.decisions),
            "troubles": list(state.troubles),
            "curve": _columns(state.curve),
            "traffic": _traffic(state),
            "totals": totals_of(state),
        }
    return _finite(view)


def totals_of(state: RunState) -> dict[str, Any]:
    """The sums of a run; inside ``locked``."""
    return {
        "decisions": sum(state.decided.values()),
        "decided": [{"decision": d, "reason": r, "count": n} for (d, r), n in sorted(state.decided.items())],
        "rebalances": state.rebalances,
        "moved_experts": {link: state.moved_experts[link] for link in LINKS},
        "moved_bytes": {link: state.moved_bytes[link] for link in LINKS},
        "placed_replicas": state.placed_replicas,
        "pause_seconds": state.pause_seconds,
        "phase_seconds": dict(sorted(state.phase_seconds.items())),
        "aborts": [{"phase": p, "cause": c, "count": n} for (p, c), n in sorted(state.aborts.items())],
        "guard_findings": state.findings,
        "pauses": state.pauses,
        "rollouts": state.rollouts,
        "rollout_seconds": state.rollout_seconds,
        "measured_steps": state.measured_steps,
        "saved_seconds": state.saved_seconds,
        "promised_seconds": state.promised_seconds,
    }


def as_json(view: dict[str, Any]) -> bytes:
    return json.dumps(view, allow_nan=False, separators=(",", ":")).encode()


def progress_view(progress: Progress) -> dict[str, Any]:
    found: dict[str, Any] = _finite(
        {"step": progress.step, "step_seconds": progress.step_seconds, "idle_seconds": progress.idle_seconds}
    )
    return found


def _measured(measured: dict[str, Any]) -> dict[str, Any]:
    plain = {name: measured[name] for name in ("step", "steps", "step_seconds")}
    arrays = {name: _packed(measured[name]) for name in ("load", "rank_load", "imbalance", "imbalance_start")}
    return {**plain, **arrays}


def _planned(planned: dict[str, Any]) -> dict[str, Any]:
    return {**planned, "by_layer": _packed(planned["by_layer"])}


def _traffic(state: RunState) -> dict[str, Any]:
    bytes_RR = state.traffic_RR
    if len(bytes_RR) <= MOST_LINKS:
        return {"of": "rank", "bytes": _packed(bytes_RR.astype(np.float64))}
    node = int(state.job["ranks_per_node"])
    nodes = len(bytes_RR) // node
    bytes_NN = bytes_RR.reshape(nodes, node, nodes, node).sum(axis=(1, 3))
    return {"of": "node", "bytes": _packed(bytes_NN.astype(np.float64))}


def _columns(curve: list[dict[str, float]]) -> dict[str, list[float]]:
    names = ("step", "mean", "worst", "start_mean", "start_worst", "step_seconds")
    return {name: [round(point[name], 6) for point in curve] for name in names}


def _packed(array: NDArray[Any] | None) -> dict[str, Any] | None:
    if array is None:
        return None
    whole = array.dtype.kind == "i" and (not array.size or np.abs(array).max() < 2**31)
    kind, content = ("i4", array.astype("<i4")) if whole else ("f8", array.astype("<f8"))
    return {"kind": kind, "shape": list(array.shape), "data": base64.b64encode(content.tobytes()).decode()}


def _finite(value: Any) -> Any:
    """With None for what JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return value
