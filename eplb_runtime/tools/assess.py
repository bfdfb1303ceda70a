"""Would balancing pay? A recorded load is planned on its past, judged on what came next, and weighed in seconds.

`simulate` plays the series and says what moves cost. This module says what is assumed of a job where its record says
nothing, by how much a step would be shorter, and the verdict in words. No file formats and no printing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load.series import RecordedJob, holds_series, read_job, read_series
from ..observe.events_file import holds_events
from ..observe.page import state_of_run
from ..planner.cost import HYSTERESIS
from ..planner.evaluate import predicted_imbalance
from ..planner.terms import Gate
from ..topology import DEFAULT_INTER_NODE_BANDWIDTH, DEFAULT_INTRA_NODE_BANDWIDTH, Topology
from ..utils.files import FileError
from ..utils.tables import counted
from .formats.megatron import trace_files
from .formats.slime import rollout_files
from .simulate import Asked, PolicyRun, Series, StepModel, num_replans, simulate, start_placement

FloatArray = NDArray[np.float64]

MOE_SHARE, LOW_SHARE, HIGH_SHARE = 0.4, 0.2, 0.6
"""Shares of a step in expert work that are shown where nobody says one: the middle one decides."""
LEAST_SAVED = 0.01
"""Of a step: less is not worth a balancer, nor a replica slot."""
GATES: tuple[Gate, ...] = ("payoff", "always")
"""The default one, and one that is advised only where it saves `SURELY_MORE`: with few or very different windows the
default holds back moves that would have paid."""
SURELY_MORE = 0.02
"""Share of a step, once moving is paid: of two gates that are as good, one is better by chance."""
CLOSE = 0.95
"""Of the lowest imbalance that moved homes can have: they have it, nearly."""
LEAST_INTERVALS = 3
"""One is planned on, two are judged at least."""
MOST_INTERVALS = 20
"""Of a longer record, the newest are judged."""
HORIZON_INTERVALS = 10
"""Over at least so many plans the moves of the first are spread: a longer job has them once, too."""
DEFAULT_INTERVALS = 20
"""Into so many a series is cut that does not say how often to plan,"""
FEW_INTERVALS, SHORT_INTERVAL = 5, 10
"""or into fewer of up to so many steps, down to five intervals."""
STEP_CHOICES = 65536
"""(token, choice) pairs of a rank in a step and a layer: 8,192 tokens that go to eight experts each."""
STEP_SECONDS = 1.0
STALL_SECONDS = 0.05
EXPERT_PARAMETERS = 3 * 7168 * 2048
"""DeepSeek-V3's."""
CPU_BANDWIDTH = 1.0
"""GB/s between the ranks of a job on CPUs."""


@dataclass(frozen=True)
class Given:
    """What the asker says of the job; None: what its record says, or else what is assumed.

    Args:
        ranks, ranks_per_node: of the EP group.
        every: training steps between plans.
        steps_per_window: training steps that a window of the series stands for.
        step_seconds: of a training step, as the job is now.
        moe_share: share of that step in expert work, dispatch to combine, in (0, 1].
        expert_parameters: numbers in one expert's weights.
        optimizer_bytes: bytes that the optimizer keeps for one expert.
        intra_node_bandwidth, inter_node_bandwidth: GB/s of a rank.
        stall_seconds: cost of a rebalance besides its bytes.
        replica_slots: of a rank, in the second plan that is tried; 0: homes alone are tried; None: 1, or 0 where the
            framework takes none.
    """

    ranks: int | None = None
    ranks_per_node: int | None = None
    every: int | None = None
    steps_per_window: int | None = None
    step_seconds: float | None = None
    moe_share: float | None = None
    expert_parameters: int | None = None
    optimizer_bytes: int | None = None
    intra_node_bandwidth: float | None = None
    inter_node_bandwidth: float | None = None
    stall_seconds: float | None = None
    replica_slots: int | None = None


