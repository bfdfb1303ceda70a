"""Makes one decision on a worker thread of every rank: sum the load, plan on rank 0, broadcast the plan, agree.

Rank 0 alone plans; the others take its bytes (design rule 2).
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..config import BalancerConfig
from ..distributed.consensus import Agreement, maxima
from ..distributed.points import Phase, Probe, unobserved
from ..distributed.private_groups import hang_up
from ..events import LoadMeasured, RebalancePlanned
from ..load.aggregate import HostCopy, aggregate
from ..load.declared import DeclaredLoadError, summed
from ..load.expert_clock import ASSUMED_SHARE, ExpertShare, SampledStep, median_time
from ..migration.difference import apply, difference
from ..placement import Placement
from ..planner import CostModel, Plan, plan
from ..planner.cost import crossing_seconds
from ..planner.evaluate import predicted_imbalance
from ..planner.track_record import JUDGED, TrackRecord
from ..utils.spans import phase
from .guard import Guard, Sample, SampleComparison
from .planner_process import PlannerLost, PlannerProcess
from .runtime import Runtime

logger = logging.getLogger("eplb_runtime")

SOURCE_MEMORY = 0.5
"""Weight that older counts of token sources keep at each later decision."""

PLANNING = 0.5
"""Of the timeout, that other ranks wait for a plan."""
SAID_BELOW = 0.8
"""A decision's reason says how much of predicted gains is believed, where it is less than this."""
_TRIES = 4  # plans that are asked for until one fits the longest pause; the last one does for certain


@dataclass(frozen=True)
class Decision:
    """A decision, the same on all ranks. ``target`` is None when nothing is to move or the decision failed.

    Args:
        failure: reason for which there is no plan; empty: there is one.
        imbalance: float64 ``[T, L]``, max/mean rank load of each measured row under the placement of its time.
        load: int64 ``[T, L, E]``, measured over all ranks.
        placements: placements of its rows, each with the row that it ends before.
        stays: reason for which a plan is not carried out; empty: it is, or there is none.
        uncounted: a line that names MoE layers in evaluation mode while others train; empty: none.
        summary: decision, reason, moves, imbalance_before, imbalance_after, plan_seconds, as rank 0 sent them.
    """

    target: Placement | None = None
    failure: str = ""
    connections_broken: bool = False
    imbalance: NDArray[np.float64] | None = None
    summary: dict[str, Any] | None = None
    finding: str = ""
    stays: str = ""
    uncounted: str = ""
    load: NDArray[np.int64] | None = None
    placements: tuple[tuple[int, Placement], ...] = ()
    step_seconds: float = 0.0
    share: ExpertShare | None = None
    steps: int = 0

    def measured(self, step: int) -> LoadMeasured | None:
        """The event of the load that this decision started from; None: it failed before."""
        if self.imbalance is None:
            return None
        buckets = tuple(tuple(bucket) for bucket in self.imbalance.tolist())
        return LoadMeasured(
            step,
            self.steps,
            buckets,
            self.step_seconds,
            None if self.share is None else self.share.value,
            "" if self.share is None else self.share.source,
            load=self.load,
            placements=self.placements,
        )

    def planned(self, step: int) -> RebalancePlanned:
        """The event of the plan, as rank 0 sent it."""
        summary = self.summary or {}
        sent = {own.name: summary[own.name] for own in fields(RebalancePlanned) if own.name in summary}
        if (by_layer := summary.get("by_layer")) is not None:
            sent["by_layer"] = np.array(by_layer, dtype=np.float64)
        return RebalancePlanned(step, **sent)


