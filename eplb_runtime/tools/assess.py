"""Would balancing pay? A recorded load is planned on its past, judged on what came next, and weighed in seconds.

`simulate` plays the series and says what moves cost. This module says what is assumed of a job where its record says
nothing, by how much a step would be shorter, and the verdict in words. No file formats and no printing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..observe.run_folder import JobRecord
from ..planner.cost import HYSTERESIS
from ..planner.evaluate import predicted_imbalance
from ..topology import DEFAULT_INTER_NODE_BANDWIDTH, DEFAULT_INTRA_NODE_BANDWIDTH, Topology
from ..utils.tables import counted
from .simulate import Asked, PolicyRun, Series, StepModel, simulate, start_placement

FloatArray = NDArray[np.float64]

MOE_SHARE, LOW_SHARE, HIGH_SHARE = 0.4, 0.2, 0.6
"""Assumed shares of a step in expert work; the first one decides."""
LEAST_SAVED = 0.01
"""Of a step: less is not worth a balancer, nor a replica slot."""
CLOSE = 0.95
"""Of the lowest imbalance that moved homes can have: they have it, nearly."""
LEAST_INTERVALS, MOST_INTERVALS = 3, 20
"""One is planned on, two are judged at least; of a longer record, the newest are judged."""
HORIZON_INTERVALS = 10
"""Over at least so many plans the moves of the first are spread: a longer job has them once, too."""
DEFAULT_INTERVALS, FEW_INTERVALS, SHORT_INTERVAL = 20, 5, 10
"""A series is cut into so many where nothing says how often to plan; or into fewer of up to ten steps, down to five."""
STEP_CHOICES = 65536
"""(token, choice) pairs of a rank in a step and a layer: 8,192 tokens that go to eight experts each."""
STEP_SECONDS, STALL_SECONDS = 1.0, 0.05
EXPERT_PARAMETERS = 3 * 7168 * 2048
"""DeepSeek-V3's."""
CPU_BANDWIDTH = 1.0
"""GB/s between the ranks of a job on CPUs."""