@dataclass(frozen=True)
class Recorded:
    """A series, and what is known of the job that it is of.

    Args:
        load: float64 ``[T, L, E]``, oldest first.
        steps_per_window: 0: unknown.
        job: what the record says.
        imbalance: max / mean rank load while ``job.step_seconds`` was measured; 0: that of experts in logical order.
        bandwidths: GB/s inside nodes and between them, as the job measured them; 0: unknown.
        left_out: number of windows of other numbers of steps, which ``load`` is without.
    """

    load: FloatArray
    steps_per_window: int = 0
    job: RecordedJob = field(default_factory=RecordedJob)
    imbalance: float = 0.0
    bandwidths: tuple[float, float] = (0.0, 0.0)
    left_out: int = 0

    @property
    def takes_replicas(self) -> bool:
        """Return whether the job's framework can hold replicas."""
        return not self.job.takes_no_replicas


@dataclass(frozen=True)
class Assumed:
    """A figure that nobody measured: its name, its value as the option takes it, and the option that sets it."""

    what: str
    value: float
    option: str


@dataclass(frozen=True)
class Placing:
    """One way to place experts, judged.

    Args:
        name: "as it is", "homes moved" or "with N replica slot(s)".
        imbalance: max / mean rank load, mean over judged windows and layers.
        worst: its 95th percentile.
        expert_seconds: of a step in expert work, relative to "as it is".
        step_saved: share of a step that it takes less, replicas' refresh counted.
        refresh_seconds: of a step, for replicas.
        move_seconds: of a plan on average; plans that move nothing count, and the first one, from experts in logical
            order, as one of ``HORIZON_INTERVALS`` at least.
        rebalances, plans: how many plans moved something, and how many were made.
        gate: of the plans, as `BalancerConfig` takes it.
        gained: share of a step that this gate saves more than the default one, moving paid.
    """

    name: str
    imbalance: float
    worst: float
    expert_seconds: float = 1.0
    step_saved: float = 0.0
    refresh_seconds: float = 0.0
    move_seconds: float = 0.0
    rebalances: int = 0
    plans: int = 0
    gate: Gate = "payoff"
    gained: float = 0.0


@dataclass(frozen=True)
class Assessment:
    """The verdict and what it rests on.

    Args:
        pays: None: the record cannot say.
        ranks, windows: EP size, and windows that were judged.
        interval: training steps between plans.
        now, homes, replicas: the ways to place experts; None: not judged.
        best: the one that ``step_saved`` and the advice are of.
        saved: share of a step that it takes less: as assumed or given, at least and at most.
        shares: the shares of a step in expert work that these three are for.
        share_source: where they are from: "given", "measured" (recorded) or "assumed".
        measured_as: of a measured share: where it differs from the share as it was measured, that one, too.
        assumed: every figure that was neither recorded nor given.
        verdict, advice: a sentence that says whether it pays, and what to do next.
        left_out: number of recorded windows that are of other numbers of steps than most, and were not judged.
        notes: sentences on what is compared, said ahead of the answer.
    """

    pays: bool | None
    ranks: int
    interval: int
    assumed: tuple[Assumed, ...]
    verdict: str
    advice: str
    windows: int = 0
    now: Placing | None = None
    homes: Placing | None = None
    replicas: Placing | None = None
    best: Placing | None = None
    saved: tuple[float, float, float] | None = None
    shares: tuple[float, float, float] | None = None
    share_source: str = "assumed"
    measured_as: str = "measured"
    left_out: int = 0
    notes: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """As ``eplb-runtime assess --json`` prints it; what was not judged is null."""
        ways = {"now": self.now, "homes": self.homes, "replicas": self.replicas}
        saved = (None, None, None) if self.saved is None else self.saved
        return {
            "pays": self.pays,
            "imbalance": {name: None if way is None else way.imbalance for name, way in ways.items()},
            "step_saved": dict(zip(("share", "low", "high"), saved, strict=True)),
            "move_seconds": None if self.best is None else self.best.move_seconds,
            "assumed": [{"what": one.what, "value": one.value, "option": one.option} for one in self.assumed],
            "advice": self.advice if self.pays is not None else f"{self.verdict} {self.advice}",
        }

    def paragraph(self) -> str:
        """The answer in words, on one line."""
        if self.now is None or self.homes is None or self.best is None or self.saved is None or self.shares is None:
            return f"{self.verdict} {self.advice}"
        ways = f"with homes moved {self.homes.imbalance:.2f}x"
        if self.replicas is not None:
            ways += f", {self.replicas.name} {self.replicas.imbalance:.2f}x"
        share, low, high = self.saved
        word, sign = ("less", 1) if share >= 0 else ("more", -1)
        least, most = sorted((sign * low, sign * high))
        span = "" if low == high else f" ({_least_to_most(least, most)} for {_span(self.shares[1:])})"
        work = f"If {self.shares[0]:.0%} of a step is expert work"
        if self.share_source == "measured":
            work = f"With {self.shares[0]:.0%} of a step in expert work ({self.measured_as})"
        notes = "".join(f"{note} " for note in self.notes)
        return (
            f"{notes}{self.ranks} ranks: the busiest rank has {self.now.imbalance:.2f}x the mean load; {ways} (planned "
            f"on the past, judged on what came next, {self.windows} windows). {work}, a step takes "
            f"{_percent(sign * share)} {word}{span}; moving costs {_seconds(self.best.move_seconds)} every "
            f"{_steps(self.interval)}. {self.verdict} {self.advice}"
        ).replace("%", " %")


