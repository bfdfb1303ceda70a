"""Takes one job from a measured load to a new placement: a worker decides, and all ranks migrate at a step's boundary.

One decision at a time: at step ``n * interval`` the measured load goes to a worker thread (`decision.py`), and ``lag``
steps later every rank acts on the decision. Without an interval that happens in `Rebalancer.rebalance_now` alone, on a
decision that `Rebalancer.plan_ahead` may have begun. A failure drops the rebalance, with an event and a warning, and
training goes on with the old placement.
"""

import logging
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..distributed.consensus import Phase, Verdict
from ..distributed.control_channel import A_LITTLE_SECONDS, ConnectionLost, ControlChannel, Work
from ..distributed.transports import TRANSPORTS
from ..distributed.transports.base import Transport
from ..events import BalancingEnded, BalancingPaused, BalancingResumed, EventLog, RebalanceAborted
from ..load.clock import REST_STEPS, SAMPLED_STEPS, StepClock
from ..load.counter import HostCopy
from ..migration.engine import MigrationBroken, MigrationEngine, MigrationProgress
from ..migration.overlapped import Overlapped
from ..moe.experts.optimizer_state import OptimizerStateError
from ..placement import Placement
from ..utils.spans import phase
from ..utils.text import one_line
from .decision import Decision, Measurement, PlanMaker, decide
from .guard import Guard
from .loop_state import LoopHooks, LoopState
from .planner_process import compile_split
from .runtime import Runtime

T = TypeVar("T")

logger = logging.getLogger("eplb_runtime")

Layers = tuple[int, ...]
AHEAD = sys.maxsize
"""Step of a decision that was begun ahead: no boundary acts on it, `Rebalancer.rebalance_now` alone."""


@dataclass(frozen=True)
class _Pending:
    """A decision in flight: the step at whose end ranks act on it, its record's key, what this rank declared for it."""

    due_step: int
    key: str
    decision: Future[Decision]
    declared: NDArray[np.float64] | None


