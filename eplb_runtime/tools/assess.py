"""Would balancing pay? A recorded load is planned on its past, judged on what came next, and weighed in seconds.

`simulate` plays the series. This module has what is assumed where a record says nothing, and the verdict in words.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load.series import RecordedJob
from ..observe.run_state import JobRecord
from ..placement import uneven
from ..planner.cost import HYSTERESIS
from ..topology import DEFAULT_INTER_NODE_BANDWIDTH, DEFAULT_INTRA_NODE_BANDWIDTH, Topology
from ..utils.text import counted
from .formats.loads import looks_partial
from .simulate import HIDDEN, PARAMETERS, Series, StepModel, simulate

FloatArray = NDArray[np.float64]

MOE_SHARE, LOW_SHARE, HIGH_SHARE = 0.4, 0.2, 0.6
"""Assumed shares of a step in expert work; the first one decides."""
LEAST_SAVED = 0.01
"""Of a step: less is not worth a balancer, nor a replica slot."""
CLOSE = 0.95  # of the lowest imbalance that moved homes can have: they have it, nearly
LEAST_INTERVALS, MOST_INTERVALS = 3, 20
"""One is planned on, two are judged at least; of a longer record, the newest are judged."""
HORIZON_INTERVALS = 10
"""Over at least so many plans the moves of the first are spread: a longer job has them once, too."""
DEFAULT_INTERVALS, FEW_INTERVALS, SHORT_INTERVAL = 20, 5, 10
"""A series is cut into so many where nothing says how often to plan; or into fewer of up to ten steps, down to five."""
STEP_CHOICES = 65536
"""(token, choice) pairs of a rank in a step and a layer: 8,192 tokens that go to eight experts each."""
STEP_SECONDS, STALL_SECONDS = 1.0, 0.05
CPU_BANDWIDTH = 1e9  # bytes/s between the ranks of a job on CPUs


@dataclass(frozen=True)
class Figures:
    """Figures that the answer rests on: as an option gives it, else as recorded, else as assumed."""

    topology: Topology  # ranks and nodes of the EP group, and bandwidths of a rank
    every: int  # training steps between plans
    steps_per_window: int
    step_seconds: float
    shares: tuple[float, float, float]  # of that step in expert work: as known, the least and the most
    share_source: str  # how the text names a recorded share; "": it was given or assumed
    expert_parameters: int  # of one expert, as the bytes
    expert_bytes: int
    optimizer_bytes: int
    replica_slots: int  # of a rank, in the second plan that is tried; 0: homes alone are tried

    @property
    def ranks(self) -> int:
        return self.topology.num_ranks

    @property
    def every_windows(self) -> int:
        return self.every // self.steps_per_window

    @property
    def share_is_assumed(self) -> bool:
        return self.shares[1] != self.shares[2]


@dataclass(frozen=True)
class Scenario:
    """One way to place experts, judged."""

    name: str  # "as it is", "homes moved" or "with N replica slot(s)"
    imbalance: float  # max / mean rank load over judged windows and layers: mean, and 95th percentile
    worst: float
    expert_seconds: float  # of a step in expert work, relative to "as it is"
    refresh: float  # for replicas, as a share of a step
    move_seconds: float  # of a plan on average; the first one counts as one of `HORIZON_INTERVALS` at least
    moving: float  # as a share of all steps
    rebalances: int  # plans that moved something

    def saved(self, moe_share: float) -> float:
        """Return the share of a step that is saved if expert work takes ``moe_share`` of it. Refreshing replicas is
        taken off, moving is not; below 0 a step is longer."""
        return moe_share * (1 - self.expert_seconds) - self.refresh

    @property
    def cost(self) -> float:
        """Return the share of a step that expert work must save: for moves, with a margin, and replicas' refresh."""
        return max(self.moving + LEAST_SAVED, HYSTERESIS * self.moving) + self.refresh

    def pays(self, moe_share: float) -> bool:
        return moe_share * (1 - self.expert_seconds) >= self.cost