def recorded(path: Path, load: FloatArray) -> Recorded:
    """A load that was read from ``path``, with what its folder says of the job: the folder of a run, of
    ``eplb.record``, of Megatron's router trace or of slime's rollouts. Anything else says nothing.

    Raises:
        FileError: a file of the folder is broken.
        OSError: it cannot be read.
    """
    files = trace_files(path if path.is_dir() else path.parent)
    if path in files or (path.is_dir() and (files or rollout_files(path))):  # Megatron trains on slime's rollouts
        return Recorded(load, 1, RecordedJob(ranks=len(files) if path.is_dir() else 0, takes_no_replicas=1))
    if not path.is_dir() or not holds_series(path):
        return Recorded(load)
    job, steps_T = read_job(path), read_series(path)[1]
    steps = median_high(steps_T)
    left_out = 0
    if len(steps_T) == len(load):  # a last window may be of fewer steps, and windows of an earlier job of others
        same_T = np.array(steps_T) == steps
        load, left_out = load[same_T], int((~same_T).sum())
    found = Recorded(load, steps, job, left_out=left_out)
    if not holds_events(path):
        return found
    try:
        state, _ = state_of_run(path)
    except FileError:
        return found
    # A class of links that the job did not have was not measured.
    intra = state.job["intra_node_bandwidth"] / 1e9 if job.ranks_per_node > 1 else 0.0
    inter = state.job["inter_node_bandwidth"] / 1e9 if job.ranks > job.ranks_per_node > 0 else 0.0
    found = replace(found, bandwidths=(intra, inter))
    if state.measured is None:
        return found
    step_seconds = float(state.measured["step_seconds"])
    job = replace(job, step_seconds=step_seconds)
    if state.share.source == "measured":  # of the same time as the seconds of a step
        job = replace(job, expert_seconds=state.share.value * step_seconds)
    return replace(found, job=job, imbalance=float(state.measured["imbalance"].mean()))


def count_plans(recorded: Recorded, given: Given) -> int:
    """How many plans `assess` makes, for whoever shows how far it is; 0: the record cannot say whether it pays."""
    settled = _settle(recorded, given)
    if _why_not(recorded.load, settled)[0]:
        return 0
    windows = len(_judged_load(recorded.load, settled))
    return num_replans(windows, settled.every_windows) * (1 + len(GATES) * (2 if settled.replica_slots else 1))


