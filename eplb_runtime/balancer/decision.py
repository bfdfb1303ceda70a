"""Makes one decision on the control channel of every rank: sum the load, plan on rank 0, broadcast the plan, agree."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray

from ..distributed.consensus import Agreement, Phase, Probe, maxima
from ..distributed.control_channel import ConnectionLost
from ..events import LoadMeasured, RebalancePlanned
from ..load.clock import ASSUMED_SHARE, ExpertShare, SampledStep, median_time
from ..load.counter import HostCopy, aggregate
from ..load.declared import DeclaredLoadError, summed
from ..placement import Placement
from ..planner import CostModel, Plan, plan
from ..planner.cost import crossing_seconds
from ..planner.evaluate import predicted_imbalance
from ..planner.gate import JUDGED, TrackRecord
from ..utils.spans import phase
from .guard import Guard, Sample
from .planner_process import PlannerLost, PlannerProcess
from .runtime import Runtime

logger = logging.getLogger("eplb_runtime")

SOURCE_MEMORY = 0.5  # weight that older counts of token sources keep at each later decision
PLANNING = 0.5  # of the timeout, that other ranks wait for a plan
_TRIES = 4  # plans that are asked for until one fits the longest pause; the last one does for certain


@dataclass(frozen=True)
class Decision:
    """A decision, the same on all ranks. ``target`` is None when nothing is to move or the decision failed.

    Args:
        failure: reason for which there is no plan; empty: there is one.
        planned: the event of the plan, as rank 0 sent it; its step is 0.
        measured: the event of the load that the decision started from; None: it failed before.
        finding: a mistake that the guard has found; empty: none.
    """

    failure: str = ""
    planned: RebalancePlanned | None = None
    target: Placement | None = None
    measured: LoadMeasured | None = None
    finding: str = ""


@dataclass(frozen=True)
class Measurement:
    """Input of a decision.

    Args:
        buckets: this rank's load since the last decision.
        earlier: ``(end, placement)``: buckets before ``end`` were counted under that placement.
        stall_seconds: cost of a rebalance on top of its transfers.
        sample: of the guard, to compare over ranks; None: it is off.
        declared: float64 ``[T, L, E]``, the load that this rank declares; None: none.
        token_bytes: that a (token, choice) pair sends in a step.
        sampled_steps: in which expert work was measured.
        even_share: of a step, expert work with even load.
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
    declared: NDArray[np.float64] | None = None
    sampled_steps: tuple[SampledStep, ...] = ()
    even_share: float = ASSUMED_SHARE

    @property
    def placements(self) -> tuple[tuple[int, Placement], ...]:
        """All placements under which ``buckets`` were counted, oldest first, each with the number of the bucket before
        which it ended. Waits until the counts are on the host."""
        return (*self.earlier, (len(self.buckets.wait()), self.placement))