@dataclass(frozen=True)
class Overrides:
    """Figures of the job as the options give them; None: what its record says, or else what is assumed.

    Args:
        ranks, ranks_per_node: of the EP group.
        every: training steps between plans.
        steps_per_window: training steps of a window of the series.
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
class Scenario:
    """One way to place experts, judged.

    Args:
        name: "as it is", "homes moved" or "with N replica slot(s)".
        imbalance, worst: max / mean rank load over judged windows and layers: mean, and 95th percentile.
        expert_seconds: of a step in expert work, relative to "as it is".
        step_saved: share of a step that it takes less, replicas' refresh counted.
        refresh_seconds: of a step, for replicas; ``refresh``: as a share of a step.
        move_seconds: of a plan on average; plans that move nothing count, and the first one, from experts in logical
            order, as one of ``HORIZON_INTERVALS`` at least. ``moving``: as a share of all steps.
        rebalances, plans: how many plans moved something, and how many were made.
    """

    name: str
    imbalance: float
    worst: float
    expert_seconds: float
    step_saved: float
    refresh_seconds: float
    refresh: float
    move_seconds: float
    moving: float
    rebalances: int
    plans: int

    def saved(self, moe_share: float) -> float:
        """Return the share of a step that it takes less, where so much of a step is expert work."""
        return moe_share * (1 - self.expert_seconds) - self.refresh

    @property
    def cost(self) -> float:
        """Return the share of a step that expert work must take less."""
        return max(self.moving + LEAST_SAVED, HYSTERESIS * self.moving) + self.refresh

    @property
    def pays(self) -> bool:
        return self.step_saved + self.refresh >= self.cost


@dataclass(frozen=True)
class Assessment:
    """The verdict and what it rests on.

    Args:
        pays: None: the record cannot say.
        ranks, windows: EP size, and windows that were judged.
        interval: training steps between plans.
        verdict, advice: a sentence that says whether it pays, and what to do next.
        left_out: number of recorded windows that are of other numbers of steps than most, and were not judged.
        now, homes, replicas: the ways to place experts; None: not judged.
        best: the one that ``step_saved`` and the advice are of.
        saved: share of a step that it takes less: as assumed or given, at least and at most.
        shares: the shares of a step in expert work that these three are for.
        share_source: how the text names a recorded share; "": it was given or assumed.
        notes: sentences on what is compared, said ahead of the answer.
    """

    pays: bool | None
    ranks: int
    interval: int
    verdict: str
    advice: str
    left_out: int = 0
    windows: int = 0
    now: Scenario | None = None
    homes: Scenario | None = None
    replicas: Scenario | None = None
    best: Scenario | None = None
    saved: tuple[float, float, float] | None = None
    shares: tuple[float, float, float] | None = None
    share_source: str = ""
    notes: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return what ``eplb-runtime assess --json`` prints; what was not judged is null."""
        ways = {"now": self.now, "homes": self.homes, "replicas": self.replicas}
        saved = (None, None, None) if self.saved is None else self.saved
        return {
            "pays": self.pays,
            "imbalance": {name: None if way is None else way.imbalance for name, way in ways.items()},
            "step_saved": dict(zip(("share", "low", "high"), saved, strict=True)),
            "move_seconds": None if self.best is None else self.best.move_seconds,
            "advice": self.advice if self.pays is not None else f"{self.verdict} {self.advice}",
        }

    def paragraph(self) -> str:
        """Return the answer in words, on one line."""
        if self.now is None or self.homes is None or self.best is None or self.saved is None or self.shares is None:
            return f"{self.verdict} {self.advice}"
        ways = f"with homes moved {self.homes.imbalance:.2f}x"
        if self.replicas is not None:
            ways += f", {self.replicas.name} {self.replicas.imbalance:.2f}x"
        share, low, high = self.saved
        word, sign = ("less", 1) if share >= 0 else ("more", -1)
        span = ""
        if low != high:
            least, most = sorted((sign * low, sign * high))
            digits = 0 if max(abs(least), abs(most)) >= 0.0195 else 1
            span = f" ({least * 100:.{digits}f} to {most:.{digits}%} for {self.shares[1] * 100:.0f} to "
            span += f"{self.shares[2]:.0%})"
        work = f"If {self.shares[0]:.0%} of a step is expert work"
        if self.share_source:
            work = f"With {self.shares[0]:.0%} of a step in expert work ({self.share_source})"
        seconds = self.best.move_seconds
        moving = f"{seconds:.2g} s" if seconds >= 0.1 or seconds == 0 else f"{seconds * 1e3:.2g} ms"
        notes = "".join(f"{note} " for note in self.notes)
        return (
            f"{notes}{self.ranks} ranks: the busiest rank has {self.now.imbalance:.2f}x the mean load; {ways} (planned "
            f"on the past, judged on what came next, {self.windows} windows). {work}, a step takes "
            f"{_percent(sign * share)} {word}{span}; moving costs {moving} every {_steps(self.interval)}. "
            f"{self.verdict} {self.advice}"
        ).replace("%", " %")


