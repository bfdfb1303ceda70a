"""From a measured load to a placement that all ranks stand on: decided in the background, migrated between steps.

One decision at a time: at step ``n * interval`` the measured load goes to a worker thread (`decision.py`), ``lag``
steps later every rank acts on it. What can fail is dropped, reported as an event and a warning, and training goes on
with the old placement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from .config import BalancerConfig
from .decision import Decision, DecisionMaker, Measurement
from .events import EventLog, LoadMeasured, RebalanceAborted, RebalanceCommitted, RebalancePlanned
from .experts.registry import ExpertTensors
from .guard import Guard
from .load.aggregate import HostCopy
from .load.clock import StepClock
from .load.counter import LoadCounter
from .migration.agreement import Agreement
from .migration.engine import MigrationEngine, Outcome
from .migration.schedule import warm_up as compile_schedules
from .migration.transports import TRANSPORTS
from .migration.transports.base import Transport
from .placement import Placement
from .process_groups import ProcessGroups
from .replicas.sync import ReplicaSync
from .routing.lookup import SlotTable
from .routing.splitter import BatchSplitter
from .topology import Topology

T = TypeVar("T")

logger = logging.getLogger("eplb_runtime")


@dataclass(frozen=True)
class Maps:
    """Everything that follows a placement, in place, at the moment of a commit.

    Args:
        table: from logical experts to their homes.
        splitter: shares tokens out over copies; None: there are no replica slots.
        replicas: keeps copies and homes together; None likewise.
    """

    table: SlotTable
    splitter: BatchSplitter | None
    replicas: ReplicaSync | None

    def prepare(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Make ready, all memory included, to follow a placement that differs in these layers; what is returned does
        it."""
        ready = [self.table.prepare(placement, layers)]
        if self.splitter is not None and self.replicas is not None:
            ready += [self.splitter.prepare(placement, layers), self.replicas.prepare(placement, layers)]

        def follow() -> None:
            for take_over in ready:
                take_over()

        return follow


@dataclass(frozen=True)
class _Pending:
    """A decision on its way, and the step at whose end every rank acts on it."""

    due_step: int
    decision: Future[Decision]