class PlanMaker:
    """Source of decisions on one rank, and on rank 0 the planner. ``history``: load of all ranks in the last decisions,
    int64 ``[L, E]`` each, equal on every rank: any of them can save it, though only the planner plans from it.
    ``share``: of a step in expert work, equal on every rank."""

    def __init__(self, runtime: Runtime) -> None:
        self._config, self._topology, self._job = runtime.config, runtime.topology, runtime.job
        self._steps_per_bucket, self._last_gap = runtime.counter.steps_per_bucket, 1
        rows = self._config.window_rows(self._steps_per_bucket)
        self.history: deque[NDArray[np.int64]] = deque(maxlen=rows)
        self.share = ExpertShare.before_measuring(self._config.migration.moe_share)
        self._sources: NDArray[np.float64] | None = None
        horizon, interval = self._config.horizon, self._config.interval
        decisions = 1 if horizon is None else JUDGED if interval is None else -(-horizon // interval)
        self._track_record = TrackRecord(decisions, self._config.speed_R)  # a plan promises its gain for so many
        self.process: PlannerProcess | None = None
        if self._job.is_planner and self._config.policy != "static":
            self.process = PlannerProcess(self._config.timeout_seconds * PLANNING)
        self.planner: Callable[..., Plan] = plan if self.process is None else self.process.plan

    def close(self) -> None:
        """End the planner process, and with it a plan that is being made; without a planner process do nothing."""
        if self.process is not None:
            self.process.close()

    def add_up(self, measurement: Measurement, group: dist.ProcessGroup) -> NDArray[np.int64]:
        """Return the load over all ranks, int64 ``[T, L, E]``. Adds it to `history`, and to what is known of where
        tokens come from, unless it is all zero; updates `share` by the steps that were sampled. Collective."""
        self._last_gap = measurement.steps or self._last_gap
        sources = self._by_node(measurement, group)
        measurement.buckets.wait()  # whatever was enqueued before, such as the marks of sampled steps, is over then
        nanoseconds = [round(1e9 * seconds) for seconds in median_time(measurement.sampled_steps) or (0.0, 0.0)]
        summed_up, (step, expert) = aggregate(measurement.buckets, group, nanoseconds)
        self.share = self.share.updated(expert / 1e9, step / 1e9)
        total: NDArray[np.int64] = summed_up.numpy()
        if total.any():
            self.history.extend(total)
            if sources is not None:
                self._sources = sources + (0.0 if self._sources is None else SOURCE_MEMORY * self._sources)
        return total

    def measured(self, total: NDArray[np.int64], measurement: Measurement) -> tuple[Measurement, LoadMeasured | None]:
        """Return the measurement with ``even_share`` set, and the event of the load ``total``, as step 0; None: no step
        has ended. A share that was measured just now is noted in `share` with its imbalance."""
        rows, first, imbalance = total.astype(np.float64), 0, list[NDArray[np.float64]]()
        for end, placement in measurement.placements:  # each row under that of its time
            imbalance += [predicted_imbalance(row, placement, self._config.speed_R) for row in rows[first:end]]
            first = end
        mean = float(np.mean(imbalance)) if imbalance else 1.0
        if not self.share.at:
            self.share = self.share.measured_at(mean)
        measurement = replace(measurement, even_share=self.share.even(mean))
        if not imbalance:
            return measurement, None
        event = LoadMeasured(
            0,
            measurement.steps,
            tuple(tuple(row_L.tolist()) for row_L in imbalance),
            measurement.step_seconds,
            self.share.value,
            self.share.source,
            home_bytes=measurement.home_bytes,
            load=total,
            placements=measurement.placements,
        )
        return measurement, event

    def _by_node(self, measurement: Measurement, group: dist.ProcessGroup) -> NDArray[np.float64] | None:
        """float64 ``[N, L, E]``, tokens since the last decision by source node; None: there is one node. Collective."""
        topology = self._topology
        if topology.num_nodes == 1:
            return None
        counted_LE = measurement.buckets.wait().sum(dim=0)
        counted_NLE = counted_LE.new_zeros(topology.num_nodes, *counted_LE.shape)
        counted_NLE[topology.node_of(self._job.ep_rank)] = counted_LE
        dist.all_reduce(counted_NLE, group=group)
        return counted_NLE.numpy().astype(np.float64)

    def plan(self, measurement: Measurement, total: NDArray[np.int64]) -> bytes:
        """Make a plan for the load in `history`, or the declared load, and return it as JSON. First earlier plans are
        judged by ``total``, int64 ``[T, L, E]``, the load since the last decision; a plan that moves experts is noted
        to be judged later, unless load was declared. What the planner raises is raised."""
        load = np.stack(self.history) if self.history else measurement.declared
        assert load is not None
        self._track_record.observe(total.sum(axis=0, dtype=np.float64))
        made, cost = self._make_plan(load, measurement), self._cost(measurement)
        seconds = cost.horizon_steps * cost.moe_share * cost.step_seconds
        judged = {**self._track_record.judgement(seconds), "horizon_steps": cost.horizon_steps}
        message = _as_message(made, measurement.placement, judged)
        # What is declared is the next load alone: no later one says whether the plan was good.
        if made.decision == "rebalance" and measurement.declared is None:
            self._track_record.note(made)
        return message

    def _make_plan(self, load: NDArray[Any], measurement: Measurement) -> Plan:
        """Ask the planner; with a longest pause, again under fewer bytes until the busiest link is through in time."""
        cost, most = self._cost(measurement), None
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
                trust=self._track_record.trust,
            )
            seconds = cost.transfer_seconds(made.moves, self._topology, slots)
            if longest is None or seconds <= longest:
                break
            moved = float(cost.bytes_moved(made.moves, self._topology, slots)[0].sum())
            if time.monotonic() - began > self._config.timeout_seconds * PLANNING / 2:
                raise PlannerLost("no plan that fits max_pause_seconds was found in time")
            # The last one fits as if one link carried all.
            most = int(moved * longest / seconds if left > 1 else longest * self._topology.slowest_bandwidth)
        if not measurement.step_seconds:  # no step is timed yet, as at the first decision of a resumed job
            made = replace(made, seconds_saved=np.nan)
        return made

    def _cost(self, measurement: Measurement) -> CostModel:
        return CostModel(
            home_bytes=measurement.home_bytes,
            replica_bytes=0,  # replicas are refreshed after every step anyway
            step_seconds=max(measurement.step_seconds, 1e-9),
            moe_share=min(1.0, measurement.even_share),
            horizon_steps=self._config.horizon or self._last_gap,  # without periodic decisions, between the last two
            stall_seconds=measurement.stall_seconds,
            crossing_seconds=self._crossing_seconds(measurement.token_bytes, measurement.step_seconds),
        )

    def _crossing_seconds(self, token_bytes: int, step_seconds: float) -> float:
        """Crossing seconds for the cost: of one stage's layers, on average; other stages' are spent meanwhile."""
        if not self.history or self._topology.num_nodes == 1 or step_seconds <= 0:
            return 0.0  # before a step is timed the share of it that crossing takes is not known
        if self._steps_per_bucket:
            per_bucket_L, steps_per_bucket = np.stack(self.history).sum(axis=2).mean(axis=0), self._steps_per_bucket
        else:  # rows are of unequal lengths
            per_bucket_L, steps_per_bucket = self.history[-1].sum(axis=1), self._last_gap
        holders = self._job.ep_size * len(self._job.edp_ranks) * steps_per_bucket
        own = sum(self._job.layers_of_stage[stage] for stage in self._job.stages)
        return crossing_seconds(per_bucket_L / holders, token_bytes, self._topology) * own / len(per_bucket_L)

    def broadcast(self, make: Callable[[], bytes], group: dist.ProcessGroup) -> bytearray:
        """Call ``make`` on rank 0, and return its bytes on every rank. If it raises, return the reason as JSON,
        ``{"failure": reason}``; rank 0 logs errors other than `PlannerLost`. Collective."""
        buffer = bytearray(_or_failure(make) if self._job.is_planner else b"")
        dist.broadcast(size := torch.tensor([len(buffer)]), src=self._job.ranks[0], group=group)
        buffer = buffer or bytearray(int(size.item()))
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=self._job.ranks[0], group=group)
        return buffer