@dataclass(frozen=True)
class Assessment:
    """The verdict and what it rests on."""

    figures: Figures
    verdict: str  # a sentence that says whether it pays
    advice: str  # and what to do next
    notes: Sequence[str]  # sentences on what is compared, said ahead of the answer
    windows: int = 0  # that were judged
    ways: Mapping[str, Scenario] = field(default_factory=dict)  # "now", "homes" and "replicas"; those that were judged
    best: Scenario | None = None  # the one that the advice is of; None: the record cannot say
    data_parallel: Mapping[str, float] | None = None  # as `_data_parallel` returns it; None: not known

    @property
    def pays(self) -> bool | None:
        return None if self.best is None else self.best.pays(self.figures.shares[0])

    def fields(self) -> dict[str, Any]:
        """Return the JSON object of ``eplb-runtime assess --json``; None: not judged, or the record cannot say."""
        names, best, saved = ("now", "homes", "replicas"), self.best, dict.fromkeys(("share", "low", "high"))
        return {
            "pays": self.pays,
            "imbalance": {name: self.ways[name].imbalance if name in self.ways else None for name in names},
            "step_saved": saved if best is None else _saved(best, self.figures),
            "move_seconds": None if best is None else best.move_seconds,
            "data_parallel": self.data_parallel,
            "advice": self.paragraph() if best is None else self.advice,
        }

    def paragraph(self) -> str:
        """Return notes, figures, verdict and advice as sentences on one line."""
        said = [*self.notes, *([] if self.best is None else self._figures_in_words(self.best))]
        return " ".join([*said, self.verdict, self.advice]).replace("%", " %")

    def _figures_in_words(self, best: Scenario) -> Iterator[str]:
        figures, (share, low, high) = self.figures, _saved(best, self.figures).values()
        sign, span, ways = 1 if share >= 0 else -1, "", f"with homes moved {self.ways['homes'].imbalance:.2f}x"
        if replicas := self.ways.get("replicas"):
            ways += f", {replicas.name} {replicas.imbalance:.2f}x"
        if figures.share_is_assumed and low != high:
            digits = 0 if max(abs(low), abs(high)) >= 0.0195 else 1
            least, most = (f"{100 * one:.{digits}f}" for one in sorted((sign * low, sign * high)))
            span = f" ({least} to {most}% for {100 * figures.shares[1]:.0f} to {figures.shares[2]:.0%})"
        work = f"If {figures.shares[0]:.0%} of a step is expert work"
        if figures.share_source:
            work = f"With {figures.shares[0]:.0%} of a step in expert work ({figures.share_source})"
        seconds = best.move_seconds
        moving = f"{seconds:.2g} s" if seconds >= 0.1 or seconds == 0 else f"{seconds * 1e3:.2g} ms"
        yield (
            f"{figures.ranks} ranks: the busiest rank has {self.ways['now'].imbalance:.2f}x the mean load; {ways} "
            f"(planned on the past, judged on what came next, {self.windows} windows). {work}, a step takes "
            f"{_percent(sign * share)} {'less' if sign > 0 else 'more'}{span}; moving costs {moving} "
            f"every {_steps(figures.every)}."
        )
        if self.data_parallel is not None:
            before, after, freed = self.data_parallel.values()
            slower = after > before
            yield (
                f"Spread, with tokens that travel, a step takes {after:.3g} s, data parallelism as recorded "
                f"{before:.3g} s{', so spread only what does not fit' * slower}; a rank holds {freed / 1e9:.2g} GB "
                f"less.{' If spread:' * slower}"
            )