def assess(recorded: Recorded, given: Given, on_progress: Callable[[], None] = lambda: None) -> Assessment:
    """Would balancing have paid in the steps that were recorded?

    Experts stay in logical order, or their homes move, or each rank has replica slots besides; each plan sees the past
    alone and is judged on the windows until the next. Both ways to move are tried with the default gate and with
    ``"always"``. Expert work takes ``moe_share`` of a step as the job is now, and grows with the busiest rank's tokens,
    as for the gate of a running job.

    Args:
        recorded: the series.
        given: what the asker says.
        on_progress: called after each plan.

    Raises:
        PlanError: the load cannot be planned for.
        ValueError: the ranks of a node do not divide the ranks, or a bandwidth is not positive.
    """
    settled = _settle(recorded, given)
    why, advice = _why_not(recorded.load, settled)
    if why:
        return Assessment(
            None, settled.ranks, settled.interval, settled.assumed, why, advice, left_out=recorded.left_out
        )
    measured_as, before = "measured", settled.moe_share
    settled, model, now_seconds = _calibrated(recorded, settled)
    if f"{settled.moe_share:.0%}" != f"{before:.0%}":
        measured_as = f"worked out from {before:.0%} measured, with other imbalance"
    topology = settled.topology
    series = Series(_judged_load(recorded.load, settled), settled.every_windows, None, settled.steps_per_window)
    experts = series.load.shape[2]
    homes = experts // settled.ranks
    if settled.replica_slots > experts - homes:
        raise ValueError(
            f"--replica-slots {settled.replica_slots}: a rank has homes for {homes} of {experts} experts; give at most "
            f"{experts - homes}"
        )

    def play(policy: str, slots_per_rank: int, gate: Gate = "payoff") -> PolicyRun:
        return simulate(
            series,
            topology,
            slots_per_rank=slots_per_rank,
            policies=[policy],
            asked=Asked(gate=gate),
            step_model=model,
            on_progress=on_progress,
        )[0]

    static = play("static", homes)
    slots = settled.replica_slots
    refresh = model.refresh_seconds(series.load.shape[1], slots, topology)
    named = f"with {'one' if slots == 1 else slots} replica slot{'s' if slots > 1 else ''}"

    def best_gate(name: str, slots_per_rank: int, refresh_seconds: float = 0.0) -> Placing:
        """With the default gate unless another one saves more."""
        ways = [
            _placing(
                name, play("incremental", slots_per_rank, gate), static, settled, (refresh_seconds, now_seconds), gate
            )
            for gate in GATES
        ]
        moving = [way.move_seconds / settled.interval / now_seconds for way in ways]
        best, gained = ways[0], SURELY_MORE
        for way, spent in zip(ways[1:], moving[1:], strict=True):
            more = way.step_saved - spent - (ways[0].step_saved - moving[0])
            if more > gained and way.step_saved > HYSTERESIS * spent:
                best, gained = replace(way, gained=more), more
        return best

    steps = int(recorded.load.any(axis=(1, 2)).sum()) * settled.steps_per_window
    total_TL = series.load.sum(axis=2)
    hottest = float((series.load.max(axis=2) * settled.ranks / np.maximum(total_TL, 1)).mean())
    now = _placing("as it is", static, static, settled, (0.0, now_seconds))
    by_homes = best_gate("homes moved", homes)
    by_replicas = best_gate(named, homes + slots, refresh) if slots else None
    found = _weigh(settled, now_seconds, steps, len(static.windows), hottest, now, by_homes, by_replicas)
    return replace(found, left_out=recorded.left_out, notes=_notes(recorded, settled), measured_as=measured_as)