@dataclass(frozen=True)
class Measurement:
    """Input of a decision.

    Args:
        buckets: this rank's load since the last decision.
        earlier: ``(end, placement)``: buckets before ``end`` were counted under that placement.
        stall_seconds: cost of a rebalance besides its transfers.
        sample: of the guard, to compare over ranks; None: it is off.
        computed: whether MoE layers ran since the last decision.
        declared: float64 ``[T, L, E]``, the load that this rank declares; None: none.
        token_bytes: that a (token, choice) pair sends in a step.
        sampled_steps: in which expert work was measured.
        even_share: of a step, expert work with even load.
        keys_of_earlier: number of `JobStore.passing` keys from before this decision.
        in_evaluation: names of this rank's experts modules that are in evaluation mode, by their MoE layer.
    """

    buckets: HostCopy
    placement: Placement
    earlier: tuple[tuple[int, Placement], ...]
    step_seconds: float
    stall_seconds: float
    home_bytes: int
    steps: int = 0
    token_bytes: int = 0
    sample: Sample | None = None
    computed: bool = True
    declared: NDArray[np.float64] | None = None
    sampled_steps: tuple[SampledStep, ...] = ()
    even_share: float = ASSUMED_SHARE
    keys_of_earlier: int = 0
    in_evaluation: Mapping[int, str] = field(default_factory=dict)

    @property
    def placements(self) -> tuple[tuple[int, Placement], ...]:
        """``(end, placement)`` for all buckets."""
        return (*self.earlier, (len(self.buckets.wait()), self.placement))