def decide(
    measurement: Measurement,
    maker: PlanMaker,
    guard: Guard,
    key: str,
    probe: Probe,
    group: dist.ProcessGroup,
    agreement: Agreement,
) -> Decision:
    """Make a decision and return it: add up the load, compare samples of the guard, plan on rank 0, broadcast the plan
    and agree on it. A failure that all ranks know is in ``Decision.failure``. The verdict is recorded in the store
    under ``key``, new for each decision: a rank whose wait times out records its own verdict there. Collective over a
    control group, on any thread. Raises ConnectionLost: a rank did not arrive in time."""
    epoch = measurement.placement.epoch
    probe(Phase.DECIDING, key)
    with phase("decision: add up load", epoch=epoch):
        total = maker.add_up(measurement, group)
    finding = "" if measurement.sample is None else guard.compare(measurement.sample, group)
    try:
        declared = summed(measurement.declared, total.shape[1:], group)
    except DeclaredLoadError as error:
        return Decision(failure=str(error), finding=finding)
    if not total.any() and declared is None:
        return Decision(failure=f"no token was counted in the last {measurement.steps} steps", finding=finding)
    home_bytes, token_bytes = maxima(torch.tensor([measurement.home_bytes, measurement.token_bytes]), group).tolist()
    measurement = replace(measurement, home_bytes=home_bytes, token_bytes=token_bytes, declared=declared)
    measured, problem = None, ""
    try:
        measurement, measured = maker.measured(total, measurement)
    except Exception as error:
        problem = _failed_here(error)
    with phase("decision: plan", epoch=epoch):
        message = maker.broadcast(partial(maker.plan, measurement, total), group)
    sent = Decision()
    try:
        probe(Phase.PLANNED, message)
        sent = _read(message, measurement.placement)
    except Exception as error:
        problem = _failed_here(error)
    with phase("decision: agree", epoch=epoch):
        verdict = agreement.check_equal(xxhash.xxh3_128_digest(message), "plan", problem)
        if verdict.commit:
            probe(Phase.VOTED, verdict)
            verdict = agreement.record(key, verdict)
    if verdict.connections_broken:
        raise ConnectionLost(verdict.cause)
    failure = verdict.cause or sent.failure
    target = None if failure else sent.target
    return replace(sent, failure=failure, target=target, measured=measured, finding=finding)


def _failed_here(error: Exception) -> str:
    """Log a problem of this rank, for which the others wait: it is reported when digests are compared."""
    logger.warning("the decision failed on this rank", exc_info=error)
    return f"{type(error).__name__}: {error}"


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


def _read(message: bytearray, current: Placement) -> Decision:
    """Return the decision that rank 0 has sent."""
    fields = json.loads(message)
    if failure := fields.get("failure", ""):
        return Decision(failure)
    planned = RebalancePlanned(0, **fields["planned"])
    if planned.by_layer is not None:
        planned = replace(planned, by_layer=np.array(planned.by_layer, dtype=np.float64))
    target = None if fields["placement"] is None else Placement.from_json(fields["placement"])
    if target is not None:
        target.require_model(current.num_layers, current.num_experts, current.num_ranks, current.replica_slots)
    return Decision("", planned, target)


def _as_message(made: Plan, current: Placement, judged: Mapping[str, Any]) -> bytes:
    """Return the plan as bytes, with what became of earlier ones."""
    target, before = made.placement.with_epoch(current.epoch + 1), made.imbalance_before
    planned = {
        "epoch": target.epoch,
        "moves": made.moved_slots,
        "decision": made.decision,
        "reason": made.reason,
        "code": made.code,
        "imbalance_before": 0.0 if before is None else float(before.mean()),
        "imbalance_after": float(made.imbalance_after.mean()),
        "imbalance_bound": float(made.lower_bound.mean()),
        "seconds_saved": None if np.isnan(made.seconds_saved) else made.seconds_saved,
        "seconds_spent": None if np.isnan(made.seconds_spent) else made.seconds_spent,
        "by_layer": None if before is None else np.stack([before, made.imbalance_after, made.lower_bound]).tolist(),
        "plan_seconds": made.plan_seconds,
        **judged,
    }
    placement = target.to_json() if made.decision == "rebalance" else None
    return json.dumps({"planned": planned, "placement": placement}).encode()