@dataclass(frozen=True)
class _Settled:
    """Every figure that the answer rests on; which of them were assumed."""

    topology: Topology
    interval: int
    steps_per_window: int
    ranks_of_load: int
    step_seconds: float
    moe_share: float
    shares: tuple[float, float, float]
    share_source: str
    expert_parameters: int
    expert_bytes: int
    optimizer_bytes: int
    stall_seconds: float
    replica_slots: int
    was_on_one_rank: bool
    assumed: tuple[Assumed, ...]

    @property
    def ranks(self) -> int:
        return self.topology.num_ranks

    @property
    def every_windows(self) -> int:
        return self.interval // self.steps_per_window

    @property
    def most_windows(self) -> int:
        return (MOST_INTERVALS + 1) * self.every_windows


def _settle(recorded: Recorded, given: Given) -> _Settled:
    job, assumed = recorded.job, list[Assumed]()

    def settle(option: str, known: Any, default: Any, what: str) -> Any:
        """The figure that was given, else what was recorded, else a default, which is noted."""
        chosen = getattr(given, option.removeprefix("--").replace("-", "_"))
        if chosen is None and not known:
            assumed.append(Assumed(what, default, option))
        return chosen if chosen is not None else known or default

    windows, _, experts = recorded.load.shape
    fitting = next((ranks for ranks in (8, 4, 2) if experts % ranks == 0), 1)
    ranks = settle("--ranks", job.ep_size if job.ep_size > 1 else job.ranks, fitting, "ranks")
    node = 0
    if ranks <= max(1, job.ranks_per_node):
        node = ranks
    elif job.ranks > job.ranks_per_node and ranks % max(1, job.ranks_per_node) == 0:
        node = job.ranks_per_node  # a job on one node does not say how many ranks another may have there
    whole_nodes = next(size for size in range(min(ranks, 8), 0, -1) if ranks % size == 0)
    node = settle("--ranks-per-node", node, whole_nodes, "ranks of a node")
    choices = float(recorded.load.sum(axis=2).mean()) / ranks
    steps = max(1, round(choices / STEP_CHOICES))
    steps = settle("--steps-per-window", recorded.steps_per_window, steps, "steps of a window")
    cut = steps * max(1, windows // DEFAULT_INTERVALS, min(SHORT_INTERVAL // steps, windows // FEW_INTERVALS))
    interval = settle("--every", job.interval, cut, "steps between plans")
    interval = steps * max(1, interval // steps)  # plans are made between windows
    seconds = settle("--step-seconds", job.step_seconds, STEP_SECONDS, "seconds of a step")
    share = settle("--moe-share", _recorded_share(job), MOE_SHARE, "share of a step in expert work")
    parameters = settle("--expert-parameters", job.expert_parameters, EXPERT_PARAMETERS, "parameters of an expert")
    known = job.expert_bytes and job.expert_parameters
    weights = round(parameters * job.expert_bytes / job.expert_parameters) if known else 2 * parameters
    of_adam = (8 if weights >= 4 * parameters else 12) * parameters  # float32 moments, and weights beside bfloat16 ones
    state = settle("--optimizer-bytes", job.optimizer_bytes, of_adam, "bytes of an expert's optimizer state")
    giga, intra, inter = 1e9, *recorded.bandwidths
    defaults = (DEFAULT_INTRA_NODE_BANDWIDTH / giga, DEFAULT_INTER_NODE_BANDWIDTH / giga)
    if job.device == "cpu":
        defaults = (CPU_BANDWIDTH, CPU_BANDWIDTH)
    intra = settle("--intra-node-bandwidth", intra, defaults[0], "GB/s of a rank inside its node")
    if ranks > node:
        inter = settle("--inter-node-bandwidth", inter, defaults[1], "GB/s of a rank to other nodes")
    stall = settle("--stall-seconds", None, STALL_SECONDS, "seconds of a rebalance besides its bytes")
    source = "given" if given.moe_share is not None else "measured" if _recorded_share(job) else "assumed"
    return _Settled(
        topology=Topology(ranks, node, giga * intra, giga * inter if inter else DEFAULT_INTER_NODE_BANDWIDTH),
        interval=interval,
        steps_per_window=steps,
        ranks_of_load=job.ranks or ranks,
        step_seconds=seconds,
        moe_share=share,
        shares=(share, LOW_SHARE, HIGH_SHARE) if source == "assumed" else (share, share, share),
        share_source=source,
        expert_parameters=parameters,
        expert_bytes=weights,
        optimizer_bytes=state,
        stall_seconds=stall,
        replica_slots=int(recorded.takes_replicas) if given.replica_slots is None else given.replica_slots,
        was_on_one_rank=given.ranks is None and job.ranks == 1,
        assumed=tuple(assumed),
    )


def _notes(recorded: Recorded, settled: _Settled) -> tuple[str, ...]:
    """What is compared, where a reader might take it for something else."""
    notes = []
    if recorded.job.ep_size == 1:
        notes.append(
            "The recorded job has no expert parallelism; compared is the same job with its experts spread over "
            f"{settled.ranks} ranks in logical order, before and after balancing."
        )
    if not recorded.takes_replicas and not settled.replica_slots:
        notes.append("The framework's layers hold no replicas, so homes alone are tried.")
    return tuple(notes)


def _recorded_share(job: RecordedJob) -> float:
    """Share of a step in expert work; 0: it was not recorded."""
    return min(1.0, job.expert_seconds / job.step_seconds) if job.step_seconds else 0.0


def _why_not(load: FloatArray, settled: _Settled) -> tuple[str, str]:
    """Why the record cannot say whether it pays, and what would help; empty: it can."""
    windows, experts = int(load.any(axis=(1, 2)).sum()), load.shape[2]
    ranks, steps = settled.ranks, settled.steps_per_window
    if ranks == 1:
        on_one = "The record is of one rank" if settled.was_on_one_rank else "There is one rank"
        return f"{on_one} (EP 1), which holds all experts: there is nothing to balance.", "Give --ranks R of the job."
    if experts == 1:
        return "There is one expert, which no placement divides.", "Record a model of several."
    if experts % ranks:
        dividing = [size for size in range(2, experts + 1) if experts % size == 0]
        near = sorted(sorted(dividing, key=lambda size: abs(size - ranks))[:2])
        sizes = " or ".join(map(str, near))
        return f"{ranks} ranks do not divide {experts} experts, as homes need.", f"Give --ranks {sizes}."
    if not windows:
        return "No token has been recorded.", "Record a job that trains."
    least = LEAST_INTERVALS * settled.every_windows
    if windows < least:
        were = "was" if windows * steps == 1 else "were"
        have = f"{counted(windows * steps, 'step')} {were} recorded, and a plan every {_steps(settled.interval)} needs "
        have += f"{least * steps}."
        smaller = windows // LEAST_INTERVALS * steps
        or_less = f", or give --every {smaller}" if smaller else ""
        return f"Too few steps: {have}", f"Record {least * steps} steps or more{or_less}."
    return "", ""


def _judged_load(load: FloatArray, settled: _Settled) -> FloatArray:
    """The newest windows with tokens in them, of as many ranks as are asked about: each has as many as it had."""
    load = load[load.any(axis=(1, 2))][-settled.most_windows :]
    return load * (settled.ranks / settled.ranks_of_load)


def _calibrated(recorded: Recorded, settled: _Settled) -> tuple[_Settled, StepModel, float]:
    """The step model whose expert work is ``moe_share`` of a step as it is now, and the seconds of such a step.

    All of expert work goes with the busiest rank's tokens, so the model exchanges nothing besides, and its FLOP/s are
    what makes the seconds right. A step that was measured with another imbalance than that of experts in logical order
    (without expert parallelism, or balanced) would take longer with it; a share that was measured in such a step would
    be larger, as in the settled figures that are returned.
    """
    load = _judged_load(recorded.load, settled)[settled.every_windows :]
    start = start_placement("static", load.shape[1], load.shape[2], settled.ranks, load.shape[2] // settled.ranks)
    busiest = load.sum(axis=2) / settled.ranks / settled.steps_per_window
    imbalance = np.array([predicted_imbalance(window, start) for window in load])
    now, even = float((busiest * imbalance).sum(axis=1).mean()), float(busiest.sum(axis=1).mean())
    measured_at = recorded.imbalance or (1.0 if recorded.job.ep_size == 1 else now / even)
    share = settled.moe_share
    if settled.share_source == "measured":
        longer = share * now / even / measured_at
        share = longer / (1 - share + longer)
        settled = replace(settled, moe_share=share, shares=(share, share, share))
    seconds = settled.step_seconds
    if recorded.job.step_seconds and settled.step_seconds == recorded.job.step_seconds:
        seconds /= 1 - share + share * measured_at * even / now
    hidden = recorded.job.hidden_size or StepModel.hidden_size
    model = StepModel(
        hidden_size=hidden,
        expert_hidden_size=max(1, round(settled.expert_parameters / 3 / hidden)),
        activation_bytes=0,
        stall_seconds=settled.stall_seconds,
        weight_bytes=settled.expert_bytes,
        state_bytes=settled.optimizer_bytes,
    )
    at_given_flops = model.seconds(np.array([now]), settled.topology)
    return settled, replace(model, flops=model.flops * at_given_flops / (share * seconds)), seconds


def _placing(
    name: str,
    run: PolicyRun,
    static: PolicyRun,
    settled: _Settled,
    seconds: tuple[float, float],
    gate: Gate = "payoff",
) -> Placing:
    """A way to place experts; ``seconds`` of a step's refresh of replicas, and of a step with experts in logical
    order."""
    refresh_seconds, now_seconds = seconds
    expert_seconds = sum(window.step_seconds for window in run.windows)
    relative = expert_seconds / sum(window.step_seconds for window in static.windows)
    replans = run.replans
    return Placing(
        name=name,
        imbalance=float(run.imbalance.mean()),
        worst=float(np.percentile(run.imbalance, 95)),
        expert_seconds=relative,
        step_saved=settled.moe_share * (1 - relative) - refresh_seconds / now_seconds,
        refresh_seconds=refresh_seconds,
        move_seconds=_mean_of_a_job([replan.migration_seconds for replan in replans]),
        rebalances=sum(replan.decision == "rebalance" for replan in replans),
        plans=len(replans),
        gate=gate,
    )


def _mean_of_a_job(move_seconds: Sequence[float]) -> float:
    first, *others = move_seconds
    plans = max(len(move_seconds), HORIZON_INTERVALS)
    return (first + (plans - 1) * float(np.mean(others))) / plans


def _weigh(
    settled: _Settled,
    now_seconds: float,
    steps: int,
    windows: int,
    hottest: float,
    now: Placing,
    homes: Placing,
    replicas: Placing | None,
) -> Assessment:
    """The better way to place experts, and whether what it saves is worth what it costs.

    Args:
        now_seconds: of a step with experts in logical order.
        steps, windows: training steps that were recorded, and windows that were judged.
        hottest: tokens of a layer's hottest expert over a rank's mean: homes alone get no lower.
    """

    def saved(way: Placing, share: float) -> float:
        return share * (1 - way.expert_seconds) - way.refresh_seconds / now_seconds

    def moving(way: Placing) -> float:
        """As a share of a step."""
        return way.move_seconds / settled.interval / now_seconds

    def cost(way: Placing) -> float:
        """Share of a step that expert work must take less."""
        return max(moving(way) + LEAST_SAVED, HYSTERESIS * moving(way)) + way.refresh_seconds / now_seconds

    def does_pay(way: Placing) -> bool:
        return way.step_saved + way.refresh_seconds / now_seconds >= cost(way)

    best = homes
    if replicas is not None:
        gain = replicas.step_saved - moving(replicas) - (homes.step_saved - moving(homes))
        if gain > LEAST_SAVED or (does_pay(replicas) and not does_pay(homes)):
            best = replicas
    pays = does_pay(best)
    settings = f"interval={settled.interval}"
    settings += f", replica_slots={settled.replica_slots}" if best is replicas else ""
    settings += "" if best.gate == GATES[0] else f', gate="{best.gate}"'
    if settled.share_source == "given":  # the job's gate should count with it, too
        settings += f", migration=MigrationConfig(moe_share={settled.moe_share:g})"
    if pays:
        least_share = cost(best) / (1 - best.expert_seconds)
        verdict = (
            "It pays." if least_share <= settled.shares[1] else f"It pays from {least_share:.0%} of expert work on."
        )
        if best.gate != GATES[0]:
            verdict += f" The default gate would wait for surer gains, and save {_percent(best.gained)} less."
        advice = f"Next: BalancerConfig({settings})"
    else:
        verdict, advice = _why_it_does_not_pay(settled, steps, now, best, moving(best), hottest)
    low, high = sorted(saved(best, share) for share in settled.shares[1:])
    return Assessment(
        pays=pays,
        ranks=settled.ranks,
        interval=settled.interval,
        assumed=settled.assumed,
        verdict=verdict,
        advice=advice,
        windows=windows,
        now=now,
        homes=homes,
        replicas=replicas,
        best=best,
        saved=(saved(best, settled.shares[0]), low, high),
        shares=settled.shares,
        share_source=settled.share_source,
    )


def _why_it_does_not_pay(
    settled: _Settled, steps: int, now: Placing, best: Placing, moving: float, hottest: float
) -> tuple[str, str]:
    longer = 4 * settled.interval
    judged = longer if longer * LEAST_INTERVALS <= steps else steps // LEAST_INTERVALS
    rarer = f"Try a longer interval: --every {judged}."
    if judged < 2 * settled.interval:
        rarer = f"Record {LEAST_INTERVALS * longer} steps or more, and try a longer interval: --every {longer}."
    again = "Ask again when the router's load has changed."
    if settled.moe_share * (1 - 1 / now.imbalance) < LEAST_SAVED:
        even = _percent(settled.moe_share * (1 - 1 / now.imbalance))
        is_even = MOE_SHARE * (1 - 1 / now.imbalance) < LEAST_SAVED
        reason = "the load is balanced" if is_even else "expert work is a small share of a step"
        return f"It does not pay: {reason}, and even load would save {even} of a step.", again
    if best.step_saved < LEAST_SAVED and not settled.replica_slots and hottest > CLOSE * best.imbalance:
        reason = f"the hottest expert alone has {hottest:.2f}x the tokens of a rank, and homes cannot share it"
        return f"It does not pay: {reason}.", "Try --replica-slots 1, where the framework takes replicas."
    if not best.rebalances:
        return "It does not pay: no move would have saved what it costs.", rarer
    if best.step_saved < LEAST_SAVED:
        return "It does not pay: the load that comes is too unlike the past that plans are made for.", again
    return f"It does not pay: moving takes {_percent(moving)} of the time of all steps.", rarer


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.1 or seconds == 0 else f"{seconds * 1e3:.2g} ms"


def _steps(interval: int) -> str:
    return "step" if interval == 1 else f"{interval} steps"


def _least_to_most(least: float, most: float) -> str:
    digits = 0 if max(abs(least), abs(most)) >= 0.0195 else 1
    return f"{least * 100:.{digits}f} to {most:.{digits}%}"


def _span(shares: Sequence[float]) -> str:
    return f"{shares[0] * 100:.0f} to {shares[1]:.0%}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.0995 else f"{share:.1%}"