class DecisionMaker:
    """Makes decisions for one rank, on the balancer's worker thread.

    Attributes:
        history: load of all ranks in the last decisions, int64 ``[L, E]`` each, equal on every rank: any of them can
            save it, though only the planner plans from it.
        saved_track_record: what came true of earlier plans, as rank 0 sent it with its last plan.
        on_load: called with the load of all ranks since the last decision, ``[T, L, E]``, the training steps of a row,
            the bytes of this rank's largest expert with its state, and seconds of a step in expert work, 0: not
            measured.
        share: of a step in expert work, equal on every rank.
    """

    def __init__(self, runtime: Runtime, guard: Guard, probe: Probe = unobserved) -> None:
        self._config = runtime.config
        self._topology = runtime.topology
        self._guard = guard
        self._probe = probe
        self._steps_per_bucket = runtime.counter.steps_per_bucket
        self._last_gap = 1
        rows = self._config.window_rows(self._steps_per_bucket)
        self.history: deque[NDArray[np.int64]] = deque(maxlen=rows)
        self.share = ExpertShare.before_measuring(self._config.migration.moe_share)
        self._sources: NDArray[np.float64] | None = None
        self._track_record = TrackRecord(_decisions_of_horizon(self._config), self._config.speed_R)
        self.saved_track_record: list[list[float]] = []
        self._job = runtime.job
        self._store = runtime.groups.store
        self._is_planner = self._job.is_planner
        self._planner_rank = self._job.ranks[0]
        self.process: PlannerProcess | None = None
        if self._is_planner and self._config.policy != "static":
            self.process = PlannerProcess(self._config.timeout_seconds * PLANNING)
        self.planner: Callable[..., Plan] = plan if self.process is None else self.process.plan
        self.on_load: Callable[[NDArray[np.int64], int, int, float], None] = lambda load_TLE, steps, nbytes, seconds: (
            None
        )

    def resume_track_record(self, rows: Any) -> None:
        """Judge further predictions beside saved ones.

        Raises:
            ValueError: as `TrackRecord.resume`.
        """
        self._track_record.resume(rows)
        self.saved_track_record = self._track_record.saved()

    def close(self) -> None:
        """Make no more plans, and end one that is being made."""
        if self.process is not None:
            self.process.close()

    def decide(self, measurement: Measurement, key: str, control: dist.ProcessGroup, agreement: Agreement) -> Decision:
        """Make a decision. Collective over the control group; never raises.

        Args:
            key: names this decision; new for each. A rank whose wait times out records that under it.
            control: group of when the decision began; it may be replaced before the decision ends.
            agreement: on the same group.
        """
        try:
            return self._decide(measurement, key, control, agreement)
        except Exception as error:
            logger.debug("a decision failed", exc_info=True)
            hang_up(control)  # later work of this rank must not mix with the others' part of this decision
            return Decision(failure=f"{type(error).__name__}: {error}", connections_broken=True)

    def _decide(self, measurement: Measurement, key: str, control: dist.ProcessGroup, agreement: Agreement) -> Decision:
        epoch = measurement.placement.epoch
        self._last_gap = measurement.steps or self._last_gap
        self._probe(Phase.DECIDING, key)
        with phase("decision: add up load", epoch=epoch):
            sources = self._by_node(measurement, control)
            total, share = self._add_up(measurement, control)
        comparison = (
            SampleComparison() if measurement.sample is None else self._guard.compare(measurement.sample, control)
        )
        finding = comparison.finding
        shape = (measurement.placement.num_layers, measurement.placement.num_experts)
        try:
            declared = summed(measurement.declared, shape, control)
        except DeclaredLoadError as error:
            return Decision(failure=str(error), finding=finding)
        if not total.any() and declared is None:
            return self._nothing_counted(finding, measurement)
        if total.any():
            self.history.extend(total)
            seconds = share.value * measurement.step_seconds if share.source == "measured" else 0.0
            self.on_load(total, self._steps_per_bucket or measurement.steps, measurement.home_bytes, seconds)
            if sources is not None:
                self._sources = sources + (0.0 if self._sources is None else SOURCE_MEMORY * self._sources)
        home_bytes, token_bytes = maxima(
            torch.tensor([measurement.home_bytes, measurement.token_bytes]), control
        ).tolist()
        # All ranks are in this decision, so none is in an earlier one or its migration.
        self._store.forget(measurement.keys_of_earlier)
        measurement = replace(measurement, home_bytes=home_bytes, token_bytes=token_bytes, declared=declared)
        imbalance, problem = None, ""
        try:
            imbalance = _imbalance_as_it_was(total, measurement, self._config.speed_R) if len(total) else None
            mean_imbalance = 1.0 if imbalance is None else float(imbalance.mean())
            if not share.at:
                self.share = share = share.measured_at(mean_imbalance)
            even_share = share.even(mean_imbalance)
            measurement = replace(measurement, even_share=even_share)
        except Exception as error:
            problem = self._failed_here(error)
        with phase("decision: plan", epoch=epoch):
            made_here = self._plan(measurement, total) if self._is_planner else b""
            message = self._broadcast(made_here, control)
        target, digest = None, bytes(16)
        summary: dict[str, Any] = {}
        try:
            self._probe(Phase.PLANNED, message)
            target, summary, digest = self._read(message, measurement.placement)
            self.saved_track_record = summary.get("track_record", self.saved_track_record)
        except Exception as error:
            problem = self._failed_here(error)
        made = Decision(
            imbalance=imbalance,
            finding=finding,
            uncounted=_uncounted(total, measurement.in_evaluation),
            load=total,
            placements=measurement.placements,
            step_seconds=measurement.step_seconds,
            share=share,
            steps=self._steps_of(total, measurement),
        )
        with phase("decision: agree", epoch=epoch):
            verdict = agreement.check_equal(digest, "plan", problem)
            if verdict.commit:
                self._probe(Phase.VOTED, verdict)
                verdict = agreement.record(key, verdict)
        if not verdict.commit:
            return replace(made, failure=verdict.cause, connections_broken=verdict.connections_broken)
        if summary.get("failure"):
            return replace(made, failure=summary["failure"])
        if comparison.stays and target is not None:
            return replace(made, summary=staying(measurement.placement, comparison.stays), stays=comparison.stays)
        return replace(made, target=target, summary=summary)

    def _failed_here(self, error: Exception) -> str:
        """Log a problem of this rank, for which the others wait: it is reported when digests are compared."""
        logger.warning("the decision failed on this rank", exc_info=error)
        return f"{type(error).__name__}: {error}"

    def _add_up(self, measurement: Measurement, control: dist.ProcessGroup) -> tuple[NDArray[np.int64], ExpertShare]:
        """Sum the load, int64 ``[T, L, E]``, and the measured seconds of expert work and of steps, over all ranks.
        Returns the former, and the share of a step in expert work. Collective."""
        measurement.buckets.wait()  # whatever was enqueued before, such as the marks of sampled steps, is over then
        nanoseconds = [round(1e9 * seconds) for seconds in median_time(measurement.sampled_steps) or (0.0, 0.0)]
        total, (step, expert) = aggregate(measurement.buckets, control, nanoseconds)
        self.share = self.share.updated(expert / 1e9, step / 1e9)
        return total.numpy(), self.share

    def _by_node(self, measurement: Measurement, control: dist.ProcessGroup) -> NDArray[np.float64] | None:
        """float64 ``[N, L, E]``, tokens since the last decision by source node; None: there is one node. Collective,
        ahead of the sum over ranks, which overwrites this rank's counts."""
        topology = self._topology
        if topology.num_nodes == 1:
            return None
        counted_LE = measurement.buckets.wait().sum(dim=0)
        counted_NLE = counted_LE.new_zeros(topology.num_nodes, *counted_LE.shape)
        counted_NLE[topology.node_of(self._job.ep_rank)] = counted_LE
        dist.all_reduce(counted_NLE, group=control)
        return counted_NLE.numpy().astype(np.float64)

    def place_anew(
        self, load: NDArray[np.int64], current: Placement, control: dist.ProcessGroup, agreement: Agreement
    ) -> Decision:
        """Plan a placement of the sizes of ``current`` for a load, from scratch. Collective.

        Args:
            load: int64 ``[T, L, E]``, equal on every rank.

        Raises:
            RuntimeError: a rank did not arrive within the group's timeout.
        """

        def ask() -> bytes:
            if self.process is not None:
                self.process.is_ready(self._config.timeout_seconds * (1.0 - PLANNING) / 2.0)
            made = self.planner(
                load,
                self._topology,
                slots_per_rank=current.slots_per_rank,
                policy=self._config.policy,
                layout="home",
                rank_speed=self._config.rank_speed,
            )
            return _as_message(made, current)

        message = self._broadcast(_or_failure(ask) if self._is_planner else b"", control)
        target, summary, digest = self._read(message, current)
        verdict = agreement.check_equal(digest, "plan")
        if not verdict.commit:
            return Decision(failure=verdict.cause, connections_broken=verdict.connections_broken)
        return Decision(target=target, failure=summary.get("failure", ""), summary=summary)

    def _steps_of(self, buckets: Tensor | NDArray[np.int64], measurement: Measurement) -> int:
        """Training steps that buckets ``[T, L, E]`` cover."""
        return len(buckets) * self._steps_per_bucket if self._steps_per_bucket else measurement.steps

    @property
    def _horizon(self) -> int:
        """Steps over which a plan counts its gain; without periodic decisions, the steps between the last two."""
        return self._last_gap if self._config.horizon is None else self._config.horizon

    def _nothing_counted(self, finding: str, measurement: Measurement) -> Decision:
        """The decision without any token counted, and a finding that says why. Equal on every rank."""
        steps = self._steps_of(measurement.buckets.wait(), measurement)
        text = f"no token was counted in the last {steps} steps"
        if measurement.computed and steps:  # none: rebalance() right after a decision
            finding = finding or (
                f"{text} though the MoE layers ran: the model is in evaluation mode (call model.train()), or every "
                "token is padding; nothing can be balanced"
            )
        return Decision(failure=text, finding=finding)

    def _plan(self, measurement: Measurement, total: NDArray[np.int64]) -> bytes:
        """On rank 0: the plan as bytes, or why there is none. ``total``: int64 ``[T, L, E]``, new ones."""
        load = np.stack(self.history) if self.history else measurement.declared
        assert load is not None

        def make() -> bytes:
            self._track_record.observe(total.sum(axis=0, dtype=np.float64))
            made = self._make_plan(load, measurement)
            message = _as_message(made, measurement.placement, self._predictions(self._cost(measurement)))
            # What is declared is the next load alone: no later one says whether the plan was good.
            if made.decision == "rebalance" and measurement.declared is None:
                self._track_record.note(made)
            return message

        return _or_failure(make)

    def _make_plan(self, load: NDArray[Any], measurement: Measurement) -> Plan:
        """Ask the planner; with a longest pause, again under fewer bytes until the busiest link is through in time."""
        trust, cost, most = self._track_record.trust, self._cost(measurement), None
        slots, longest = measurement.placement.slots_per_rank, self._config.migration.max_pause_seconds
        began = time.monotonic()
        for left in reversed(range(_TRIES)):
            made = self.planner(
                load,
                self._topology,
                slots_per_rank=slots,
                policy=self._config.policy,
                layout="home",
                current=measurement.placement,
                max_moves=self._config.migration.max_moves,
                max_bytes=most,
                cost=cost,
                gate=self._config.gate,
                declared=measurement.declared,
                rank_speed=self._config.rank_speed,
                sources=self._sources,
                trust=trust,
            )
            seconds = cost.transfer_seconds(made.moves, self._topology, slots)
            if longest is None or seconds <= longest:
                break
            moved = float(cost.bytes_moved(made.moves, self._topology, slots)[0].sum())
            if time.monotonic() - began > self._config.timeout_seconds * PLANNING / 2:
                raise PlannerLost("no plan that fits max_pause_seconds was found in time")
            # The last one fits as if one link carried all.
            most = int(moved * longest / seconds if left > 1 else longest * self._topology.slowest_bandwidth)
        if trust < SAID_BELOW and self._config.gate == "payoff":
            made = replace(made, reason=f"{made.reason} (counting {trust:.0%} of predicted gains: as much came true)")
        if not measurement.step_seconds:  # no step is timed yet, as at the first decision of a resumed job
            made = replace(made, seconds_saved=np.nan)
        return made

    def _predictions(self, cost: CostModel) -> dict[str, Any]:
        """Predicted and true gains of earlier plans, in seconds of a plan's horizon at today's step time."""
        seconds = cost.horizon_steps * cost.moe_share * cost.step_seconds
        return {
            **self._track_record.judgement(seconds),
            "horizon_steps": cost.horizon_steps,
            "track_record": self._track_record.saved(),
        }

    def _cost(self, measurement: Measurement) -> CostModel:
        return CostModel(
            home_bytes=measurement.home_bytes,
            replica_bytes=0,  # replicas are refreshed after every step anyway
            step_seconds=max(measurement.step_seconds, 1e-9),
            moe_share=min(1.0, measurement.even_share),
            horizon_steps=self._horizon,
            stall_seconds=measurement.stall_seconds,
            crossing_seconds=self._crossing_seconds(measurement.token_bytes, measurement.step_seconds),
        )

    def _crossing_seconds(self, token_bytes: int, step_seconds: float) -> float:
        """Crossing seconds for the cost: of the layers of one stage, on average; other stages' ranks transfer theirs
        meanwhile."""
        if not self.history or self._topology.num_nodes == 1 or step_seconds <= 0:
            return 0.0  # before a step is timed nobody knows what share of it crossing takes
        if self._steps_per_bucket:
            per_bucket_L, steps_per_bucket = np.stack(self.history).sum(axis=2).mean(axis=0), self._steps_per_bucket
        else:  # rows are of unequal lengths
            per_bucket_L, steps_per_bucket = self.history[-1].sum(axis=1), self._last_gap
        holders = self._job.ep_size * len(self._job.edp_ranks) * steps_per_bucket
        own = sum(self._job.layers_of_stage[stage] for stage in self._job.stages)
        return crossing_seconds(per_bucket_L / holders, token_bytes, self._topology) * own / len(per_bucket_L)

    def _broadcast(self, message: bytes, control: dist.ProcessGroup) -> bytearray:
        size = torch.tensor([len(message)])
        dist.broadcast(size, src=self._planner_rank, group=control)
        buffer = bytearray(message) if self._is_planner else bytearray(int(size.item()))
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=self._planner_rank, group=control)
        return buffer

    def _read(self, message: bytearray, current: Placement) -> tuple[Placement | None, dict[str, Any], bytes]:
        """Decode the plan, with the digest to compare (zeros: the bytes contradict themselves)."""
        try:
            fields = json.loads(message)
            if fields.get("failure"):
                return None, fields, b"f" * 16
            if fields["placement"] is None:
                return None, fields, b"s" * 16
            target = apply(current, fields["placement"])
            target.require_model(current.num_layers, current.num_experts, current.num_ranks, current.replica_slots)
            if (target.digest(), target.epoch) != (fields["digest"], fields["epoch"]):
                raise ValueError("its digest is not the one it was sent with")
        except ValueError as error:
            logger.warning("the plan that arrived on this rank is not usable: %s", error)
            return None, {}, bytes(16)
        return target, fields, bytes.fromhex(target.digest())