def assess(record: JobRecord, given: Mapping[str, Any]) -> Assessment:
    """Return whether balancing would have paid in the steps that were recorded, with figures and advice.

    Experts stay in logical order, or their homes move, or each rank has replica slots as well; each plan sees the past
    alone, is judged on the windows until the next, and goes through the default gate. Expert work takes its share of a
    step as the job is now, and grows with the busiest rank's tokens. ``best`` is None if the record cannot say.

    Args:
        record: the series.
        given: figures by the names of the command's options, which win over what was recorded; None: not given.

    Raises:
        PlanError: the load cannot be planned for.
        TopologyError: the ranks of a node do not divide the ranks.
    """
    whole, record, notes = len(record.load), record.alike(), list[str]()
    figures = figures_of(record, given)
    if left_out := whole - len(record.load):
        few = f"Windows of other numbers of steps than {record.steps_per_window}, as most have, were left out"
        notes.append(f"{few}: {left_out} of {whole}.")
    if why := _why_not(record, figures):
        return Assessment(figures, *why, notes)
    # The newest windows with tokens in them, of the ranks that are asked about: each has as many as it had.
    load = record.load[record.load.any(axis=(1, 2))][-(MOST_INTERVALS + 1) * figures.every_windows :]
    load = load * (figures.ranks / (record.job.ranks or figures.ranks))
    series = Series(load, figures.every_windows, figures.steps_per_window, gate="payoff")
    is_recorded = figures.step_seconds == record.job.step_seconds and not figures.share_is_assumed
    figures, model = _calibrated(record.job, series, figures)
    ways = _ways(series, figures, model)
    share, homes, replicas = figures.shares[0], ways["homes"], ways.get("replicas")
    best = homes
    if replicas is not None:
        gain = replicas.saved(share) - replicas.moving - (homes.saved(share) - homes.moving)
        best = replicas if gain > LEAST_SAVED or (replicas.pays(share) and not homes.pays(share)) else homes
    if best.pays(share):
        verdict, advice = _why_it_pays(figures, ways, best)
    else:
        # Tokens of a layer's hottest expert over a rank's mean: homes alone get no lower.
        hottest = float((load.max(axis=2) * figures.ranks / np.maximum(load.sum(axis=2), 1)).mean())
        steps = int(record.load.any(axis=(1, 2)).sum()) * figures.steps_per_window
        verdict, advice = _why_it_does_not_pay(figures, steps, ways["now"], best, hottest)
    beside = None
    if record.job.ep_size == 1:
        if is_recorded:
            beside = _data_parallel(record.job, figures, load, best if best.pays(share) else ways["now"])
        spread = f"compared is the same job with its experts spread over {figures.ranks} ranks in logical order"
        notes.append(f"The recorded job has no expert parallelism; {spread}, before and after balancing.")
    if record.job.takes_no_replicas and not figures.replica_slots:
        notes.append("The framework's layers hold no replicas, so homes alone are tried.")
    windows = len(load) - figures.every_windows
    return Assessment(figures, verdict, advice, notes, windows, ways, best, beside)