class Rebalancer:
    """The placement of one job, on one rank, and how it changes.

    Args:
        topology: of the EP group, with measured bandwidths.
        placement: the one that stands.
        registry: what moves.
        counter: what was measured.
        maps: what follows the placement.
        transport: carries experts, warmed up.
        device: of the model.
        guard: looks, with each decision, at what the runtime assumes.

    Attributes:
        placement: the one that stands now; its ``epoch`` counts commits.
        step: optimizer steps since attach (or as restored).
        quiesced: while positive, nothing migrates.
        declared: the load to come, for the next decision; None: it is foretold.
        decisions: the background half.
    """

    def __init__(
        self,
        config: BalancerConfig,
        groups: ProcessGroups,
        topology: Topology,
        placement: Placement,
        *,
        registry: ExpertTensors,
        counter: LoadCounter,
        maps: Maps,
        transport: Transport,
        device: torch.device,
        guard: Guard,
    ) -> None:
        self.placement = placement
        self.step = 0
        self.quiesced = 0
        self.declared: NDArray[np.float64] | None = None
        self.events = EventLog()
        self._config = config
        self._groups = groups
        self._counter = counter
        self._guard = guard
        self._registry = registry
        self._maps = maps
        self._device = device
        self._restores = 0
        self._attempts = 0
        self._disabled = False
        self._pending: _Pending | None = None
        self._earlier: list[tuple[int, Placement]] = []
        self._agreement = Agreement(groups.control)
        self._engine = MigrationEngine(
            registry,
            transport,
            self._agreement,
            placement.slots_per_rank,
            groups.job.ep_rank,
            config.staging_bytes,
            config.timeout_seconds,
        )
        self._clock = StepClock(self._engine.rehearse(placement))
        self.decisions = DecisionMaker(config, topology, groups, self._agreement, counter.steps_per_bucket, guard)
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="eplb_runtime", initializer=use_device, initargs=(device,)
        )
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="eplb_runtime compile")
        self._compiler.submit(self.decisions.warm_up)
        self._compiler.submit(compile_schedules)
        if maps.splitter is not None:
            self._compiler.submit(maps.splitter.warm_up)

    def at_boundary(self) -> bool:
        """A training step is over, on every rank: decide or migrate if it is time. Returns whether experts moved.

        Raises:
            MigrationBroken: now or earlier, this rank failed after all had agreed to commit.
        """
        self.refuse_if_broken()
        before = self.placement
        self.step += 1
        self._attempts = 0
        self._clock.tick()
        self._counter.advance()
        if not self._disabled:
            if self._pending is None and self.step % self._config.interval == 0:
                self._pending = _Pending(self.step + self._config.lag, self._start_decision())
            if self._pending is not None and self.step >= self._pending.due_step and not self.quiesced:
                self._act_on_pending()
        return self.placement is not before

    def refuse_if_broken(self) -> None:
        """Raises `MigrationBroken` once this rank has failed after an agreement: nobody knows what its experts are."""
        self._engine.refuse_if_broken()

    def now(self) -> bool:
        """Decide on what was measured so far and act on it at once; a decision under way is carried out instead.

        Returns:
            Whether experts moved.

        Raises:
            RuntimeError: migrations are held back by ``quiesce``, or rebalancing has ended in this job.
            MigrationBroken: as `at_boundary`.
        """
        self.refuse_if_broken()
        if self.quiesced or self._disabled:
            why = "inside quiesce()" if self.quiesced else "rebalancing has ended in this job (see the log)"
            raise RuntimeError(f"rebalance() cannot work: {why}")
        before = self.placement
        if self._pending is None:
            self._pending = _Pending(self.step, self._start_decision())
        self._act_on_pending()
        return self.placement is not before

    def restore(self, target: Placement, step: int, agreed_on: bytes) -> None:
        """Go to a saved placement. Collective; between steps.

        Args:
            agreed_on: 16 bytes over step and placement, compared over all ranks first; zeros: this rank has none.

        Raises:
            RuntimeError: the ranks were given different states, or the migration was dropped; the old placement stands.
        """
        self.forget_pending()
        agreed = self._agreement.same_on_all(agreed_on, "usable saved state")
        if agreed.connections_broken:
            self._reconnect()
        if agreed_on == bytes(16):
            return
        if not agreed.commit:
            raise RuntimeError(f"the saved placement cannot be restored: {agreed.cause}")
        self.step = step
        self._restores += 1
        self._attempts = 0
        outcome = self._migrate(target)
        if outcome.failed_phase is not None:
            raise RuntimeError(f"the saved placement could not be restored: {outcome.cause}")

    def run(self, work: Callable[[], T]) -> T:
        """Do something on the control group, when the decision under way has left it, and wait for it."""
        return self._worker.submit(work).result()

    def forget_pending(self) -> None:
        """A decision on its way is not acted on; the worker is done with the control group when this returns."""
        if self._pending is not None:
            self._pending.decision.result()
            self._pending = None

    def close(self) -> None:
        """End it; copies are not used any more, since nobody refreshes them."""
        self.forget_pending()
        self._worker.shutdown()
        self._compiler.shutdown()
        self._engine.close()
        if self._maps.replicas is not None:
            self._get_ready(self.placement.without_replicas(), range(self.placement.num_layers))()

    # -- deciding --------------------------------------------------------------------------------------------------

    def _start_decision(self) -> Future[Decision]:
        measurement = Measurement(
            buckets=HostCopy(self._counter.take()),
            placement=self.placement,
            earlier=tuple(self._earlier),
            step_seconds=self._clock.step_seconds,
            stall_seconds=self._clock.stall_seconds,
            home_bytes=self._registry.largest_home_bytes(),
            look=self._guard.sample(),
            computed=self._guard.computed(),
            declared=self.declared,
        )
        self._earlier.clear()
        self.declared = None
        return self._worker.submit(self.decisions.decide, measurement)

    def _act_on_pending(self) -> None:
        assert self._pending is not None
        decision, self._pending = self._pending.decision.result(), None
        self._guard.report(decision.finding)
        if decision.imbalance is not None:
            buckets = tuple(tuple(bucket) for bucket in decision.imbalance.tolist())
            self.events.emit(LoadMeasured(self.step, len(buckets) * self._counter.steps_per_bucket, buckets))
        if decision.failure:
            self._drop("planned", decision.failure, decision.connections_broken)
            return
        summary = decision.summary or {}
        self.events.emit(
            RebalancePlanned(
                self.step,
                epoch=summary["epoch"],
                moves=summary["moves"],
                decision=summary["decision"],
                reason=summary["reason"],
                imbalance_before=summary["imbalance_before"],
                imbalance_after=summary["imbalance_after"],
                plan_seconds=summary["plan_seconds"],
            )
        )
        if decision.target is not None:
            self._migrate(decision.target)

    # -- migrating -------------------------------------------------------------------------------------------------

    def _migrate(self, target: Placement) -> Outcome:
        before = self.placement
        # Restoring may set the step back, and a step may see several migrations: without their numbers, an old record
        # would be taken for the new one's. The second number starts anew with each step, so ranks cannot drift apart.
        self._attempts += 1
        key = f"restored/{self._restores}/step/{self.step}/{self._attempts}"
        outcome = self._engine.migrate(self.placement, target, key, self._get_ready)
        self._clock.exclude(outcome.pause_seconds)
        if outcome.rounds and outcome.failed_phase is None:
            self._clock.stalled(outcome.stall_seconds)
        if self.placement is not before:
            self.events.emit(
                RebalanceCommitted(
                    self.step,
                    epoch=self.placement.epoch,
                    digest=self.placement.digest(),
                    moved_experts=outcome.moved_experts,
                    received_bytes=outcome.received_bytes,
                    pause_seconds=outcome.pause_seconds,
                )
            )
        if outcome.failed_phase is not None:
            self._drop(outcome.failed_phase.value, outcome.cause, outcome.connections_broken, outcome)
        return outcome

    def _get_ready(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Before a vote: make ready what follows a placement. What is returned takes it over, before anybody routes."""
        follow = self._maps.prepare(placement, layers)

        def take_over() -> None:
            self._earlier.append((self._counter.buckets, self.placement))
            self.placement = placement
            follow()

        return take_over

    def _drop(self, phase: str, cause: str, connections_broken: bool, outcome: Outcome | None = None) -> None:
        committed, left = (outcome.committed_layers, outcome.left_layers) if outcome is not None else ((), ())
        logger.warning(
            "step %d: rebalance %s (%s): %s; training goes on with placement epoch %d",
            self.step,
            f"partly committed, in layers {list(committed)} but not all of {list(left)}" if committed else "dropped",
            phase,
            cause,
            self.placement.epoch,
        )
        self.events.emit(RebalanceAborted(self.step, self.placement.epoch, phase, cause, committed, left))
        if connections_broken:
            self._reconnect()

    def _reconnect(self) -> None:
        """After a timeout: new groups on all ranks, or no more rebalancing on this one."""
        try:
            self._groups.rebuild()
            self._agreement = Agreement(self._groups.control)
            transport = new_transport(self._config, self._groups, self._device)
            self.decisions.reconnect(self._groups.control, self._agreement)
            self._engine.reconnect(transport, self._agreement)
        except Exception:
            self._disabled = True
            logger.error("the ranks could not reconnect: no more rebalancing in this job", exc_info=True)


def new_transport(config: BalancerConfig, groups: ProcessGroups, device: torch.device) -> Transport:
    """The carrier of experts that the config names, on the migration group that stands, not yet warmed up."""
    return TRANSPORTS[config.transport](groups.migration, groups.backend, device, config.timeout_seconds)


def use_device(device: torch.device) -> None:
    """For a thread of ours: a new one would work on GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