def assess(record: JobRecord, overrides: Overrides, on_progress: Callable[[], None] = lambda: None) -> Assessment:
    """Would balancing have paid in the steps that were recorded?

    Experts stay in logical order, or their homes move, or each rank has replica slots besides; each plan sees the past
    alone, is judged on the windows until the next, and goes through the default gate. Expert work takes ``moe_share``
    of a step as the job is now, and grows with the busiest rank's tokens, as for the gate of a running job.

    Args:
        record: the series.
        overrides: what the options say of the job.
        on_progress: called after each plan.

    Raises:
        PlanError: the load cannot be planned for.
        ValueError: the ranks of a node do not divide the ranks, or a bandwidth is not positive.
    """
    recorded_windows = len(record.load)
    record = record.alike()
    left_out = recorded_windows - len(record.load)
    resolved = _resolve(record, overrides)
    slots, ranks = resolved.replica_slots, resolved.ranks
    if why := _why_not(record.load, resolved):
        return Assessment(None, ranks, resolved.interval, *why, left_out)
    share, source = resolved.moe_share, resolved.share_source
    load = _judged_load(record.load, resolved)
    resolved, model, now_seconds = _calibrated(record, load, resolved)
    if source and f"{resolved.moe_share:.0%}" != f"{share:.0%}":
        source = f"worked out from {share:.0%} measured, with other imbalance"
    share, experts = resolved.moe_share, load.shape[2]
    homes = experts // ranks
    if slots > experts - homes:
        have = f"a rank has homes for {homes} of {experts} experts"
        raise ValueError(f"--replica-slots {slots}: {have}; give at most {experts - homes}")
    series = Series(load, resolved.every_windows, None, resolved.steps_per_window)

    def play(policy: str, slots_per_rank: int) -> PolicyRun:
        return simulate(
            series,
            resolved.topology,
            slots_per_rank=slots_per_rank,
            policies=[policy],
            asked=Asked(gate="payoff"),
            step_model=model,
            on_progress=on_progress,
        )[0]

    def judge(name: str, run: PolicyRun, refresh_seconds: float = 0.0) -> Scenario:
        relative = sum(window.step_seconds for window in run.windows) / static_seconds
        first, *others = [replan.migration_seconds for replan in run.replans]
        plans = max(len(run.replans), HORIZON_INTERVALS)
        move_seconds = (first + (plans - 1) * float(np.mean(others))) / plans
        refresh = refresh_seconds / now_seconds
        return Scenario(
            name=name,
            imbalance=float(run.imbalance.mean()),
            worst=float(np.percentile(run.imbalance, 95)),
            expert_seconds=relative,
            step_saved=share * (1 - relative) - refresh,
            refresh_seconds=refresh_seconds,
            refresh=refresh,
            move_seconds=move_seconds,
            moving=move_seconds / resolved.interval / now_seconds,
            rebalances=sum(replan.decision == "rebalance" for replan in run.replans),
            plans=len(run.replans),
        )

    static = play("static", homes)
    static_seconds = sum(window.step_seconds for window in static.windows)
    now = judge("as it is", static)
    by_homes = best = judge("homes moved", play("incremental", homes))
    by_replicas = None
    if slots:
        named = f"with {'one' if slots == 1 else slots} replica slot{'s' if slots > 1 else ''}"
        refresh_seconds = model.refresh_seconds(load.shape[1], slots, resolved.topology)
        by_replicas = judge(named, play("incremental", homes + slots), refresh_seconds)
        gain = by_replicas.step_saved - by_replicas.moving - (by_homes.step_saved - by_homes.moving)
        if gain > LEAST_SAVED or (by_replicas.pays and not by_homes.pays):
            best = by_replicas
    if best.pays:
        verdict, advice = _why_it_pays(resolved, best, with_replicas=best is by_replicas)
    else:
        # Tokens of a layer's hottest expert over a rank's mean: homes alone get no lower.
        hottest = float((load.max(axis=2) * ranks / np.maximum(load.sum(axis=2), 1)).mean())
        steps = int(record.load.any(axis=(1, 2)).sum()) * resolved.steps_per_window
        verdict, advice = _why_it_does_not_pay(resolved, steps, now, best, hottest)
    low, high = sorted(best.saved(share) for share in resolved.shares[1:])
    return Assessment(
        pays=best.pays,
        ranks=ranks,
        interval=resolved.interval,
        verdict=verdict,
        advice=advice,
        left_out=left_out,
        windows=len(static.windows),
        now=now,
        homes=by_homes,
        replicas=by_replicas,
        best=best,
        saved=(best.saved(share), low, high),
        shares=resolved.shares,
        share_source=source,
        notes=_notes(record, resolved),
    )


@dataclass(frozen=True)
class _Resolved:
    """Every figure that the answer rests on."""

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

    @property
    def ranks(self) -> int:
        return self.topology.num_ranks

    @property
    def every_windows(self) -> int:
        return self.interval // self.steps_per_window