def _decisions_of_horizon(config: BalancerConfig) -> int:
    """Decisions for which a plan promises its gain."""
    if config.horizon is None:
        return 1
    return JUDGED if config.interval is None else -(-config.horizon // config.interval)


def _uncounted(total: NDArray[np.int64], in_evaluation: Mapping[int, str]) -> str:
    """Name the layers in evaluation mode without a counted token, where other layers have some: a frozen part of a
    model is no error.

    Args:
        total: int64 ``[T, L, E]``, of all ranks.
        in_evaluation: names of layers by index.
    """
    is_counted_L: NDArray[np.bool_] = np.asarray(total.any(axis=(0, 2)))
    names = [name for layer, name in in_evaluation.items() if not is_counted_L[layer]]
    if not names or not is_counted_L.any():
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        "call train() on the whole model (frozen parameters stay frozen): MoE layers in evaluation mode, while others "
        f"train, have no load to place experts by: {names[0]}{more}"
    )


def _or_failure(work: Callable[[], bytes]) -> bytes:
    """Return the plan as bytes, or the reason for which there is none, for which other ranks wait."""
    try:
        return work()
    except PlannerLost as lost:
        why = str(lost)
    except Exception as error:
        logger.warning("planning failed", exc_info=True)
        why = f"planning failed: {type(error).__name__}: {error}"
    return json.dumps({"failure": why}).encode()


