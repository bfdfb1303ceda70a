"""State of a run: its records folded into a value of bounded size, which page, metrics, report and summary show.

A month of records leaves a state of the same size as an hour: totals are sums, the curve of imbalance becomes coarser,
and the newest decisions and troubles stay.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load.clock import ExpertShare
from ..load.series import RecordedJob
from ..utils.files import FileError
from .events_file import Record, RecordError, read_events

MOST_DECISIONS, MOST_TROUBLES = 400, 50
MOST_POINTS = 600
"""Of the curve; when there are more, each two become one."""
LONGEST_TEXT = 400
"""Of a reason or a cause."""
LINKS = ("inside a rank", "inside a node", "between nodes")

_PREDICTED = ("imbalance_before", "imbalance_after", "seconds_saved", "seconds_spent", "horizon_steps")
_PREDICTIONS = ("judged_plans", "judged_decisions", "predicted_seconds", "true_seconds")
_PHASES = ("prepare", "post", "transfer", "verify", "maps", "vote", "commit")
_ABORT_PHASES = ("planned", "prepared", "staged", "verified", "decided", "committed")


class RunState:
    """A run as its records tell it. `apply` may run on one thread while others hold `lock`, shortly.

    Attributes:
        version: number of records applied.
        job: the job's record; empty before it.
        step, time: of the newest record.
        standing, cause: ``"balancing"``, ``"suspended"`` (during a rollout), ``"paused"`` or ``"ended"``, and why.
        starts: how often the job was started on this run.
        measured: the newest ``LoadMeasured``, its imbalance, balancedness (1 / imbalance) and MaxVio as means over
            rows, float64 ``[L]``; None before.
        by_layer: float64 ``[3, L]``, imbalance before, predicted and bound of the newest plan; None before.
        predictions: of the newest decision, `_PREDICTIONS`; None: no plan could be judged yet.
        share: of a step in expert work.
        placement, placement_before: int64 ``[L, P]``, now and before the newest rebalance.
        placed_at: step of the newest rebalance, or of the start.
        decisions, troubles: rows of the newest, oldest first.
        curve: ``{"step", "steps", "mean", "worst", "start_mean", "start_worst", "step_seconds", "windows"}``.
        decided, moved_experts, moved_bytes, phase_seconds, aborts: totals by decision and reason, link and phase.
        saved_seconds: by the gate's model, measured imbalance compared with that of the initial placement.
        promised_seconds: predicted by the plans that were carried out, for the steps in which each was in use.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.version = self.step = self.starts = self.epoch = self.placed_at = 0
        self.job: Record = {}
        self.time = 0.0
        self.standing, self.cause = "balancing", ""
        self.measured: Record | None = None
        self.by_layer: NDArray[np.float64] | None = None
        self.predictions: dict[str, float] | None = None
        self.share = ExpertShare.before_measuring(None)
        self.placement: NDArray[np.int64] | None = None
        self.placement_before: NDArray[np.int64] | None = None
        self.decisions: deque[dict[str, Any]] = deque(maxlen=MOST_DECISIONS)
        self.troubles: deque[dict[str, Any]] = deque(maxlen=MOST_TROUBLES)
        self.curve: list[dict[str, float]] = []
        self._windows_of_a_point, self._promised_per_step = 1, 0.0
        self.decided: Counter[tuple[str, str]] = Counter()
        self.moved_experts: Counter[str] = Counter()
        self.moved_bytes: Counter[str] = Counter()
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)
        self.aborts: Counter[str] = Counter()
        self.rebalances = self.findings = self.pauses = self.measured_steps = self.rollouts = self.placed_replicas = 0
        self.pause_seconds = self.rollout_seconds = self.saved_seconds = self.promised_seconds = 0.0

    def apply(self, record: Record) -> None:
        """Fold a record into the state under ``lock``; set ``step`` and ``time`` and add 1 to ``version``. An event of
        a later version changes nothing. RecordError: not ours, or ahead of its job's; perhaps folded in part."""
        with self.lock:
            try:
                if self._fold(record):
                    self.step, self.time = int(record["step"]), float(record["time"])
                    self.version += 1
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
                self.version += 1
                raise RecordError(f"{record['event']}: {type(error).__name__}: {error}") from None

    def _fold(self, record: Record) -> bool:
        """Return False for an event of a later version."""
        match record["event"]:
            case "JobAttached":
                self._attached(record)
            case "LoadMeasured":
                self._load_measured(record)
            case "RebalancePlanned":
                self._planned(record)
            case "RebalanceCommitted":
                self._committed(record)
            case "RebalanceAborted":
                self.aborts[record["phase"] if record["phase"] in _ABORT_PHASES else "other"] += 1
                self._end_open_decision()
                self._trouble("dropped", f"{record['phase']}: {record['cause']}", record)
            case "BalancingPaused":
                self.standing, self.cause = "paused", str(record["cause"])[:LONGEST_TEXT]
                self.pauses += 1
                self._trouble("paused", record["cause"], record)
            case "BalancingResumed":
                self.standing, self.cause = "balancing", ""
                self._trouble("resumed", f"after {int(record['tries'])} tries", record)
            case "Suspended":
                self.standing, self.cause = "suspended", "a rollout"
                self.rollouts += 1
            case "SuspensionEnded":
                self.rollout_seconds += float(record["seconds"])
                self.standing, self.cause = "balancing", ""
            case "BalancingEnded":
                self.standing, self.cause = "ended", str(record["cause"])[:LONGEST_TEXT]
                if record["cause"] != "closed":
                    self._trouble("ended", record["cause"], record)
            case "GuardFinding":
                self.findings += 1
                self._trouble("found", record["finding"], record)
            case _:
                return False
        return True

    def _attached(self, record: Record) -> None:
        self._end_open_decision()  # of an earlier life
        self.job, self.share, self.starts = record, _share(record), self.starts + 1
        self.placement, self.placement_before, self.placed_at = record["placement"][0], None, int(record["step"])
        self.measured = self.by_layer = self.predictions = None
        self._promised_per_step = 0.0
        self.epoch = int(record["epoch"])
        self.standing, self.cause = "balancing", ""

    def _load_measured(self, record: Record) -> None:
        names = ("imbalance", "imbalance_start", "max_vio")
        imbalance, at_start, violation = (np.array(record[name], dtype=np.float64) for name in names)
        step, steps, seconds = int(record["step"]), int(record["steps"]), float(record["step_seconds"])
        if record["moe_share"] is not None:
            self.share = _share(record)
        now_L, start_L = imbalance.mean(axis=0), at_start.mean(axis=0)
        self.measured = {
            "max_vio": violation,
            "step": step,
            "steps": steps,
            "step_seconds": seconds,
            "load": record["load"][0],
            "rank_load": record["rank_load"],
            "imbalance": now_L,
            "imbalance_start": start_L,
            "balancedness": (1.0 / np.maximum(imbalance, 1.0)).mean(axis=0),
        }
        gain = float((start_L - now_L).mean()) / max(1.0, float(now_L.mean()))
        self.saved_seconds += steps * seconds * self.share.value * gain
        self.promised_seconds += steps * self._promised_per_step
        self.measured_steps += steps
        point = {"mean": now_L.mean(), "worst": now_L.max(), "start_mean": start_L.mean(), "start_worst": start_L.max()}
        point = {name: float(value) for name, value in point.items()}
        self._add_point({**point, "step": step, "steps": steps, "step_seconds": seconds, "windows": 1})

    def _planned(self, record: Record) -> None:
        self._end_open_decision()  # what it had moved by then stays
        row: dict[str, Any] = {"decision": record["decision"], "reason": str(record["reason"])[:LONGEST_TEXT]}
        row |= {name: None if record.get(name) is None else float(record[name]) for name in _PREDICTED}
        row |= {"step": int(record["step"]), "time": float(record["time"]), "code": record.get("code") or "other"}
        by_layer = record.get("by_layer")
        self.by_layer = None if by_layer is None else np.array(by_layer, dtype=np.float64)
        if record["judged_plans"] > 0:
            self.predictions = {name: float(record[name]) for name in _PREDICTIONS}
        self.decided[record["decision"], row["code"]] += 1
        self.phase_seconds["plan"] += float(record["plan_seconds"])
        self.decisions.append({**row, "outcome": "under way" if record["decision"] == "rebalance" else "stay"})

    def _committed(self, record: Record) -> None:
        node, pause = int(self.job["ranks_per_node"]), float(record["pause_seconds"])
        layer, _, source, destination = record["transfers"][0].T
        nbytes = np.array([*record["expert_bytes"], *[0] * self.job["layers"]], dtype=np.int64)[layer]
        link = np.where(source == destination, 0, np.where(source // node == destination // node, 1, 2))
        for number, name in enumerate(LINKS):
            self.moved_experts[name] += int((link == number).sum())
            self.moved_bytes[name] += int(nbytes[link == number].sum())
        for name in record["phase_seconds"].keys() & set(_PHASES):
            self.phase_seconds[name] += float(record["phase_seconds"][name])
        self.pause_seconds += pause
        is_whole = not record.get("left_layers")
        self.rebalances += is_whole
        self.placed_replicas += int(record["placed_replicas"])
        self.placed_at, self.epoch = int(record["step"]), int(record["epoch"])
        if not (self.decisions and self.decisions[-1]["outcome"] == "under way"):
            row: dict[str, Any] = {**dict.fromkeys(_PREDICTED), "decision": "restore", "reason": "a saved placement"}
            self.decisions.append({**row, "step": self.placed_at, "time": record["time"]})
        row = self.decisions[-1]
        if "moved_experts" not in row:  # else its first layers have moved
            self.placement_before, row["moved_experts"], row["pause_seconds"] = self.placement, 0, 0.0
        self.placement = record["placement"][0]
        row["moved_experts"] += int(record["moved_experts"])
        row["pause_seconds"] += pause
        row["outcome"] = "committed" if is_whole else "under way"
        horizon = row.get("horizon_steps") or self.job["horizon_steps"] or 1
        self._promised_per_step = (row.get("seconds_saved") or 0.0) / int(horizon)

    def _end_open_decision(self) -> None:
        if self.decisions and self.decisions[-1]["outcome"] == "under way":
            self.decisions[-1]["outcome"] = "dropped"

    def _trouble(self, kind: str, text: object, record: Record) -> None:
        self.troubles.append({"kind": kind, "text": str(text)[:LONGEST_TEXT], "step": int(record["step"])})

    def _add_point(self, point: dict[str, float]) -> None:
        if self.curve and self.curve[-1]["windows"] < self._windows_of_a_point:
            _merge(self.curve[-1], point)
            return
        self.curve.append(point)
        if len(self.curve) > MOST_POINTS:
            for first, second in zip(self.curve[::2], self.curve[1::2], strict=False):
                _merge(first, second)
            self.curve = self.curve[::2]
            self._windows_of_a_point *= 2


def state_of(records: Iterable[Record]) -> RunState:
    """Return a new state with all records folded in; a record that `RunState.apply` refuses is left out."""
    state = RunState()
    for record in records:
        with suppress(RecordError):
            state.apply(record)
    return state


def _merge(into: dict[str, float], point: Mapping[str, float]) -> None:
    """Add a point of the curve to another, weighted by their windows; the worst stay the worst."""
    total = into["windows"] + point["windows"]
    for name in ("mean", "start_mean", "step_seconds"):
        into[name] += (point[name] - into[name]) * point["windows"] / total
    for name in ("worst", "start_worst"):
        into[name] = max(into[name], point[name])
    into["steps"] += point["steps"]
    into["step"], into["windows"] = point["step"], total


def _share(record: Record) -> ExpertShare:
    return ExpertShare(float(record["moe_share"]), str(record["moe_share_source"]))


# -- the folder of a run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class JobRecord:
    """A recorded load, and what is known of the job that it is of.

    Args:
        load: ``[T, L, E]``, tokens of each logical expert, oldest window first.
        steps_T: training steps of each window; empty: unknown.
    """

    load: NDArray[Any]
    steps_T: Sequence[int] = ()
    job: RecordedJob = field(default_factory=RecordedJob)

    @property
    def steps_per_window(self) -> int:
        """Return the median of the windows' training steps; 0: unknown."""
        return median_high(self.steps_T) if len(self.steps_T) else 0

    def alike(self) -> JobRecord:
        """Return a copy with only the windows of `steps_per_window` steps: without a last one, and those of an earlier
        job. If the steps are unknown, all windows stay."""
        same_T = np.array([steps == self.steps_per_window for steps in self.steps_T] or [True] * len(self.load))
        return replace(self, load=self.load[same_T], steps_T=[self.steps_per_window] * int(same_T.sum()))


def state_of_run(run: Path) -> RunState:
    """Return the state of a run by its events on disk. FileError: no log, or of no job."""
    state = state_of(read_events(run))
    if not state.job:
        raise FileError(f"{run}: its log does not say what job it is of; is it whole?")
    return state
