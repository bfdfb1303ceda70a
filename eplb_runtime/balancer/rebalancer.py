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
from ..migration.engine import MigrationBroken, MigrationEngine, Outcome
from ..migration.overlapped import HELD, REPLACED, WRITTEN, BackgroundMigration, Brought
from ..moe.experts.optimizer_state import OptimizerStateError
from ..moe.experts.outside import AGAIN, BESIDE
from ..placement import Placement, PlacementError
from ..utils.errors import one_line
from ..utils.worker import Worker
from . import event_constructors
from .decision import Decision, DecisionMaker, Measurement, staying
from .guard import Guard
from .runtime import Runtime

T = TypeVar("T")

logger = logging.getLogger("eplb_runtime")

_REPLACED_TIMES = 2
"""Migrations in a row that found other tensors than they began with: once is a state that was loaded, twice is an
optimizer that makes its state anew in each step."""

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
        self._standing = Standing()
        self._pending: _Pending | None = None
        self._committed_beside: set[int] = set()
        self._pause_beside = 0.0
        self._replaced = 0
        self._earlier: list[tuple[int, Placement]] = []
        self._agreement = self._new_agreement()
        self._engine = self._new_engine(transport)
        self._clock = StepClock(self._engine.rehearse(runtime.placement))
        self.decisions = DecisionMaker(runtime, guard, self._at_point)
        use_my_device = partial(use_device, runtime.device)
        self._worker = Worker("eplb_runtime", use_my_device)
        self.background = self._new_background()
        self._beside = config.overlap
        self._link_seconds_per_byte = 1.0 / max(runtime.topology.slowest_bandwidth, 1.0)
        self._reconnection = Reconnection(groups, self._standing, self._carrier, use_my_device, self._at_point)
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

    def _new_background(self) -> BackgroundMigration:
        return BackgroundMigration(
            self._engine,
            self._agreement,
            self._worker,
            registry=self._registry,
            maps=self._maps,
            is_planner=self._groups.job.is_planner,
            timeout_seconds=self._config.timeout_seconds,
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

    @property
    def placement(self) -> Placement:
        """The one that stands now; its ``epoch`` counts commits. What a migration has brought in a step that is not
        over yet is in it: then, ask on every rank at the same place."""
        return self.background.standing() if self.background.under_way else self._placement

    @property
    def epoch_on_this_rank(self) -> int:
        """Of the placement, without asking other ranks; -1: it may change at any time."""
        return -1 if self.background.under_way else self._placement.epoch

    def has_moved(self, layer: int) -> bool:
        """Whether homes of a layer stand elsewhere than at attach, or have since."""
        stands = np.array_equal(self.placement.homes_LRH[layer], self._initial.homes_LRH[layer])
        return bool(self._moved_L[layer]) or not stands

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
        self.step += 1
        self._attempts = 0
        self._at_point(Phase.STEPPED, self.step)
        self._clock.tick()
        self._counter.advance()
        self._standing.step_seconds = self._clock.step_seconds
        self._standing.steps += 1
        is_due = self.step % self._config.interval == 0
        if self.background.under_way:
            self._go_on_beside()
        if self._reconnection.under_way:
            self._find_together()
        busy = self._reconnection.under_way or self.background.under_way
        if busy and is_due:
            self._counter.take()  # load that no decision will see
            self._earlier.clear()
        if not busy:
            if self._pending is None and is_due:
                self._pending = self._start_decision(self._config.migration.lag)
            if self._pending is not None and self.step >= self._pending.due_step and not self.quiesced:
                self._act_on_pending(self._beside)
        self.background.step_begins()
        return self._placement is not before

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
        self.end_beside()
        before = self.placement
        if self._pending is None:
            self._pending = self._start_decision(0)
        self._act_on_pending(beside=False, patient=False)
        return self.placement is not before

    def wait_for_decision(self) -> None:
        """One that is on its way is made, or will never be."""
        if self._pending is not None:
            wait([self._pending.decision], self._config.timeout_seconds)

    def load_begins_here(self) -> None:
        """What was counted before is not this job's, or stood under other placements than those known here."""
        self._earlier.clear()

    def compare(self, digest: bytes, what: str, said: str) -> Verdict:
        """Whether all ranks were given the same; what is under way is over then. Collective, between steps.

        Args:
            digest: 16 bytes; zeros: this rank has none.
            what: the call that needs it; refused while the ranks connect anew.
            said: what is compared, in words.
        """
        self._refuse_alone(what)
        self.forget_pending()
        agreed = self._agreement.same_on_all(digest, said)
        if agreed.connections_broken:
            self._pause(agreed.cause)
        return agreed

    def go_to(self, step: int, target: Placement | Callable[[], Placement]) -> Outcome:
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
        control, agreement, here = self._groups.control, self._agreement, self.placement
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
        self.background.withdraw()  # the thread may wait for training, and training is here
        try:
            return self._worker.do(work, self._config.timeout_seconds + A_LITTLE_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            self._pause(one_line(error))
            raise RuntimeError(str(error)) from error

    def forget_pending(self) -> None:
        """A decision on its way is not acted on, a migration beside training goes no further; the worker is done with
        the control group when this returns, or will never be."""
        self.end_beside()
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
            self._let_copies_arrive()
            self._get_ready(self.placement.without_replicas(), range(self.placement.num_layers))()
        self._events.emit(BalancingEnded(self.step, "closed"))

    def leave(self) -> None:
        """End the threads, without a word to the others: this process ends."""
        self.background.leave()
        self._groups.hang_up(self._groups.standing)  # who waits in a collective comes back
        self._reconnection.close(A_LITTLE_SECONDS)
        self._worker.close(A_LITTLE_SECONDS)
        self._compiler.close(0.0)
        self.decisions.close()

    def _at_point(self, phase: Phase, subject: Any) -> None:
        """The engine's probe hears of points outside of it, too."""
        self._engine.probe(phase, subject)

    # -- deciding --------------------------------------------------------------------------------------------------

    def _start_decision(self, lag: int) -> _Pending:
        measurement = Measurement(
            buckets=HostCopy(self._counter.take()),
            placement=self.placement,
            earlier=tuple(self._earlier),
            step_seconds=self._clock.step_seconds,
            stall_seconds=self._clock.stall_seconds,
            home_bytes=self._home_bytes(),
            token_bytes=self._counter.token_bytes,
            look=self._guard.sample(),
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

    def _act_on_pending(self, beside: bool, *, patient: bool = True) -> None:
        assert self._pending is not None
        decision, self._pending = self._outcome_of(self._pending), None
        self._guard.report(decision.finding, decision.stays)
        if decision.imbalance is not None:
            self._events.emit(event_constructors.measured(self.step, decision, self._counter.steps_per_bucket))
        if decision.failure:
            self._drop("planned", decision.failure, decision.connections_broken)
            return
        stays = self._why_homes_stay(decision.target, patient and not self._asks_again)
        self._asks_again = False
        if stays.connections_broken:
            self._drop("planned", stays.cause, True)
            return
        if not stays.commit and stays.cause.endswith(AGAIN):
            self._asks_again = True
            decision = replace(decision, target=None, summary=staying(self.placement, AGAIN))
        elif not stays.commit:
            why = _held(stays.cause)
            self._guard.report("", why)
            decision = replace(decision, target=None, summary=staying(self.placement, why))
        self._events.emit(event_constructors.planned(self.step, decision.summary or {}))
        if decision.target is None:
            return
        if beside:
            key = self._new_key("migration")
            self.background.begin(self._placement, decision.target, key, self._link_seconds_per_byte)
            self._target, self._committed_beside, self._pause_beside = decision.target, set(), 0.0
        else:
            self._migrate(decision.target)

    def _why_homes_stay(self, target: Placement | None, patient: bool) -> Verdict:
        """No commit if what a rank knows of its user's tensors keeps homes where they are. Collective if there is a
        target with other homes."""
        if target is None or self.held_outside is None or np.array_equal(target.homes_LRH, self.placement.homes_LRH):
            return Verdict(True)
        return self._agreement.same_on_all(bytes([1]) * 16, "tensors of the user's", self.held_outside(patient, False))

    def _copies_outside(self) -> str:
        """Who holds copies of experts that do not move along, as far as this rank knows."""
        return f"rank {self._groups.job.rank}: {said}" if (said := self._held_by(False, True)) else ""

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

    def _migrate(self, target: Placement) -> Outcome:
        before = self.placement
        key = self._new_key("migration")
        self._let_copies_arrive()
        try:
            outcome = self._engine.migrate(self.placement, target, key, self._get_ready)
        except MigrationBroken as error:
            self._events.emit(BalancingEnded(self.step, str(error)))
            raise
        self._clock.exclude(outcome.pause_seconds)
        if outcome.rounds and outcome.failed_phase is None:
            self._clock.stalled(outcome.stall_seconds)
        if self.placement is not before:
            seconds = outcome.pause_seconds
            self._events.emit(
                event_constructors.committed(self.step, self.placement, outcome, seconds, dict(outcome.seconds))
            )
        if outcome.failed_phase is not None:
            committed, left = outcome.committed_layers, outcome.left_layers
            self._drop(outcome.failed_phase.value, outcome.cause, outcome.connections_broken, committed, left)
        elif outcome.connections_broken:
            self._pause(outcome.cause)
        return outcome

    def _new_key(self, what: str) -> str:
        """Restoring may set the step back, and a step may see several migrations: without their numbers, an old record
        would be taken for the new one's. The last number starts anew with each step, so ranks cannot drift apart."""
        self._attempts += 1
        return f"{what}/restored/{self._restores}/step/{self.step}/{self._attempts}"

    def _get_ready(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Before a vote: make ready what follows a placement. What is returned takes it over, before anybody routes."""
        follow = self._maps.prepare(placement, layers)

        def take_over() -> None:
            self._stands(placement)
            follow()

        return take_over

    def _let_copies_arrive(self) -> None:
        """Copies are read from homes that are about to be written. On every rank, before anything can fail on one."""
        if self._maps.replicas is not None:
            self._maps.replicas.wait_all()

    def _stands(self, placement: Placement) -> None:
        """From here on."""
        self._earlier.append((self._counter.buckets, self._placement))
        self._placement = placement
        self._moved_L |= (placement.homes_LRH != self._initial.homes_LRH).any(axis=(1, 2))

    # -- beside training -------------------------------------------------------------------------------------------

    def _go_on_beside(self) -> None:
        """A step is over in which a migration was under way."""
        progress = self.background.at_boundary(hold_back=bool(self.quiesced) or self._reconnection.under_way)
        self._took_over(progress)
        failure = progress.failure
        if failure is None:
            return
        self._replaced += failure.kind == REPLACED
        if failure.kind == WRITTEN or self._replaced >= _REPLACED_TIMES:
            stays = self._why_homes_stay(self._target, False)
            if not stays.commit:
                failure = stays if stays.connections_broken else replace(stays, kind=HELD)
        if failure.kind == WRITTEN or (failure.kind == REPLACED and self._replaced >= _REPLACED_TIMES):
            self._beside = False
            logger.warning(
                "step %d: %s; experts to which that happens migrate between steps, as without overlap",
                self.step,
                failure.cause,
            )
            self._migrate(self._target)
        else:
            if failure.kind == HELD:
                failure = replace(failure, cause=_held(failure.cause))
                self._guard.report("", failure.cause)
            committed = tuple(sorted(self._committed_beside))
            self._drop("staged", failure.cause, failure.connections_broken, committed, progress.left_layers)

    def _took_over(self, progress: Brought) -> None:
        self._clock.exclude(progress.pause_seconds)
        self._pause_beside += progress.pause_seconds
        if progress.placement is self._placement:
            return
        self._replaced = 0
        self._committed_beside.update(progress.committed_layers)
        self._stands(progress.placement)
        pause, self._pause_beside = self._pause_beside, 0.0
        self._events.emit(event_constructors.committed(self.step, progress.placement, progress, pause))

    def end_beside(self) -> None:
        """Nothing travels beside training any more: what is not committed yet is left where it is. On every rank."""
        if self.background.under_way:
            self._stands(self.background.cancel())

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
            self.placement.epoch,
        )
        self._events.emit(RebalanceAborted(self.step, self.placement.epoch, phase, cause, committed, left))
        if connections_broken:
            self._pause(cause)

    # -- finding together ------------------------------------------------------------------------------------------

    def _pause(self, cause: str) -> None:
        """This rank has lost the others, or may have: no decisions until all have found together."""
        if self._reconnection.under_way:
            return
        self._pending = None
        self.end_beside()  # it would go on with staging memory of the old connections
        logger.warning("step %d: the ranks connect anew; nothing is rebalanced until they have: %s", self.step, cause)
        self._events.emit(BalancingPaused(self.step, cause))
        self._standing.digest = bytes.fromhex(self.placement.digest())
        self._reconnection.begin()

    def _find_together(self) -> None:
        """At the end of a step while the ranks connect anew: take over what holds from here on, if anything does."""
        if self._reconnection.differing:
            self._engine.broken = self._reconnection.differing
            self._events.emit(BalancingEnded(self.step, self._engine.broken))
            self.refuse_if_broken()
        link = self._reconnection.at_boundary()
        if link is None:
            return
        before = self._groups.take_over(link.connections)
        self._agreement = self.background.agreement = self._new_agreement()
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
