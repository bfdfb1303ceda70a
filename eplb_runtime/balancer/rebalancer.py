"""From a measured load to a placement that all ranks stand on: decided in the background, migrated between steps.

One decision at a time: at step ``n * interval`` the measured load goes to a worker thread (`decision.py`), ``lag``
steps later every rank acts on it. What can fail is dropped, reported as an event and a warning, and training goes on
with the old placement.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..config import BalancerConfig
from ..distributed.agreement import Agreement
from ..distributed.ballot import Verdict
from ..distributed.points import Phase
from ..distributed.process_groups import Connections, host_timeout
from ..distributed.reconnect import Reconnection, Standing
from ..distributed.transports import TRANSPORTS
from ..distributed.transports.base import Transport
from ..events import (
    BalancingEnded,
    BalancingPaused,
    BalancingResumed,
    EventLog,
    RebalanceAborted,
)
from ..load.aggregate import HostCopy
from ..load.clock import Progress, StepClock
from ..migration.between_steps import BetweenSteps
from ..migration.driver import Migration, MigrationProgress
from ..migration.engine import MigrationBroken, MigrationEngine
from ..migration.overlapped import HELD, Overlapped
from ..moe.experts.optimizer_state import OptimizerStateError
from ..moe.experts.outside import AGAIN, BESIDE
from ..placement import Placement, PlacementError
from ..utils.errors import one_line
from ..utils.worker import Worker
from .decision import Decision, DecisionMaker, Measurement, staying
from .guard import Guard
from .runtime import Runtime

T = TypeVar("T")

logger = logging.getLogger("eplb_runtime")

COMPILED_SOON_SECONDS = 2.0
"""Attach waits so long for compiled code: it is read from the disk in less, and compiled in a minute."""
A_LITTLE_SECONDS = 1.0
""""A timeout plus a little": what is waited for after the timeout, because it may be almost done."""


@dataclass(frozen=True)
class _Pending:
    """A decision on its way, and the step at whose end every rank acts on it; ``key`` names its record."""

    due_step: int
    key: str
    decision: Future[Decision]


class Rebalancer:
    """The placement of one job, on one rank, and how it changes.

    Args:
        transport: carries experts, warmed up.
        guard: looks, with each decision, at what the runtime assumes.
        held_outside: says who holds rows of experts that do not move along, with two flags: that it may be asked again,
            and that only copies are asked for. None: nobody is asked.

    Attributes:
        step: optimizer steps since attach (or as restored).
        quiesced: while positive, nothing migrates.
        declared: the load to come, for the next decision; None: it is foretold.
        decisions: the background half.
        held_outside: as given.
    """

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        guard: Guard,
        events: EventLog,
        held_outside: Callable[[bool, bool], str] | None,
    ) -> None:
        config, groups = runtime.config, runtime.groups
        self._runtime = runtime
        self._placement = self._target = self._initial = runtime.placement
        self._moved_L = np.zeros(runtime.placement.num_layers, dtype=bool)
        self.step = 0
        self.quiesced = 0
        self.declared: NDArray[np.float64] | None = None
        self.held_outside = held_outside
        self._events = events
        self._config = config
        self._groups = groups
        self._counter = runtime.counter
        self._guard = guard
        self._registry = runtime.registry
        self._maps = runtime.maps
        self._asks_again = False
        self._restores = 0
        self._attempts = 0
        self._rank_state = Standing()
        self._pending: _Pending | None = None
        self._committed_layers: set[int] = set()
        self._pause_seconds = 0.0
        self._earlier: list[tuple[int, Placement]] = []
        self._agreement = self._new_agreement()
        self._engine = self._new_engine(transport)
        self._clock = StepClock(self._engine.rehearse(runtime.placement))
        self.decisions = DecisionMaker(runtime, guard, self._at_point)
        use_my_device = partial(use_device, runtime.device)
        self._worker = Worker("eplb_runtime", use_my_device)
        self._between_steps = BetweenSteps(self._engine, self._get_ready, self._wait_for_replicas)
        self.overlapped = self._new_overlapped()
        self._migration: Migration = self.overlapped if config.overlap else self._between_steps
        self._reconnection = Reconnection(groups, self._rank_state, self._carrier, use_my_device, self._at_point)
        self._compiler = Worker("eplb_runtime compile")
        self._compiled = self._begin_compiling()

    def _new_engine(self, transport: Transport) -> MigrationEngine:
        job = self._groups.job
        engine = MigrationEngine(
            self._registry,
            transport,
            self._agreement,
            self._placement.home_rows(job.row_parts),
            job.row_rank,
            self._config.migration.staging_bytes,
            self._config.timeout_seconds,
            self._runtime.kernels.hash_blocks,
        )
        staging = self._config.migration.staging_bytes
        engine.bytes_per_step = min(self._config.migration.bytes_per_step or staging, staging)
        return engine

    def _new_agreement(self) -> Agreement:
        groups = self._groups
        return Agreement(groups.control, groups.store, self._at_point, host_timeout(groups.backend).total_seconds())

    def _new_overlapped(self) -> Overlapped:
        return Overlapped(
            self._engine,
            self._agreement,
            self._worker,
            registry=self._registry,
            maps=self._maps,
            is_planner=self._groups.job.is_planner,
            timeout_seconds=self._config.timeout_seconds,
            link_seconds_per_byte=1.0 / max(self._runtime.topology.slowest_bandwidth, 1.0),
            max_pause_seconds=self._config.migration.max_pause_seconds,
            waiting=self._runtime.watch.waiting,
            held_outside=self._copies_outside,
        )

    def _begin_compiling(self) -> Future[None]:
        if self._maps.splitter is not None:
            self._compiler.submit(self._maps.splitter.warm_up)
        compiled = self._compiler.submit(self.decisions.compile)
        if not wait([compiled], COMPILED_SOON_SECONDS).done:
            logger.info("compiling the planner in the background; the first rebalance waits for it, training does not")
        return compiled

    def placement(self) -> Placement:
        """The current one; its ``epoch`` counts commits. While a migration is in flight it waits for the other ranks'
        commits in the running step: ask on every rank at the same place."""
        return self._migration.current_placement() if self._migration.in_flight else self._placement

    @property
    def epoch_on_this_rank(self) -> int:
        """Of the placement, without asking other ranks; -1: it may change at any time."""
        return -1 if self._migration.in_flight else self._placement.epoch

    def has_moved(self, layer: int) -> bool:
        """Whether homes of a layer stand elsewhere than at attach, or have since."""
        is_initial = np.array_equal(self.placement().homes_LRH[layer], self._initial.homes_LRH[layer])
        return bool(self._moved_L[layer]) or not is_initial

    def wait_until_compiled(self, seconds: float) -> bool:
        """For runs that cannot begin without: whether this rank is ready to plan and migrate, now or soon."""
        return bool(wait([self._compiled], seconds).done)

    def at_boundary(self) -> bool:
        """A training step is over, on every rank: decide or migrate if it is time. Returns whether experts moved.

        Raises:
            MigrationBroken: now or earlier, this rank failed after all had agreed to commit.
        """
        self.refuse_if_broken()
        before = self._placement
        is_due = self._count_step()
        if self._migration.in_flight:
            self._advance()
        if self._reconnection.under_way:
            self._rejoin()
        if self._reconnection.under_way or self._migration.in_flight:
            if is_due:
                self._discard_load()
        else:
            if self._pending is None and is_due:
                self._pending = self._decide(self._config.migration.lag)
            if self._pending is not None and self.step >= self._pending.due_step and not self.quiesced:
                target = self._agree_on_target(self._pending)
                if target is not None:
                    self._migrate(target, self._migration)
        self.overlapped.step_begins()
        return self._placement is not before

    def _count_step(self) -> bool:
        """A step is over. Returns whether a decision is due."""
        self.step += 1
        self._attempts = 0
        self._at_point(Phase.STEPPED, self.step)
        self._clock.tick()
        self._counter.advance()
        self._rank_state.step_seconds = self._clock.step_seconds
        self._rank_state.steps += 1
        return self.step % self._config.interval == 0

    def _discard_load(self) -> None:
        """No decision will see it."""
        self._counter.take()
        self._earlier.clear()

    @property
    def ends_in_decision(self) -> bool:
        """Whether a decision begins at the end of the running step, as far as is known now."""
        return (self.step + 1) % self._config.interval == 0

    @property
    def progress(self) -> Progress:
        """How far training is; on any thread."""
        return self._clock.progress(self.step)

    def refuse_if_broken(self) -> None:
        """Raises `MigrationBroken` once this rank has failed after an agreement: nobody knows what its experts are."""
        self._engine.refuse_if_broken()

    def now(self) -> bool:
        """Decide on what was measured so far and act on it at once; a decision under way is carried out instead.

        Returns:
            Whether experts moved.

        Raises:
            RuntimeError: migrations are held back by ``quiesce``, or the ranks have lost each other.
            MigrationBroken: as `at_boundary`.
        """
        self.refuse_if_broken()
        if self.quiesced:
            raise RuntimeError("rebalance() cannot work inside quiesce()")
        self._refuse_alone("rebalance()")
        self.drain()
        before = self._placement
        if self._pending is None:
            self._pending = self._decide(0)
        target = self._agree_on_target(self._pending, patient=False)
        if target is not None:
            self._migrate(target)
        return self._placement is not before

    def wait_for_decision(self) -> None:
        """One that is on its way is made, or will never be."""
        if self._pending is not None:
            wait([self._pending.decision], self._config.timeout_seconds)

    def load_begins_here(self) -> None:
        """What was counted before is not this job's, or stood under other placements than those known here."""
        self._earlier.clear()

    def compare(self, digest: bytes, what: str, subject: str) -> Verdict:
        """Whether all ranks were given the same; what is under way is over then. Collective, between steps.

        Args:
            digest: 16 bytes; zeros: this rank has none.
            what: the call that needs it; refused while the ranks connect anew.
            said: what is compared, in words.
        """
        self._refuse_alone(what)
        self.forget_pending()
        agreed = self._agreement.same_on_all(digest, subject)
        if agreed.connections_broken:
            self._pause(agreed.cause)
        return agreed

    def go_to(self, step: int, target: Placement | Callable[[], Placement]) -> MigrationProgress:
        """Stand at another step, and migrate to a placement or to one that is made then. Collective, between steps."""
        self.step = step
        self._restores += 1
        self._attempts = 0
        return self._migrate(target if isinstance(target, Placement) else target())

    def placed_anew(self, load: NDArray[np.int64]) -> tuple[Placement, Mapping[str, Any]]:
        """A placement of these sizes for a load as if nothing stood, and what rank 0 says of it. Collective.

        Raises:
            PlacementError: rank 0 could not plan.
            RuntimeError: the ranks have lost each other.
        """
        control, agreement, here = self._groups.control, self._agreement, self.placement()
        decision = self.run(lambda: self.decisions.place_anew(load, here, control, agreement))
        if decision.connections_broken:
            self._pause(decision.failure)
        if decision.target is None:
            raise PlacementError(f"no placement could be made for the saved load: {decision.failure}")
        return decision.target, decision.summary or {}

    def run(self, work: Callable[[], T]) -> T:
        """Do something on the control group, when the decision under way has left it, and wait for it.

        Raises:
            RuntimeError: it failed, was not done in time, or the ranks are connecting anew.
        """
        self._refuse_alone("a comparison of ranks")
        self.overlapped.withdraw()  # the thread may wait for training, and training is here
        try:
            return self._worker.do(work, self._config.timeout_seconds + A_LITTLE_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            self._pause(one_line(error))
            raise RuntimeError(str(error)) from error

    def forget_pending(self) -> None:
        """A decision on its way is not acted on, a migration beside training goes no further; the worker is done with
        the control group when this returns, or will never be."""
        self.drain()
        if self._pending is not None:
            wait([self._pending.decision], self._config.timeout_seconds + A_LITTLE_SECONDS)
            self._pending = None

    def close(self) -> None:
        """End it; copies are not used any more, since nobody refreshes them."""
        self.forget_pending()
        self._reconnection.close(A_LITTLE_SECONDS)
        self._worker.close(A_LITTLE_SECONDS)
        self._compiler.close(0.0)
        self.decisions.close()
        self._engine.close()
        self._agreement.close()
        if self._maps.replicas is not None:
            self._wait_for_replicas()
            self._get_ready(self.placement().without_replicas(), range(self.placement().num_layers))()
        self._events.emit(BalancingEnded(self.step, "closed"))

    def leave(self) -> None:
        """End the threads, without a word to the others: this process ends."""
        self.overlapped.leave()
        self._groups.hang_up(self._groups.standing)  # who waits in a collective comes back
        self._reconnection.close(A_LITTLE_SECONDS)
        self._worker.close(A_LITTLE_SECONDS)
        self._compiler.close(0.0)
        self.decisions.close()

    def _at_point(self, phase: Phase, subject: Any) -> None:
        """The engine's probe hears of points outside of it, too."""
        self._engine.probe(phase, subject)

    # -- deciding --------------------------------------------------------------------------------------------------

    def _decide(self, lag: int) -> _Pending:
        measurement = Measurement(
            buckets=HostCopy(self._counter.take()),
            placement=self.placement(),
            earlier=tuple(self._earlier),
            step_seconds=self._clock.step_seconds,
            stall_seconds=self._clock.stall_seconds,
            home_bytes=self._home_bytes(),
            token_bytes=self._counter.token_bytes,
            sample=self._guard.sample(),
            computed=self._guard.computed(),
            declared=self.declared,
            keys_of_earlier=self._groups.store.passing,
        )
        self._earlier.clear()
        self.declared = None
        key = self._new_key("decision")
        decide = partial(self.decisions.decide, measurement, key, self._groups.control, self._agreement)
        return _Pending(self.step + lag, key, self._worker.submit(decide))

    def _home_bytes(self) -> int:
        """0: an optimizer keeps what cannot move, and experts stay where they are."""
        try:
            return self._registry.largest_home_bytes()
        except OptimizerStateError as error:
            logger.debug("experts cannot move: %s", error)
            return 0

    def _agree_on_target(self, pending: _Pending, *, patient: bool = True) -> Placement | None:
        """The placement that all ranks have decided to go to; None: experts stay where they are."""
        decision, self._pending = self._outcome_of(pending), None
        self._guard.report(decision.finding, decision.stays)
        if (measured := decision.measured(self.step, self._counter.steps_per_bucket)) is not None:
            self._events.emit(measured)
        if decision.failure:
            self._drop("planned", decision.failure, decision.connections_broken)
            return None
        stays = self._why_homes_stay(decision.target, patient and not self._asks_again)
        self._asks_again = False
        if stays.connections_broken:
            self._drop("planned", stays.cause, True)
            return None
        if not stays.commit and stays.cause.endswith(AGAIN):
            self._asks_again = True
            decision = replace(decision, target=None, summary=staying(self.placement(), AGAIN))
        elif not stays.commit:
            why = _held(stays.cause)
            self._guard.report("", why)
            decision = replace(decision, target=None, summary=staying(self.placement(), why))
        self._events.emit(decision.planned(self.step))
        return decision.target

    def _why_homes_stay(self, target: Placement | None, patient: bool) -> Verdict:
        """No commit if what a rank knows of its user's tensors keeps homes where they are. Collective if there is a
        target with other homes."""
        if target is None or self.held_outside is None or np.array_equal(target.homes_LRH, self.placement().homes_LRH):
            return Verdict(True)
        return self._agreement.same_on_all(bytes([1]) * 16, "tensors of the user's", self.held_outside(patient, False))

    def _copies_outside(self) -> str:
        """Who holds copies of experts that do not move along, as far as this rank knows."""
        return f"rank {self._groups.job.rank}: {holder}" if (holder := self._held_by(False, True)) else ""

    def _held_by(self, patient: bool, copies_only: bool) -> str:
        return self.held_outside(patient, copies_only) if self.held_outside is not None else ""

    def _outcome_of(self, pending: _Pending) -> Decision:
        """What was decided, soon. A rank that has waited in vain records that, so that nobody acts on it any more; if
        the others have agreed by then, its own thread is almost there."""
        seconds = self._config.timeout_seconds
        if wait([pending.decision], seconds).done:
            return pending.decision.result()
        late = Verdict(False, f"rank {self._groups.job.rank} has waited {seconds:g} s for it", True)
        verdict = self._agreement.record(pending.key, late)
        if verdict.commit and wait([pending.decision], A_LITTLE_SECONDS).done:
            return pending.decision.result()
        return Decision(failure=verdict.cause or late.cause, connections_broken=True)

    # -- migrating -------------------------------------------------------------------------------------------------

    def _migrate(self, target: Placement, migration: Migration | None = None) -> MigrationProgress:
        """Begin a migration, and go as far with it as its driver goes at once.

        Args:
            migration: the driver; None: the one for which training waits.
        """
        migration = migration or self._between_steps
        self._target, self._committed_layers, self._pause_seconds = target, set(), 0.0
        migration.begin(self._placement, target, self._new_key("migration"))
        try:
            progress = migration.advance()
        except MigrationBroken as error:
            self._events.emit(BalancingEnded(self.step, str(error)))
            raise
        self._take_over(progress)
        return progress

    def _advance(self) -> None:
        """Go on with the migration in flight. Where no step can overlap with it, training waits for the rest."""
        hold_back = bool(self.quiesced) or self._reconnection.under_way
        progress = self._migration.advance(hold_back=hold_back)
        if progress.only_between_steps:
            stays = self._why_homes_stay(self._target, False)
            if not stays.commit:
                verdict = stays if stays.connections_broken else replace(stays, kind=HELD)
                progress = replace(progress, verdict=verdict, only_between_steps=False)
        if progress.verdict.kind == HELD:
            why = _held(progress.cause)
            self._guard.report("", why)
            progress = replace(progress, verdict=replace(progress.verdict, cause=why))
        self._take_over(progress)
        if progress.only_between_steps:
            self._migration = self._between_steps
            logger.warning(
                "step %d: %s; experts to which that happens migrate between steps, as without overlap",
                self.step,
                progress.cause,
            )
            self._migrate(self._target)

    def _take_over(self, progress: MigrationProgress) -> None:
        """Follow what a migration has committed, and say what became of the rest."""
        self._clock.exclude(progress.pause_seconds)
        self._pause_seconds += progress.pause_seconds
        if progress.stall_seconds is not None:
            self._clock.stalled(progress.stall_seconds)
        if progress.committed_layers:
            self._follow(progress.placement)
            self._committed_layers.update(progress.committed_layers)
            pause, self._pause_seconds = self._pause_seconds, 0.0
            self._events.emit(progress.committed(self.step, pause))
        if progress.failed_phase is not None and not progress.only_between_steps:
            committed, left = tuple(sorted(self._committed_layers)), progress.left_layers
            self._drop(progress.failed_phase.value, progress.cause, progress.connections_broken, committed, left)
        elif progress.connections_broken:
            self._pause(progress.cause)

    def _new_key(self, what: str) -> str:
        """Restoring may set the step back, and a step may see several migrations: without their numbers, an old record
        would be taken for the new one's. The last number starts anew with each step, so ranks cannot drift apart."""
        self._attempts += 1
        return f"{what}/restored/{self._restores}/step/{self.step}/{self._attempts}"

    def _get_ready(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Before a vote: make ready what follows a placement. What is returned takes it over, before anybody routes."""
        follow = self._maps.prepare(placement, layers)

        def take_over() -> None:
            self._follow(placement)
            follow()

        return take_over

    def _wait_for_replicas(self) -> None:
        """Copies are read from homes that are about to be written. On every rank, before anything can fail on one."""
        if self._maps.replicas is not None:
            self._maps.replicas.wait_all()

    def _follow(self, placement: Placement) -> None:
        """This is the current placement from here on."""
        if placement is self._placement:
            return
        self._earlier.append((self._counter.buckets, self._placement))
        self._placement = placement
        self._moved_L |= (placement.homes_LRH != self._initial.homes_LRH).any(axis=(1, 2))

    def drain(self) -> None:
        """End the migration in flight: layers that are not committed yet stay where they are. On every rank."""
        if self._migration.in_flight:
            self._follow(self._migration.drain())

    def _drop(
        self,
        phase: str,
        cause: str,
        connections_broken: bool,
        committed: tuple[int, ...] = (),
        left: tuple[int, ...] = (),
    ) -> None:
        logger.warning(
            "step %d: rebalance %s (%s): %s; training goes on with placement epoch %d",
            self.step,
            f"partly committed, in layers {list(committed)} but not all of {list(left)}" if committed else "dropped",
            phase,
            cause,
            self.placement().epoch,
        )
        self._events.emit(RebalanceAborted(self.step, self.placement().epoch, phase, cause, committed, left))
        if connections_broken:
            self._pause(cause)

    # -- finding together ------------------------------------------------------------------------------------------

    def _pause(self, cause: str) -> None:
        """This rank has lost the others, or may have: no decisions until all have found together."""
        if self._reconnection.under_way:
            return
        self._pending = None
        self.drain()  # it would go on with staging memory of the old connections
        logger.warning("step %d: the ranks connect anew; nothing is rebalanced until they have: %s", self.step, cause)
        self._events.emit(BalancingPaused(self.step, cause))
        self._rank_state.digest = bytes.fromhex(self.placement().digest())
        self._reconnection.begin()

    def _rejoin(self) -> None:
        """At the end of a step while the ranks connect anew: take over what holds from here on, if anything does."""
        if self._reconnection.differing:
            self._engine.broken = self._reconnection.differing
            self._events.emit(BalancingEnded(self.step, self._engine.broken))
            self.refuse_if_broken()
        link = self._reconnection.at_boundary()
        if link is None:
            return
        before = self._groups.take_over(link.connections)
        self._agreement = self.overlapped.agreement = self._new_agreement()
        self._engine.reconnect(link.transport, self._agreement)
        self._reconnection.dispose(before)
        logger.info("step %d: the ranks are connected again, after %d tries", self.step, self._reconnection.tries)
        self._events.emit(BalancingResumed(self.step, self._reconnection.tries))

    def _refuse_alone(self, what: str) -> None:
        if self._reconnection.under_way:
            raise RuntimeError(
                f"{what} cannot work while the ranks connect anew (see the log): try again some steps later"
            )

    def _carrier(self, connections: Connections, seconds: float) -> Transport:
        """Of experts, on new connections, made in so many seconds."""
        device, backend = self._runtime.device, self._groups.backend
        transport = new_transport(self._config, connections.migration, backend, device, seconds)
        try:
            transport.warm_up(time.monotonic() + seconds)
        except BaseException:
            transport.close()
            raise
        transport.wait_at_most(self._config.timeout_seconds)
        return transport


def _held(who: str) -> str:
    """Why experts stay where they are, in the words of a finding."""
    if BESIDE in who:
        return (
            f"{who}: where that goes row by row (a mean teacher), it would mix different experts once homes of one "
            "model have moved; experts stay where they are. Keep the average in tensors of your own "
            "(balancer.register_all(name, them)); if all writes go by logical_state_dict, say that the model does not "
            "go by row: balancer.register_all(name, model, moves=False)"
        )
    return (
        f"{who}: they do not move with experts, and would be of other experts then; experts stay where they are. Let "
        "them move along (balancer.register_all(name, them)), or say that they do not go by row (moves=False); what a "
        "step needs for itself is to be deleted (del) before optimizer.step()"
    )


def new_transport(
    config: BalancerConfig, migration: dist.ProcessGroup, backend: str, device: torch.device, seconds: float
) -> Transport:
    """The carrier of experts that the config names, not yet warmed up; its messages have so many seconds."""
    return TRANSPORTS[config.migration.transport](migration, backend, device, seconds)


def use_device(device: torch.device) -> None:
    """For a thread of ours: a new one would work on GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