def _as_message(made: Plan, current: Placement, predictions: Mapping[str, Any] | None = None) -> bytes:
    """The plan as bytes, with what became of earlier ones."""
    moves = made.decision == "rebalance"
    target = made.placement.with_epoch(current.epoch + 1)
    before = made.imbalance_before
    return json.dumps(
        {
            "decision": made.decision,
            "reason": made.reason,
            "code": made.code,
            "moves": made.moved_slots,
            "imbalance_before": 0.0 if before is None else float(before.mean()),
            "imbalance_after": float(made.imbalance_after.mean()),
            "imbalance_bound": float(made.lower_bound.mean()),
            "seconds_saved": None if np.isnan(made.seconds_saved) else made.seconds_saved,
            "seconds_spent": None if np.isnan(made.seconds_spent) else made.seconds_spent,
            "by_layer": None if before is None else np.stack([before, made.imbalance_after, made.lower_bound]).tolist(),
            "plan_seconds": made.plan_seconds,
            "epoch": target.epoch,
            "digest": target.digest(),
            "placement": difference(current, target) if moves else None,
            **(predictions or {}),
        }
    ).encode()


def staying(placement: Placement, reason: str) -> dict[str, Any]:
    """The summary of a decision without a plan."""
    text = {"decision": "stay", "reason": reason, "code": "", "moves": 0, "epoch": placement.epoch + 1}
    return {**text, "imbalance_before": 0.0, "imbalance_after": 0.0, "plan_seconds": 0.0}


def _imbalance_as_it_was(
    load: NDArray[np.int64], measurement: Measurement, speed_R: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Imbalance of each row under the placement of its time."""
    by_placement: list[NDArray[np.float64]] = []
    start = 0
    for end, placement in measurement.placements:
        by_placement += [predicted_imbalance(row.astype(np.float64), placement, speed_R) for row in load[start:end]]
        start = end
    return np.stack(by_placement)
