"""What a run has come to: its records, folded into a state of bounded size that page, metrics and report all show.

An hour or a month of records leaves a state of the same size: totals are sums, the curve of imbalance gets coarser as
it gets longer, and of decisions and troubles the newest stay.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load.expert_clock import ExpertShare
from .records import JOB, Record, RecordError

MOST_DECISIONS = 400
MOST_TROUBLES = 50
MOST_POINTS = 600
"""Of the curve; when there are more, each two become one."""
LONGEST_TEXT = 400
"""Of a reason or a cause."""
LINKS = ("inside a rank", "inside a node", "between nodes")

_REASONS = (
    ("nothing to move", "nothing to move"),
    ("no gain", "no gain"),
    ("would save", "does not pay"),
    ("saves", "pays"),
    ("forecast imbalance", "imbalance falls"),
    ("mean imbalance", "imbalance falls"),  # in logs of earlier versions
    ("the planner is still being compiled", "compiling"),
)
_CAUSES = (
    ("checksum", "checksum"),
    ("memory", "memory"),
    ("no token", "no tokens"),
    ("declare", "declared load"),
    ("planner", "planner"),
    ("planning", "planner"),
    ("waited", "timeout"),
    ("timed out", "timeout"),
    ("timeout", "timeout"),
    ("connect", "connection"),
)

Fields = Mapping[str, Any]


class RunState:
    """A run as its records tell it. `apply` may run on one thread while others look, inside `locked`.

    Attributes:
        version: counts records, so that who looks again knows whether anything is new.
        job: its record; empty before.
        step: of the newest record.
        standing: ``"balancing"``, ``"suspended"`` (a rollout is under way), ``"paused"`` or ``"ended"``, and ``cause``,
            why.
        rollouts, rollout_seconds: suspensions, and the seconds of those that are over.
        starts: how often the job was started on this run.
        measured: the newest ``LoadMeasured``, its imbalance, balancedness (1 / imbalance) and MaxVio as means over
            rows, float64 ``[L]``; None before.
        planned: the newest ``RebalancePlanned``.
        predictions: ``{"judged_plans", "judged_decisions", "predicted_seconds", "true_seconds"}`` of the newest
            decision; None: no plan could be judged yet.
        share: of a step in expert work, as the newest measurement has it, or the job at its start.
        placement, placement_before: int64 ``[L, P]``, now and before the newest rebalance.
        placed_at: step of the newest rebalance, or of the start.
        decisions: newest last, one row for each that was planned or migrated.
        troubles: newest last: what was dropped, found, paused or ended.
        curve: ``{"step", "steps", "mean", "worst", "start_mean", "start_worst", "step_seconds"}``, oldest first.
        decided, moved_experts, moved_bytes, phase_seconds, aborts: totals by decision and reason, link, phase, and
            phase and cause.
        placed_replicas: replica slots that a rebalance gave another expert, in all.
        traffic_RR: int64 ``[R, R]``, bytes of experts from rank to rank.
        saved_seconds: as the gate's model has it, on the measured imbalance beside that of experts that never moved.
        promised_seconds: what the plans that were carried out were to save, each beside the placement before it, in
            the steps that it stood.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.version = 0
        self.job: Record = {}
        self.step = 0
        self.time = 0.0
        self.standing, self.cause = "balancing", ""
        self.starts = 0
        self.epoch = 0
        self.measured: Record | None = None
        self.planned: Record | None = None
        self.predictions: dict[str, float] | None = None
        self.share = ExpertShare.before_measuring(None)
        self.placement: NDArray[np.int64] | None = None
        self.placement_before: NDArray[np.int64] | None = None
        self.placed_at = 0
        self.decisions: deque[dict[str, Any]] = deque(maxlen=MOST_DECISIONS)
        self.troubles: deque[dict[str, Any]] = deque(maxlen=MOST_TROUBLES)
        self.curve: list[dict[str, float]] = []
        self._of_a_point = 1
        self._promised_per_step = 0.0
        self.decided: Counter[tuple[str, str]] = Counter()
        self.moved_experts: Counter[str] = Counter()
        self.moved_bytes: Counter[str] = Counter()
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)
        self.aborts: Counter[tuple[str, str]] = Counter()
        self.traffic_RR: NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self.placed_replicas = 0
        self.rebalances = self.findings = self.pauses = self.measured_steps = self.rollouts = 0
        self.rollout_seconds = 0.0
        self.pause_seconds = self.saved_seconds = self.promised_seconds = 0.0

    @contextmanager
    def locked(self) -> Iterator[RunState]:
        """Inside, nothing changes; not for long."""
        with self._lock:
            yield self

    def apply(self, record: Record) -> None:
        """Take a record in.

        Raises:
            RecordError: it contradicts the job; nothing has changed then but what was counted before.
        """
        take = self._TAKES.get(record["event"])
        if take is None:
            return  # of a later version
        with self._lock:
            try:
                take(self, record)
                self.step, self.time = int(record["step"]), float(record["time"])
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
                raise RecordError(f"{record['event']}: {type(error).__name__}: {error}") from None
            finally:
                self.version += 1

    # -- what each record says -------------------------------------------------------------------------------------

    def _attached(self, record: Record) -> None:
        shape = tuple(int(record[name]) for name in ("layers", "experts", "ranks", "slots_per_rank", "ranks_per_node"))
        layers, _, ranks, slots, node = shape
        placement = _array(record, "placement", layers, ranks * slots)
        if sum(record.get("layers_of_stage", [layers])) != layers:
            raise ValueError("stages of another model")
        if min(shape) < 1 or ranks % node:
            raise ValueError(f"no such job: {shape}")
        share = _share(record)
        if self.job and record["job"] == self.job["job"]:
            return  # the same job in its next file
        changed = tuple(self.job.get(n) for n in ("layers", "experts", "ranks")) != (layers, shape[1], ranks)
        if changed:
            self.traffic_RR = np.zeros((ranks, ranks), dtype=np.int64)
        self.job, self.starts = record, self.starts + 1
        self.placement, self.placement_before, self.placed_at = placement, None, int(record["step"])
        self.measured = self.planned = self.predictions = None
        self.share = share
        self._promised_per_step = 0.0
        self.epoch = int(record["epoch"])
        self.standing, self.cause = "balancing", ""

    def _load_measured(self, record: Record) -> None:
        layers, experts, ranks = (self.job[name] for name in ("layers", "experts", "ranks"))
        load, rank_load = _array(record, "load", layers, experts), record["rank_load"]
        imbalance = np.array(record["imbalance"], dtype=np.float64).reshape(-1, layers)
        at_start = np.array(record["imbalance_start"], dtype=np.float64).reshape(-1, layers)
        violation_L = None  # as in logs of earlier versions
        if "max_vio" in record:
            violation_L = np.array(record["max_vio"], dtype=np.float64).reshape(layers)
        steps, seconds = int(record["steps"]), _seconds(record["step_seconds"])
        if rank_load.shape != (2, layers, ranks) or not all(
            np.isfinite(values).all()
            for values in (imbalance, at_start, *([] if violation_L is None else [violation_L]))
        ):
            raise ValueError("a load of another job")
        if record.get("moe_share") is not None:  # none in logs of earlier versions
            self.share = _share(record)
        self.measured = {
            "max_vio": violation_L,
            "step": int(record["step"]),
            "steps": steps,
            "step_seconds": seconds,
            "load": load,
            "rank_load": rank_load,
            "imbalance": imbalance.mean(axis=0),
            "imbalance_start": at_start.mean(axis=0),
            "balancedness": (1.0 / np.maximum(imbalance, 1.0)).mean(axis=0),
        }
        now, start = imbalance.mean(axis=0), at_start.mean(axis=0)
        gain = float((start - now).mean()) / max(1.0, float(now.mean()))
        self.saved_seconds += steps * seconds * self.share.value * gain
        self.promised_seconds += steps * self._promised_per_step
        self.measured_steps += steps
        self._add_point(
            {
                "step": int(record["step"]),
                "steps": steps,
                "mean": float(now.mean()),
                "worst": float(now.max()),
                "start_mean": float(start.mean()),
                "start_worst": float(start.max()),
                "step_seconds": seconds,
            }
        )

    def _planned(self, record: Record) -> None:
        kind = _kind(record["reason"], _REASONS)
        row: dict[str, Any] = {"decision": record["decision"], "reason": str(record["reason"])[:LONGEST_TEXT]}
        for name in _OF_A_DECISION:
            value = record.get(name)
            row[name] = None if value is None else float(value)
        row["imbalance_start"] = None if self.measured is None else float(self.measured["imbalance_start"].mean())
        if record["decision"] not in ("rebalance", "stay"):
            raise ValueError(f"decision {record['decision']!r}")
        by_layer = record.get("by_layer")
        if by_layer is not None:
            by_layer = np.array(by_layer, dtype=np.float64).reshape(3, self.job["layers"])
        plan_seconds = _seconds(record["plan_seconds"])
        predictions = {name: float(record.get(name, 0)) for name in _PREDICTIONS}  # none in logs of earlier versions
        if not np.isfinite(list(predictions.values())).all():
            raise ValueError(f"predictions {predictions}")
        if predictions["judged_plans"] > 0:
            self.predictions = predictions
        self.planned = {**row, "by_layer": by_layer}
        self.decided[record["decision"], kind] += 1
        self.phase_seconds["plan"] += plan_seconds
        self.decisions.append({**row, "step": int(record["step"]), "time": float(record["time"]), "outcome": "stay"})
        if record["decision"] == "rebalance":
            self.decisions[-1]["outcome"] = "under way"

    def _committed(self, record: Record) -> None:
        layers, slots, node = (
            self.job["layers"],
            self.job["ranks"] * self.job["slots_per_rank"],
            self.job["ranks_per_node"],
        )
        placement = _array(record, "placement", layers, slots)
        pause = _seconds(record["pause_seconds"])
        phases = {name: _seconds(value) for name, value in record["phase_seconds"].items() if name in _PHASES}
        transfers = record["transfers"][0]
        layer, _, source, destination = transfers.T
        nbytes = np.array([*record["expert_bytes"], *[0] * layers], dtype=np.int64)[layer]
        link = np.where(source == destination, 0, np.where(source // node == destination // node, 1, 2))
        np.add.at(self.traffic_RR, (source, destination), np.where(source == destination, 0, nbytes))
        for number, name in enumerate(LINKS):
            self.moved_experts[name] += int((link == number).sum())
            self.moved_bytes[name] += int(nbytes[link == number].sum())
        for name, seconds in phases.items():
            self.phase_seconds[name] += seconds
        self.pause_seconds += pause
        self.rebalances += 1
        self.placed_replicas += int(record.get("placed_replicas", 0))  # logs of earlier versions have none
        self.placement_before, self.placement, self.placed_at = self.placement, placement, int(record["step"])
        self.epoch = int(record["epoch"])
        row = self._row_of(record)
        row.update(
            outcome="committed",
            moved_experts=int(record["moved_experts"]),
            moved_bytes=int(nbytes[link > 0].sum()),
            pause_seconds=pause,
        )
        horizon = row.get("horizon_steps") or self.job["horizon_steps"] or 1  # in logs of earlier versions: the job's
        self._promised_per_step = (row.get("seconds_saved") or 0.0) / max(1, int(horizon))

    def _aborted(self, record: Record) -> None:
        self.aborts[_kind(record["phase"], _ABORT_PHASES), _kind(record["cause"], _CAUSES)] += 1
        if self.decisions and self.decisions[-1]["step"] == record["step"]:
            self.decisions[-1]["outcome"] = "dropped"
        self._trouble("dropped", f"{record['phase']}: {record['cause']}", record)

    def _paused(self, record: Record) -> None:
        self.standing, self.cause = "paused", str(record["cause"])[:LONGEST_TEXT]
        self.pauses += 1
        self._trouble("paused", record["cause"], record)

    def _resumed(self, record: Record) -> None:
        self.standing, self.cause = "balancing", ""
        self._trouble("resumed", f"after {int(record['tries'])} tries", record)

    def _suspended(self, record: Record) -> None:
        self.standing, self.cause = "suspended", "a rollout"
        self.rollouts += 1

    def _suspension_ended(self, record: Record) -> None:
        self.rollout_seconds += _seconds(record["seconds"])
        self.standing, self.cause = "balancing", ""

    def _ended(self, record: Record) -> None:
        self.standing, self.cause = "ended", str(record["cause"])[:LONGEST_TEXT]
        if record["cause"] != "closed":
            self._trouble("ended", record["cause"], record)

    def _found(self, record: Record) -> None:
        self.findings += 1
        self._trouble("found", record["finding"], record)

    # -- small words -----------------------------------------------------------------------------------------------

    def _row_of(self, record: Record) -> dict[str, Any]:
        """Of the decision that a migration carries out; a restored placement had none."""
        if not (self.decisions and self.decisions[-1]["outcome"] == "under way"):
            row = dict.fromkeys(_OF_A_DECISION, None)
            row.update(decision="restore", reason="a saved placement", step=int(record["step"]), time=record["time"])
            self.decisions.append(row)
        return self.decisions[-1]

    def _trouble(self, kind: str, text: object, record: Record) -> None:
        said = {
            "kind": kind,
            "text": str(text)[:LONGEST_TEXT],
            "step": int(record["step"]),
            "time": float(record["time"]),
        }
        self.troubles.append(said)

    def _add_point(self, point: dict[str, float]) -> None:
        last = self.curve[-1] if self.curve else None
        if last is not None and last["windows"] < self._of_a_point:
            _merge(last, point)
            return
        self.curve.append({**point, "windows": 1})
        if len(self.curve) > MOST_POINTS:
            for first, second in zip(self.curve[::2], self.curve[1::2], strict=False):
                _merge(first, second)
            self.curve = self.curve[::2]
            self._of_a_point *= 2

    _TAKES: Mapping[str, Callable[[RunState, Record], None]] = {
        JOB: _attached,
        "LoadMeasured": _load_measured,
        "RebalancePlanned": _planned,
        "RebalanceCommitted": _committed,
        "RebalanceAborted": _aborted,
        "BalancingPaused": _paused,
        "BalancingResumed": _resumed,
        "Suspended": _suspended,
        "SuspensionEnded": _suspension_ended,
        "BalancingEnded": _ended,
        "GuardFinding": _found,
    }


_OF_A_DECISION = (
    "imbalance_before",
    "imbalance_after",
    "imbalance_bound",
    "plan_seconds",
    "seconds_saved",
    "seconds_spent",
    "horizon_steps",
    "moves",
)
_PREDICTIONS = ("judged_plans", "judged_decisions", "predicted_seconds", "true_seconds")
_PHASES = ("prepare", "post", "transfer", "verify", "maps", "vote", "commit")
_ABORT_PHASES = tuple((phase, phase) for phase in ("planned", "prepared", "staged", "verified", "decided", "committed"))


def state_of(records: Iterable[Record]) -> tuple[RunState, int]:
    """The state that records lead to, and how many of them were left out because they contradict the job."""
    state, left_out = RunState(), 0
    for record in records:
        try:
            state.apply(record)
        except RecordError:
            left_out += 1
    return state, left_out


def _merge(into: dict[str, float], point: Mapping[str, float]) -> None:
    """Two points of the curve, weighed by the windows that they stand for; the worst stay the worst."""
    windows = point.get("windows", 1)
    total = into["windows"] + windows
    for name in ("mean", "start_mean", "step_seconds"):
        into[name] += (point[name] - into[name]) * windows / total
    for name in ("worst", "start_worst"):
        into[name] = max(into[name], point[name])
    into["steps"] += point["steps"]
    into["step"], into["windows"] = point["step"], total


def _kind(text: object, known: Iterable[tuple[str, str]]) -> str:
    """One of a few words for a sentence: labels of metrics must stay few."""
    lowered = str(text).lower()
    return next((word for begins, word in known if begins in lowered), "other")


def _share(record: Record) -> ExpertShare:
    value, source = float(record["moe_share"]), str(record.get("moe_share_source", "assumed"))
    if not 0 <= value <= 1 or source not in ("measured", "given", "assumed"):
        raise ValueError(f"a share {value}, {source}")
    return ExpertShare(value, source)


def _seconds(value: Any) -> float:
    """One that is not a number would stay in a sum for ever, and a negative one would make it fall."""
    seconds = float(value)
    if not 0.0 <= seconds < np.inf:
        raise ValueError(f"{value} seconds")
    return seconds


def _array(record: Record, name: str, rows: int, columns: int) -> NDArray[np.int64]:
    array: NDArray[np.int64] = record[name][0]
    if array.shape != (rows, columns):
        raise ValueError(f"{name} of another job")
    return array