def figures_of(record: JobRecord, given: Mapping[str, Any]) -> Figures:
    """Return each figure as ``given`` under its option's name, else as recorded, else as assumed."""
    job, (windows, _, experts) = record.job, record.load.shape

    def resolve(name: str, known: Any, default: Any) -> Any:
        chosen = given.get(name)
        return chosen if chosen is not None else known or default

    fitting = next((ranks for ranks in (8, 4, 2) if experts % ranks == 0), 1)
    ranks = resolve("ranks", job.ep_size if job.ep_size > 1 else job.ranks, fitting)
    node = ranks if ranks <= max(1, job.ranks_per_node) else 0
    if job.ranks > job.ranks_per_node and not node and ranks % max(1, job.ranks_per_node) == 0:
        node = job.ranks_per_node  # a job on one node does not say how many ranks another may have there
    node = resolve("ranks_per_node", node, next(size for size in range(min(ranks, 8), 0, -1) if ranks % size == 0))
    steps = max(1, round(float(record.load.sum(axis=2).mean()) / ranks / STEP_CHOICES))
    steps = resolve("steps_per_window", record.steps_per_window, steps)
    cut = steps * max(1, windows // DEFAULT_INTERVALS, min(SHORT_INTERVAL // steps, windows // FEW_INTERVALS))
    every = resolve("every", job.interval, cut)
    measured = min(1.0, job.expert_seconds / job.step_seconds) if job.step_seconds else 0.0
    share, is_given = resolve("moe_share", measured, MOE_SHARE), given.get("moe_share") is not None
    parameters = resolve("expert_parameters", job.expert_parameters, PARAMETERS)
    known = job.expert_bytes and job.expert_parameters
    weights = round(parameters * job.expert_bytes / job.expert_parameters) if known else 2 * parameters
    of_adam = (8 if weights >= 4 * parameters else 12) * parameters  # float32 moments, and weights with bfloat16 ones
    links = (DEFAULT_INTRA_NODE_BANDWIDTH, DEFAULT_INTER_NODE_BANDWIDTH)
    assumed = (CPU_BANDWIDTH, CPU_BANDWIDTH) if job.device == "cpu" else links
    names = ("intra_node_bandwidth", "inter_node_bandwidth")
    bandwidths = [1e9 * resolve(name, getattr(job, name), one / 1e9) for name, one in zip(names, assumed, strict=True)]
    slots = given.get("replica_slots")
    return Figures(
        topology=Topology(ranks, node, *bandwidths),
        every=steps * max(1, every // steps),  # plans are made between windows
        steps_per_window=steps,
        step_seconds=resolve("step_seconds", job.step_seconds, STEP_SECONDS),
        shares=(share, share, share) if is_given or measured else (share, LOW_SHARE, HIGH_SHARE),
        share_source="measured" if measured and not is_given else "",
        expert_parameters=parameters,
        expert_bytes=weights,
        optimizer_bytes=job.optimizer_bytes or of_adam,
        replica_slots=(0 if job.takes_no_replicas else 1) if slots is None else slots,
    )


def _why_not(record: JobRecord, figures: Figures) -> tuple[str, str] | None:
    """Return why the record cannot say whether it pays, and what would help; None: it can."""
    windows, experts = int(record.load.any(axis=(1, 2)).sum()), record.load.shape[2]
    ranks, steps = figures.ranks, figures.steps_per_window
    if ranks == 1:
        on_one = "The record is of one rank" if record.job.ranks == 1 else "There is one rank"
        return f"{on_one} (EP 1), which holds all experts: there is nothing to balance.", "Give --ranks R of the job."
    if said := looks_partial(record.load):
        return f"It cannot be said: {said}", "Give the sum of all ranks' counts."
    if experts % ranks:
        return f"{uneven(experts, ranks)}.", "Give --ranks, or --experts if there are more."
    if not windows:
        return "No token has been recorded.", "Record a job that trains."
    if windows >= (least := LEAST_INTERVALS * figures.every_windows):
        return None
    have = f"{counted(windows * steps, 'step')} {'was' if windows * steps == 1 else 'were'} recorded"
    smaller = windows // LEAST_INTERVALS * steps
    more = f"Record {least * steps} steps or more{f', or give --every {smaller}' if smaller else ''}."
    return f"Too few steps: {have}, and a plan every {_steps(figures.every)} needs {least * steps}.", more


def _calibrated(job: RecordedJob, series: Series, figures: Figures) -> tuple[Figures, StepModel]:
    """Return the figures of a step with experts in logical order, and the model whose expert work is that step's share.

    All of expert work goes with the busiest rank's tokens, so the model exchanges nothing else. A step that was
    measured with another imbalance than that of experts in logical order (without expert parallelism, or balanced)
    would take longer with it; a share that was measured in such a step would be larger.
    """
    judged = series.load[series.every :] / series.steps_per_window
    load_WLR = judged.reshape(*judged.shape[:2], figures.ranks, -1).sum(axis=3)
    busiest_L, even_L = load_WLR.max(axis=2).mean(axis=0), load_WLR.mean(axis=(0, 2))
    over_even = float(busiest_L.sum() / even_L.sum())
    measured_at = job.imbalance or (1.0 if job.ep_size == 1 else over_even)
    share, seconds = figures.shares[0], figures.step_seconds
    if figures.share_source:
        longer = share * over_even / measured_at
        share, known = longer / (1 - share + longer), share
        worked_out = f"worked out from {known:.0%} measured, with other imbalance"
        source = "measured" if f"{share:.0%}" == f"{known:.0%}" else worked_out
        figures = replace(figures, shares=(share, share, share), share_source=source)
    if job.step_seconds and seconds == job.step_seconds:
        seconds /= 1 - share + share * measured_at / over_even
    model = StepModel(
        token_seconds=share * seconds / float(busiest_L.sum()),
        token_bytes=0,
        replica_bytes=figures.expert_bytes,
        home_bytes=figures.expert_bytes + figures.optimizer_bytes,
        gradient_bytes=4 * figures.expert_parameters,
        stall_seconds=STALL_SECONDS,
    )
    return replace(figures, step_seconds=seconds), model


def _ways(series: Series, figures: Figures, model: StepModel) -> dict[str, Scenario]:
    """Return each way to place experts, played."""
    (_, layers, experts), slots, static_seconds = series.load.shape, figures.replica_slots, 0.0
    named = f"with {'one' if slots == 1 else slots} replica slot{'s' if slots > 1 else ''}"
    tried = {"now": ("as it is", "static", 0), "homes": ("homes moved", "incremental", 0)}
    tried |= {"replicas": (named, "incremental", slots)} if slots else {}
    found = {}
    for key, (name, policy, more) in tried.items():
        per_rank = experts // figures.ranks + more
        (run,) = simulate(series, figures.topology, slots_per_rank=per_rank, policies=[policy], step_model=model)
        seconds = sum(run.step_seconds)
        static_seconds = static_seconds or seconds  # of the first
        first, *others = run.migration_seconds
        plans = max(len(run.plans), HORIZON_INTERVALS)
        move_seconds = (first + (plans - 1) * float(np.mean(others))) / plans
        found[key] = Scenario(
            name=name,
            imbalance=float(run.imbalance.mean()),
            worst=float(np.percentile(run.imbalance, 95)),
            expert_seconds=seconds / static_seconds,
            refresh=model.refresh_seconds(layers, more, figures.topology) / figures.step_seconds,
            move_seconds=move_seconds,
            moving=move_seconds / figures.every / figures.step_seconds,
            rebalances=sum(plan.decision == "rebalance" for plan in run.plans),
        )
    return found


def _data_parallel(job: RecordedJob, figures: Figures, load: FloatArray, way: Scenario) -> dict[str, float]:
    """Compare a recorded job in which each rank held all experts with one way to place them.

    Returns:
        ``step_seconds`` as recorded, in which no rank waits for another's tokens, and none travel;
        ``spread_step_seconds``, with moves and tokens that travel, as if nothing hid them; ``freed_bytes`` of a rank,
        weights and optimizer state of the experts that other ranks hold.
    """
    tokens_L = way.imbalance * load.sum(axis=2).mean(axis=0) / figures.ranks / figures.steps_per_window
    token_bytes = 4 * (job.hidden_size or HIDDEN) * max(1, figures.expert_bytes // figures.expert_parameters)
    travel = StepModel(token_seconds=0.0, token_bytes=token_bytes).seconds(tokens_L, figures.topology)
    elsewhere = load.shape[1] * (load.shape[2] - load.shape[2] // figures.ranks)
    freed = (figures.expert_bytes + figures.optimizer_bytes) * elsewhere
    spread = figures.step_seconds * (1 - way.saved(figures.shares[0]) + way.moving) + travel
    return {"step_seconds": job.step_seconds, "spread_step_seconds": spread, "freed_bytes": freed}


def _why_it_pays(figures: Figures, ways: Mapping[str, Scenario], best: Scenario) -> tuple[str, str]:
    """Return the verdict, and the settings to write."""
    least_share = best.cost / (1 - best.expert_seconds)
    verdict = "It pays" if least_share <= figures.shares[1] else f"It pays from {least_share:.0%} of expert work on"
    least = min((ways["now"], ways["homes"]), key=lambda way: way.worst)
    if f"{best.worst:.2f}" > f"{least.worst:.2f}":
        verdict += f", but the 95th percentile is {best.worst:.2f}x, {least.name} {least.worst:.2f}x"
    settings = f"interval={figures.every}"
    settings += f", replica_slots={figures.replica_slots}" if best is ways.get("replicas") else ""
    if not figures.share_source and not figures.share_is_assumed:  # given: the job's gate counts with it
        settings += f", migration=MigrationConfig(moe_share={figures.shares[0]:g})"
    return f"{verdict}.", f"Next: BalancerConfig({settings})"


def _why_it_does_not_pay(
    figures: Figures, steps: int, now: Scenario, best: Scenario, hottest: float
) -> tuple[str, str]:
    """Return the verdict with its reason, and what to try; ``steps``: training steps that were recorded."""
    longer, share = 4 * figures.every, figures.shares[0]
    judged = longer if longer * LEAST_INTERVALS <= steps else steps // LEAST_INTERVALS
    advice = f"Try a longer interval: --every {judged}."
    if judged < 2 * figures.every:
        advice = f"Record {LEAST_INTERVALS * longer} steps or more, and try a longer interval: --every {longer}."
    again, even = "Ask again when the router's load has changed.", 1 - 1 / now.imbalance
    if share * even < LEAST_SAVED:
        small = "the load is balanced" if MOE_SHARE * even < LEAST_SAVED else "expert work is a small share of a step"
        reason, advice = f"{small}, and even load would save {_percent(share * even)} of a step", again
    elif best.saved(share) < LEAST_SAVED and not figures.replica_slots and hottest > CLOSE * best.imbalance:
        reason = f"the hottest expert alone has {hottest:.2f}x the mean tokens of a rank, and a home cannot be split"
        advice = "Try --replica-slots 1, where the framework takes replicas."
    elif not best.rebalances:
        reason = "no move would have saved what it costs"
    elif best.saved(share) < LEAST_SAVED:
        reason, advice = "experts cannot be spread more evenly, or the load is too unlike the past", again
    else:
        reason = f"moving takes {_percent(best.moving)} of the time of all steps"
    return f"It does not pay: {reason}.", advice


def _saved(best: Scenario, figures: Figures) -> dict[str, float]:
    """Return the share of a step that it takes less: for the share that is known, the least and the most."""
    share, *span = map(best.saved, figures.shares)
    return {"share": share, "low": min(span), "high": max(span)}


def _steps(interval: int) -> str:
    return "step" if interval == 1 else f"{interval} steps"


def _percent(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.0995 else f"{share:.1%}"