def _resolve(record: JobRecord, overrides: Overrides) -> _Resolved:
    job = record.job

    def resolve(name: str, known: Any, default: Any) -> Any:
        """Return the figure that was given, else what was recorded, else a default."""
        chosen = getattr(overrides, name)
        return chosen if chosen is not None else known or default

    windows, _, experts = record.load.shape
    fitting = next((ranks for ranks in (8, 4, 2) if experts % ranks == 0), 1)
    ranks = resolve("ranks", job.ep_size if job.ep_size > 1 else job.ranks, fitting)
    node = 0
    if ranks <= max(1, job.ranks_per_node):
        node = ranks
    elif job.ranks > job.ranks_per_node and ranks % max(1, job.ranks_per_node) == 0:
        node = job.ranks_per_node  # a job on one node does not say how many ranks another may have there
    whole_nodes = next(size for size in range(min(ranks, 8), 0, -1) if ranks % size == 0)
    node = resolve("ranks_per_node", node, whole_nodes)
    choices = float(record.load.sum(axis=2).mean()) / ranks
    steps = max(1, round(choices / STEP_CHOICES))
    steps = resolve("steps_per_window", record.steps_per_window, steps)
    cut = steps * max(1, windows // DEFAULT_INTERVALS, min(SHORT_INTERVAL // steps, windows // FEW_INTERVALS))
    interval = resolve("every", job.interval, cut)
    interval = steps * max(1, interval // steps)  # plans are made between windows
    seconds = resolve("step_seconds", job.step_seconds, STEP_SECONDS)
    recorded_share = min(1.0, job.expert_seconds / job.step_seconds) if job.step_seconds else 0.0
    share = resolve("moe_share", recorded_share, MOE_SHARE)
    is_assumed = overrides.moe_share is None and not recorded_share
    parameters = resolve("expert_parameters", job.expert_parameters, EXPERT_PARAMETERS)
    known = job.expert_bytes and job.expert_parameters
    weights = round(parameters * job.expert_bytes / job.expert_parameters) if known else 2 * parameters
    of_adam = (8 if weights >= 4 * parameters else 12) * parameters  # float32 moments, and weights beside bfloat16 ones
    state = resolve("optimizer_bytes", job.optimizer_bytes, of_adam)
    giga, intra, inter = 1e9, *record.bandwidths
    defaults = (DEFAULT_INTRA_NODE_BANDWIDTH / giga, DEFAULT_INTER_NODE_BANDWIDTH / giga)
    if job.device == "cpu":
        defaults = (CPU_BANDWIDTH, CPU_BANDWIDTH)
    intra = resolve("intra_node_bandwidth", intra, defaults[0])
    if ranks > node:
        inter = resolve("inter_node_bandwidth", inter, defaults[1])
    stall = resolve("stall_seconds", None, STALL_SECONDS)
    takes_replicas = 0 if job.takes_no_replicas else 1
    return _Resolved(
        topology=Topology(ranks, node, giga * intra, giga * inter if inter else DEFAULT_INTER_NODE_BANDWIDTH),
        interval=interval,
        steps_per_window=steps,
        ranks_of_load=job.ranks or ranks,
        step_seconds=seconds,
        moe_share=share,
        shares=(share, LOW_SHARE, HIGH_SHARE) if is_assumed else (share, share, share),
        share_source="measured" if overrides.moe_share is None and recorded_share else "",
        expert_parameters=parameters,
        expert_bytes=weights,
        optimizer_bytes=state,
        stall_seconds=stall,
        replica_slots=takes_replicas if overrides.replica_slots is None else overrides.replica_slots,
        was_on_one_rank=overrides.ranks is None and job.ranks == 1,
    )


def _notes(record: JobRecord, resolved: _Resolved) -> tuple[str, ...]:
    """Return what is compared, where a reader might take it for something else."""
    notes = []
    if record.job.ep_size == 1:
        notes.append(
            "The recorded job has no expert parallelism; compared is the same job with its experts spread over "
            f"{resolved.ranks} ranks in logical order, before and after balancing."
        )
    if record.job.takes_no_replicas and not resolved.replica_slots:
        notes.append("The framework's layers hold no replicas, so homes alone are tried.")
    return tuple(notes)


def _why_not(load: FloatArray, resolved: _Resolved) -> tuple[str, str] | None:
    """Return why the record cannot say whether it pays, and what would help; None: it can."""
    windows, experts = int(load.any(axis=(1, 2)).sum()), load.shape[2]
    ranks, steps = resolved.ranks, resolved.steps_per_window
    if ranks == 1:
        on_one = "The record is of one rank" if resolved.was_on_one_rank else "There is one rank"
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
    least = LEAST_INTERVALS * resolved.every_windows
    if windows >= least:
        return None
    have = f"{counted(windows * steps, 'step')} {'was' if windows * steps == 1 else 'were'} recorded"
    smaller = windows // LEAST_INTERVALS * steps
    or_less = f", or give --every {smaller}" if smaller else ""
    return (
        f"Too few steps: {have}, and a plan every {_steps(resolved.interval)} needs {least * steps}.",
        f"Record {least * steps} steps or more{or_less}.",
    )


def _judged_load(load: FloatArray, resolved: _Resolved) -> FloatArray:
    """Return the newest windows with tokens in them, of the ranks that are asked about: each has as many as it had."""
    load = load[load.any(axis=(1, 2))][-(MOST_INTERVALS + 1) * resolved.every_windows :]
    return load * (resolved.ranks / resolved.ranks_of_load)


def _calibrated(record: JobRecord, load: FloatArray, resolved: _Resolved) -> tuple[_Resolved, StepModel, float]:
    """Return the step model whose expert work is ``moe_share`` of a step as it is now, and the seconds of such a step.

    All of expert work goes with the busiest rank's tokens, so the model exchanges nothing besides, and its FLOP/s are
    what makes the seconds right. A step that was measured with another imbalance than that of experts in logical order
    (without expert parallelism, or balanced) would take longer with it; a share that was measured in such a step would
    be larger, as in the resolved figures that are returned.
    """
    load = load[resolved.every_windows :]
    start = start_placement("static", load.shape[1], load.shape[2], resolved.ranks, load.shape[2] // resolved.ranks)
    busiest = load.sum(axis=2) / resolved.ranks / resolved.steps_per_window
    imbalance = np.array([predicted_imbalance(window, start) for window in load])
    now, even = float((busiest * imbalance).sum(axis=1).mean()), float(busiest.sum(axis=1).mean())
    measured_at = record.imbalance or (1.0 if record.job.ep_size == 1 else now / even)
    share = resolved.moe_share
    if resolved.share_source:
        longer = share * now / even / measured_at
        share = longer / (1 - share + longer)
        resolved = replace(resolved, moe_share=share, shares=(share, share, share))
    seconds = resolved.step_seconds
    if record.job.step_seconds and resolved.step_seconds == record.job.step_seconds:
        seconds /= 1 - share + share * measured_at * even / now
    hidden = record.job.hidden_size or StepModel.hidden_size
    model = StepModel(
        hidden_size=hidden,
        expert_hidden_size=max(1, round(resolved.expert_parameters / 3 / hidden)),
        activation_bytes=0,
        stall_seconds=resolved.stall_seconds,
        weight_bytes=resolved.expert_bytes,
        state_bytes=resolved.optimizer_bytes,
    )
    at_given_flops = model.seconds(np.array([now]), resolved.topology)
    return resolved, replace(model, flops=model.flops * at_given_flops / (share * seconds)), seconds


def _why_it_pays(resolved: _Resolved, best: Scenario, with_replicas: bool) -> tuple[str, str]:
    """Return the verdict, and the settings to write."""
    least_share = best.cost / (1 - best.expert_seconds)
    verdict = "It pays." if least_share <= resolved.shares[1] else f"It pays from {least_share:.0%} of expert work on."
    settings = f"interval={resolved.interval}"
    settings += f", replica_slots={resolved.replica_slots}" if with_replicas else ""
    if not resolved.share_source and resolved.shares[1] == resolved.shares[0]:  # given: the job's gate counts with it
        settings += f", migration=MigrationConfig(moe_share={resolved.moe_share:g})"
    return verdict, f"Next: BalancerConfig({settings})"


def _why_it_does_not_pay(
    resolved: _Resolved, steps: int, now: Scenario, best: Scenario, hottest: float
) -> tuple[str, str]:
    """Return the verdict with its reason, and what to try; ``steps``: training steps that were recorded."""
    longer = 4 * resolved.interval
    judged = longer if longer * LEAST_INTERVALS <= steps else steps // LEAST_INTERVALS
    rarer = f"Try a longer interval: --every {judged}."
    if judged < 2 * resolved.interval:
        rarer = f"Record {LEAST_INTERVALS * longer} steps or more, and try a longer interval: --every {longer}."
    again = "Ask again when the router's load has changed."
    even = 1 - 1 / now.imbalance
    if resolved.moe_share * even < LEAST_SAVED:
        is_even = MOE_SHARE * even < LEAST_SAVED
        reason = "the load is balanced" if is_even else "expert work is a small share of a step"
        saved = _percent(resolved.moe_share * even)
        return f"It does not pay: {reason}, and even load would save {saved} of a step.", again
    if best.step_saved < LEAST_SAVED and not resolved.replica_slots and hottest > CLOSE * best.imbalance:
        reason = f"the hottest expert alone has {hottest:.2f}x the tokens of a rank, and homes cannot share it"
        return f"It does not pay: {reason}.", "Try --replica-slots 1, where the framework takes replicas."
    if not best.rebalances:
        return "It does not pay: no move would have saved what it costs.", rarer
    if best.step_saved < LEAST_SAVED:
        return "It does not pay: the load that comes is too unlike the past that plans are made for.", again
    return f"It does not pay: moving takes {_percent(best.moving)} of the time of all steps.", rarer


def _steps(interval: int) -> str:
    return "step" if interval == 1 else f"{interval} steps"


def _percent(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.0995 else f"{share:.1%}"