class Rebalancer(LoopHooks):
    """The placement of one job, on one rank, and its changes; ``transport``, which is warmed up, moves experts.

    Attributes:
        guard: checks the runtime's assumptions, also with each decision.
        quiesced: nothing migrates while it is positive.
        declared: declared load for the next decision; None: it is forecast.
        clock: of training steps.
        control: the channel to the other ranks.
        decisions: what decisions are made from.
    """

    def __init__(self, runtime: Runtime, transport: Transport, events: EventLog, loop: LoopState) -> None:
        config, groups = runtime.config, runtime.groups
        self._runtime, self._config, self._groups = runtime, config, groups
        self._loop, self._events = loop, events
        self.guard = Guard(runtime, loop, events, self.run)
        self._counter, self._expert_clock = runtime.counter, runtime.expert_clock
        self._registry, self._maps = runtime.registry, runtime.maps
        self._placement = self._target = self._initial = runtime.placement
        self._moved_L = np.zeros(runtime.placement.num_layers, dtype=bool)
        self.quiesced = 0
        self.declared: NDArray[np.float64] | None = None
        self._attempts = self._boundaries = self._next_sampled = self._known_home_bytes = 0
        self._pending: _Pending | None = None
        self._committed_layers: set[int] = set()
        self._pause_seconds, self._last_cause = 0.0, ""
        self._reported = self._placement
        self._earlier: list[tuple[int, Placement]] = []
        self.control = ControlChannel(groups, self._make_transport, partial(use_device, runtime.device), self._at_point)
        job, staging = groups.job, config.migration.staging_bytes
        self._engine = MigrationEngine(
            runtime.registry,
            transport,
            self.control.agreement,
            runtime.placement.home_rows(job.dp_shard_degree, job.state_holders),
            job.migration_rank,
            staging,
            config.timeout_seconds,
        )
        self._engine.bytes_per_step = min(config.migration.bytes_per_step or staging, staging)
        self.clock = StepClock(self._engine.rehearse(runtime.placement))
        if config.replica_slots:
            compile_split()
        self.decisions = PlanMaker(runtime)
        self.overlapped = Overlapped(self._engine, self.control, runtime.registry, runtime.maps, config)
        self._overlaps = config.overlap

    def placement(self) -> Placement:
        """Return the current placement; its ``epoch`` counts commits. While a migration is in flight this waits for the
        other ranks' commits of the running step: call it on every rank at the same place."""
        return self.overlapped.current_placement() if self.overlapped.in_flight else self._placement

    @property
    def epoch_on_this_rank(self) -> int:
        """Epoch of the placement, without asking other ranks; -1: a migration is in flight, which may change it."""
        return -1 if self.overlapped.in_flight else self._placement.epoch

    def has_moved(self, layer: int) -> bool:
        """Return whether homes of a layer have changed slots since attach, or have been away. Waits as `placement`."""
        is_initial = np.array_equal(self.placement().homes_LRH[layer], self._initial.homes_LRH[layer])
        return bool(self._moved_L[layer]) or not is_initial

    @property
    def step(self) -> int:
        """Optimizer steps since attach, or as restored."""
        return self._loop.step

    def on_forward_begin(self, trains: bool) -> None:
        """Raise if this rank is broken, and let ranks vote on experts in flight. With ``interval=None`` the first
        forward in training also begins the step's clock, so that rollouts between steps are no part of it."""
        self.refuse_if_broken()
        self.overlapped.forward_begins()
        if trains and self._config.interval is None and self.clock.begin() and self._expert_clock.on:
            self._expert_clock.begin_step()

    def on_forward_end(self, layers: Collection[int]) -> None:
        self.overlapped.forward_ends(layers)

    def before_reduce(self) -> None:
        """Commit nothing more of an overlapped migration in this step: the optimizer is about to write experts."""
        self.overlapped.settle()

    def on_step_end(self) -> None:
        """Count a step, begin or carry out a decision or migration that is due, and refresh replicas. Collective."""
        with phase("step boundary", epoch=self._placement.epoch):
            moved = self._at_boundary()
        if moved:
            self._after_move()
        elif self._loop.has_optimizer:
            self.refresh_replicas()

    def on_moved(self) -> None:
        self._loop.tensors.mark(self.placement)

    def _after_move(self) -> None:
        self._loop.on_moved()
        self.refresh_replicas()

    def refresh_replicas(self) -> None:
        """Begin to copy the weights of homes to their replicas; without replica slots nothing happens. Collective."""
        if self._maps.replicas is not None:
            self._maps.replicas.refresh()

    def _at_boundary(self) -> bool:
        """Close a training step, on every rank. Returns whether experts moved."""
        self._expert_clock.end_step()
        before, interval = self._placement, self._config.interval
        self._loop.step += 1
        self._attempts = 0
        self._at_point(Phase.STEPPED, self.step)
        self.clock.tick()
        self._counter.advance()
        self._boundaries += 1
        decides = interval is not None and self.step % interval == 0
        self._registry.note_state(self._boundaries)
        if self.overlapped.in_flight:
            self._advance()
        if self.control.reconnecting:
            self._rejoin()
        if self.control.reconnecting or self.overlapped.in_flight:
            if decides:  # on the load from here on
                self._counter.take()
                self._expert_clock.take()
                self._earlier.clear()
        else:
            if self._pending is None and decides:
                self._pending = self._decide(self._config.migration.lag)
            if self._pending is not None and self.step >= self._pending.due_step and not self.quiesced:
                self._carry_out(self._pending, self._overlaps)
        if self._is_sampled(self.step):
            self._expert_clock.begin_step()
        return self._placement is not before

    def _is_sampled(self, step: int) -> bool:
        """Return whether expert work is measured in a step, the first of which is 0: in three shortly before a
        decision, every thirty steps at most; without an interval, in three after one."""
        interval, not_taken = self._config.interval, len(self._expert_clock.steps)  # many while quiesced
        to_decision = 0 if interval is None else interval - step % interval
        if self._config.migration.moe_share is not None or not_taken >= max(SAMPLED_STEPS, interval or 0):
            return False
        is_near = interval is None or interval <= SAMPLED_STEPS + 1 or 1 < to_decision <= SAMPLED_STEPS + 1
        return is_near and step + to_decision >= self._next_sampled

    def refuse_if_broken(self) -> None:
        self._engine.refuse_if_broken()

    def rebalance_now(self) -> bool:
        """Decide on the load measured so far, or take a decision in flight, and act on it at once. Returns whether the
        placement has changed. An overlapped migration in flight is ended first, and replicas are refreshed after a
        change. RuntimeError: ``quiesce`` holds migrations back, or the ranks have lost each other."""
        if self.quiesced:
            raise RuntimeError("rebalance() cannot work inside quiesce()")
        self.control.require("rebalance()")
        before = self._placement
        self.drain()
        if self._pending is None:
            self._pending = self._decide(0)
        self._carry_out(self._pending)
        if moved := self._placement is not before:
            self._after_move()
        return moved

    def plan_ahead(self) -> None:
        """Begin the decision that `rebalance_now` acts on, and do not wait for it. Collective, between steps."""
        self.control.require("plan_ahead()")
        self._pending = replace(self._decide(0), due_step=AHEAD)

    @property
    def has_planned_ahead(self) -> bool:
        """Return whether a decision was begun that `rebalance_now` has not acted on yet."""
        return self._pending is not None and self._pending.due_step == AHEAD

    @property
    def staging(self) -> list[Tensor]:
        """Memory in which received experts are staged."""
        return self._engine.executor.memory

    def free_memory(self) -> int:
        """Free the memory in which received experts are staged, and return its bytes; the next migration takes it
        again. None may be in flight. Waits for a decision in flight."""
        self.wait_for_decision()
        self._known_home_bytes = max(self._known_home_bytes, self._home_bytes())
        return self._engine.executor.free_memory()

    def wait_for_decision(self) -> None:
        """Wait until the decision in flight is made, for little more than the timeout at most. It is not acted on."""
        if self._pending is not None:
            wait([self._pending.decision], self._config.timeout_seconds + A_LITTLE_SECONDS)

    def compare(self, digest: bytes, what: str, subject: str) -> Verdict:
        """Return the verdict on whether all ranks were given the same 16 bytes (zeros: none), of the call ``what``.
        Drops the decision and the migration in flight first. If a rank is lost, which the verdict says, deciding stops
        until ranks connect again. Collective, between steps. ConnectionLost: they are connecting again."""
        self.control.require(what)
        self.cancel_pending()
        try:
            agreed = self.run(lambda _, agreement: agreement.check_equal(digest, subject))
        except ConnectionLost as lost:
            return Verdict(False, str(lost), True)
        if agreed.connections_broken:
            self._pause(agreed.cause)
        return agreed

    def run(self, work: Work[T], seconds: float | None = None) -> T:
        """Run work on the thread of the control channel, and return its result. An overlapped migration commits nothing
        more in this step. ConnectionLost: the work failed, or took longer than ``seconds`` (None: the config's
        timeout); deciding stops until the ranks connect again."""
        self.overlapped.settle()  # the thread may wait for training, and training is here
        try:
            return self.control.run(work, seconds)
        except ConnectionLost as lost:
            self._pause(one_line(lost))
            raise

    def migrate_to(self, target: Placement, step: int | None = None) -> MigrationProgress:
        """Migrate to a placement while training waits; return how far it came, with a failure in ``failed_phase``.
        Drops a migration in flight; a decision in flight stays for later. ``step``: go on from this number of steps.
        Events are emitted, replicas refreshed. Collective, between steps. ConnectionLost: the ranks connect again."""
        self.control.require("a migration")
        self.drain()
        if step is not None:
            self._loop.step, self._next_sampled = step, 0
        progress = self._migrate(target)
        if step is not None:
            self._earlier.clear()  # buckets counted so far are of another job
        self._after_move()
        return progress

    def place(self, target: Placement) -> None:
        """Migrate to a placement as after a decision: at once, or with ``overlap`` during the next steps. While a
        migration is in flight none is begun. Replicas are refreshed. Collective, between steps."""
        if not self.overlapped.in_flight:
            self.control.require("a migration")
            self._migrate(target, self._overlaps)
        self._after_move()

    def cancel_pending(self) -> None:
        """Drop the decision and the migration in flight; committed layers stay so. The worker has left the control
        group when this returns, or never will. What was declared for a decision begun ahead is for the next one."""
        self.drain()
        self.wait_for_decision()
        if self._pending is not None and self.has_planned_ahead:
            self.declared = self._pending.declared
        self._pending = None

    def close(self) -> None:
        """Drop what is in flight, end worker and planner, and use no replicas. `BalancingEnded` is the last event."""
        with ExitStack() as parts:  # each ends even if one raises; the last one named first
            parts.callback(self._events.emit, BalancingEnded(self.step, "closed"))
            parts.callback(self._use_no_replicas)
            parts.callback(self._expert_clock.end_step)
            parts.callback(self.control.agreement.close)
            parts.callback(self._engine.executor.close)
            parts.callback(self.control.worker.close, A_LITTLE_SECONDS)
            parts.callback(self.cancel_pending)
            parts.callback(self.decisions.close)

    def _use_no_replicas(self) -> None:
        if self._maps.replicas is not None:
            self._maps.replicas.wait_all()
            self._get_ready(self.placement().without_replicas(), range(self.placement().num_layers))()

    def abandon(self) -> None:
        """Close connections, and end threads and planner without telling the other ranks: the process ends."""
        self.overlapped.abandon()
        self._groups.close_connections()  # ends waits in collectives
        self.control.worker.close(A_LITTLE_SECONDS)
        self.decisions.close()

    def _at_point(self, phase: Phase, subject: Any) -> None:
        self._engine.probe(phase, subject)

    # -- deciding --------------------------------------------------------------------------------------------------

    def _decide(self, lag: int) -> _Pending:
        steps, suspended = self._counter.open_steps, self._loop.suspended  # weights may have no memory then
        self._known_home_bytes = self._known_home_bytes if suspended else self._home_bytes()
        measurement = Measurement(
            buckets=HostCopy(self._counter.take()),
            steps=steps,
            placement=self.placement(),
            earlier=tuple(self._earlier),
            step_seconds=self.clock.step_seconds,
            stall_seconds=self.clock.stall_seconds,
            home_bytes=self._known_home_bytes,
            token_bytes=self._counter.token_bytes,
            sampled_steps=self._expert_clock.take(),
            sample=None if suspended else self.guard.sample(),
            declared=self.declared,
        )
        if measurement.sampled_steps:
            self._next_sampled = self.step + REST_STEPS
        self._earlier.clear()
        declared, self.declared = self.declared, None
        key = self._new_key("decision")
        work = partial(decide, measurement, self.decisions, self.guard, key, self._at_point)
        return _Pending(self.step + lag, key, self.control.submit(work), declared)

    def _home_bytes(self) -> int:
        """Bytes of the largest home expert; 0 where an optimizer has state that cannot move: a migration says so."""
        try:
            return self._registry.largest_home_bytes()
        except OptimizerStateError:
            return 0

    def _carry_out(self, pending: _Pending, overlaps: bool = False) -> None:
        """Act on a decision as all ranks do, and report it."""
        try:
            decision = self.control.result(pending.decision, pending.key)
        except ConnectionLost as lost:
            self._pending = None
            return self._drop("planned", str(lost), True)
        self._pending = None
        self._groups.store.forget()  # all ranks were in this decision: none is in an earlier one, or its migration
        self.guard.report(decision.finding)
        if decision.measured is not None:
            self._events.emit(replace(decision.measured, step=self.step))
        if decision.failure or decision.planned is None:
            return self._drop("planned", decision.failure, False)
        self._events.emit(replace(decision.planned, step=self.step))
        if decision.target is not None and not self._loop.closed:  # a signal's handler may have closed it meanwhile
            self._migrate(decision.target, overlaps)

    # -- migrating -------------------------------------------------------------------------------------------------

    def _migrate(self, target: Placement, overlaps: bool = False) -> MigrationProgress:
        """Begin a migration that overlaps with the next steps, or carry it out while training waits."""
        self._target, self._committed_layers, self._pause_seconds = target, set(), 0.0
        key = self._new_key("migration")
        try:
            if overlaps:
                self.overlapped.begin(self._placement, target, key)
                progress = MigrationProgress(self._placement)
            else:
                self.control.run(lambda *_: None)  # a decision, or a notice, may be on the control group still
                if self._maps.replicas is not None:  # they are read from homes that are about to be written
                    self._maps.replicas.wait_all()
                progress = self._engine.migrate(self._placement, target, key, self._get_ready)
        except ConnectionLost as lost:
            progress = MigrationProgress(self._placement, Verdict(False, str(lost), True), Phase.PREPARED)
        except MigrationBroken as error:
            self._events.emit(BalancingEnded(self.step, str(error)))
            raise
        self._handle_progress(progress)
        return progress

    def _advance(self) -> None:
        """Advance the migration in flight. If it cannot overlap with steps, its rest is migrated while training waits,
        or dropped where nothing may move."""
        hold_back = bool(self.quiesced) or self.control.reconnecting
        progress = self.overlapped.advance(hold_back=hold_back)
        progress = replace(progress, only_between_steps=progress.only_between_steps and not hold_back)
        self._handle_progress(progress)
        if progress.only_between_steps:
            self._overlaps = False
            what = "from now on experts migrate between steps, as with overlap=False"
            logger.warning("step %d: %s; %s", self.step, progress.cause, what)
            self._migrate(self._target)

    def _handle_progress(self, progress: MigrationProgress) -> None:
        """Adopt the placement of what a migration has committed, and report what became of the rest."""
        self.clock.exclude(progress.pause_seconds)
        self._pause_seconds += progress.pause_seconds
        if progress.stall_seconds is not None:
            self.clock.stalled(progress.stall_seconds)
        self._adopt(progress.placement)
        if progress.committed_layers:
            before, self._reported = self._reported, self._placement
            self._committed_layers.update(progress.committed_layers)
            pause, self._pause_seconds = self._pause_seconds, 0.0
            self._events.emit(progress.committed(self.step, pause, before))
        if progress.failed_phase is not None and not progress.only_between_steps:
            committed, left = tuple(sorted(self._committed_layers)), progress.left_layers
            self._drop(
                progress.failed_phase.value, progress.cause, progress.verdict.connections_broken, committed, left
            )
        elif progress.verdict.connections_broken:
            self._pause(progress.cause)

    def _new_key(self, what: str) -> str:
        """Return a key that names one decision's records: a step may see several migrations."""
        self._attempts += 1
        return f"{what}/{self._boundaries}/{self._attempts}"

    def _get_ready(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Prepare what follows a placement, before a vote; return what takes it over, before tokens are routed."""
        take_maps_over = self._maps.prepare(placement, layers)

        def take_over() -> None:
            self._adopt(placement)
            take_maps_over()

        return take_over

    def _adopt(self, placement: Placement) -> None:
        if placement is self._placement:
            return
        self._earlier.append((self._counter.buckets, self._placement))
        self._placement = placement
        self._moved_L |= (placement.homes_LRH != self._initial.homes_LRH).any(axis=(1, 2))

    def drain(self) -> bool:
        """Drop the rest of a migration in flight: layers without a commit stay where they are. On every rank. Returns
        whether the placement has changed since the last boundary."""
        before = self._placement
        if self.overlapped.in_flight:
            self._handle_progress(self.overlapped.drain())
        return self._placement is not before

    def commit_in_flight(self) -> bool:
        """Complete the migration in flight while training waits; the rest is dropped while nothing may move
        (`quiesced`, reconnecting). On every rank. Returns whether the placement has changed since the last boundary."""
        before, goes_on = self._placement, self.overlapped.in_flight and not self.quiesced
        self.drain()
        goes_on = goes_on and not self.control.reconnecting
        if goes_on and not np.array_equal(self._placement.physical_to_logical, self._target.physical_to_logical):
            self._migrate(self._target)
        return self._placement is not before

    def _drop(self, phase: str, cause: str, is_lost: bool, committed: Layers = (), left: Layers = ()) -> None:
        """Report what came of a rebalance, each cause as one warning. ``is_lost``: this rank may have lost others."""
        say, self._last_cause = logger.info if cause == self._last_cause else logger.warning, cause
        say(
            "step %d: rebalance %s (%s): %s; training goes on with placement epoch %d",
            self.step,
            f"partly committed, in layers {list(committed)} but not all of {list(left)}" if committed else "dropped",
            phase,
            cause,
            self.placement().epoch,
        )
        self._events.emit(RebalanceAborted(self.step, self.placement().epoch, phase, cause, committed, left))
        if is_lost:
            self._pause(cause)

    # -- finding together ------------------------------------------------------------------------------------------

    def _pause(self, cause: str) -> None:
        """Stop deciding, since this rank may have lost the others, until all ranks have new connections."""
        if self.control.reconnecting or self._loop.closed:
            return
        self._pending = None
        self.drain()  # it would go on with staging memory of the old connections
        logger.warning("step %d: balancing pauses until all ranks reconnect, training goes on: %s", self.step, cause)
        self._events.emit(BalancingPaused(self.step, cause))
        self.control.begin_reconnecting()

    def _rejoin(self) -> None:
        """Use new connections where all ranks meet at the end of this step."""
        if (transport := self.control.reconnect(self._boundaries)) is None:
            return
        self._engine.reconnect(transport, self.control.agreement)
        self._groups.release_unused()
        tries = self.control.tries
        if self._groups.job.is_planner:
            logger.info("step %d: the ranks are connected again, after %d tries", self.step, tries)
        self._events.emit(BalancingResumed(self.step, tries))
        same = self.compare(bytes.fromhex(self.placement().digest()), "reconnecting", "placement")
        if not same.commit and not same.connections_broken:
            self._engine.broken = f"{same.cause}: only some ranks committed a migration; load a checkpoint"
            self._events.emit(BalancingEnded(self.step, self._engine.broken))
            self.refuse_if_broken()

    def _make_transport(self, migration: dist.ProcessGroup, seconds: float) -> Transport:
        """Make a transport of experts on a new migration group, within so many seconds."""
        make = TRANSPORTS[self._config.migration.transport]
        transport = make(migration, self._groups.backend, self._runtime.device, seconds)
        try:
            transport.warm_up(time.monotonic() + seconds)
        except BaseException:
            transport.close()
            raise
        transport.wait_at_most(self._config.timeout_seconds)
        return transport


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread, as a new thread would use GPU 0; on a CPU nothing happens."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
