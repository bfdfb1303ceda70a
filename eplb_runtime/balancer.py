"""The runtime that each rank has: measures, decides in the background, migrates at the step boundary.

One decision at a time: at step ``n * interval`` the measured load goes to a worker thread (`decision.py`), ``lag``
steps later every rank acts on it, between its optimizer step and its next forward. What can fail is dropped, reported
as an event and a warning, and training goes on with the old placement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from .config import BalancerConfig
from .decision import Decision, DecisionMaker, Measurement
from .events import EventLog, LoadMeasured, RebalanceAborted, RebalanceCommitted, RebalancePlanned
from .experts.registry import ExpertTensors, RegistryError
from .experts.slices import is_sliced, local
from .gradients.reduction import Gradients
from .load.aggregate import HostCopy
from .load.clock import StepClock
from .load.counter import LoadCounter
from .migration.agreement import Agreement
from .migration.bandwidth import measure
from .migration.engine import MigrationEngine, Outcome
from .migration.transports.base import Transport
from .migration.transports.torch_p2p import TorchPointToPoint
from .placement import Placement, PlacementError
from .planner import Plan
from .ranks import ProcessGroups
from .replicas.sync import ReplicaSync
from .routing.lookup import SlotTable
from .routing.splitter import BatchSplitter
from .topology import Topology

logger = logging.getLogger("eplb_runtime")


@dataclass(frozen=True)
class _Pending:
    """A decision on its way, and the step at whose end every rank acts on it."""

    due_step: int
    decision: Future[Decision]


class Balancer:
    """Keeps the experts of one model balanced; made by ``attach``, which also hooks it into the optimizer.

    Attributes:
        config: its settings.
        topology: ranks, nodes and measured bandwidths.
        events: what happened (`eplb_runtime.events`).
        layer_of_parameter: MoE layer index of each expert parameter, by its name in the model.
        extra_tensors: what ``register`` added: ``{"<parameter>/<name>": (layer, tensor)}``.
    """

    def __init__(
        self,
        *,
        config: BalancerConfig,
        groups: ProcessGroups,
        topology: Topology,
        placement: Placement,
        registry: ExpertTensors,
        counter: LoadCounter,
        table: SlotTable,
        splitter: BatchSplitter | None,
        replicas: ReplicaSync | None,
        dense_parameters: Sequence[Tensor],
        device: torch.device,
        layer_of_parameter: Mapping[str, int],
        training: bool,
    ) -> None:
        self.config = config
        self.layer_of_parameter = dict(layer_of_parameter)
        self.events = EventLog()
        self._groups = groups
        self._registry = registry
        self._counter = counter
        self._table = table
        self._splitter = splitter
        self._replicas = replicas
        self._training = training
        self._sliced = any(is_sliced(parameter) for parameter in registry.parameters())
        self._device = device
        self._placement = placement
        self._step = 0
        self._restores = 0
        self._clock = StepClock()
        self._gradients = Gradients(
            registry,
            replicas,
            dense_parameters,
            groups,
            average_dense=config.dense_gradients == "allreduce",
        )
        self._quiesced = 0
        self._disabled = False
        self._closed = False
        self._pending: _Pending | None = None
        self._earlier: list[tuple[int, Placement]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.extra_tensors: dict[str, tuple[int, Tensor]] = {}

        transport = self._new_transport()
        transport.warm_up()
        self.topology = measure(topology, transport, groups.ep_rank, groups.control)
        self._agreement = Agreement(groups.control)
        self._engine = MigrationEngine(
            registry,
            transport,
            self._agreement,
            placement.slots_per_rank,
            groups.ep_rank,
            config.staging_bytes,
        )
        self._decisions = DecisionMaker(
            config, self.topology, groups.control, self._agreement, registry, counter.steps_per_bucket
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="eplb_runtime")
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="eplb_runtime compile")
        self._compiler.submit(self._decisions.warm_up)
        if splitter is not None and replicas is not None:
            self._compiler.submit(splitter.warm_up)
            replicas.follow(placement)
            replicas.refresh()

    @property
    def placement(self) -> Placement:
        """The placement that stands now; its ``epoch`` counts commits."""
        return self._placement

    @property
    def device(self) -> torch.device:
        """Where this rank's experts are."""
        return self._device

    @property
    def gradient_group(self) -> dist.ProcessGroup:
        """All ranks of the job, with the device's backend: for what concerns every rank's gradients."""
        return self._groups.data

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Close a training step: after ``optimizer.step()``, before the next forward, on every rank.

        ``attach`` hooks it to the optimizer; call it yourself only without one.
        """
        self._gradients.begin()
        self._step += 1
        self._clock.tick()
        self._counter.advance()
        before = self._placement
        if not self._disabled:
            self._rebalance_if_due()
        if self._replicas is not None and (self._training or self._placement is not before):
            self._replicas.refresh()

    def _rebalance_if_due(self) -> None:
        if self._pending is None and self._step % self.config.interval == 0:
            self._pending = _Pending(self._step + self.config.lag, self._start_decision())
        if self._pending is not None and self._step >= self._pending.due_step and not self._quiesced:
            decision, self._pending = self._pending.decision.result(), None
            self._act_on(decision)

    def _start_decision(self) -> Future[Decision]:
        measurement = Measurement(
            buckets=HostCopy(self._counter.take()),
            placement=self._placement,
            earlier=tuple(self._earlier),
            step_seconds=self._clock.step_seconds,
            stall_seconds=self._clock.stall_seconds,
        )
        self._earlier.clear()
        return self._worker.submit(self._decisions.decide, measurement)

    def _act_on(self, decision: Decision) -> None:
        if decision.imbalance is not None:
            rows = tuple(tuple(row) for row in decision.imbalance.tolist())
            self.events.emit(LoadMeasured(self._step, len(rows) * self._counter.steps_per_bucket, rows))
        if decision.failure:
            self._drop("planned", decision.failure, decision.connections_broken)
            return
        summary = decision.summary or {}
        self.events.emit(
            RebalancePlanned(
                self._step,
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

    def _migrate(self, target: Placement) -> Outcome:
        before = self._placement
        # Restoring may set the step back: without their number, an old decision would be taken for the new one.
        key = f"restored/{self._restores}/step/{self._step}"
        outcome = self._engine.migrate(self._placement, target, key, self._take_over)
        self._clock.exclude(outcome.pause_seconds)
        if self._placement is not before:
            self.events.emit(
                RebalanceCommitted(
                    self._step,
                    epoch=self._placement.epoch,
                    digest=self._placement.digest(),
                    moved_experts=outcome.moved_experts,
                    received_bytes=outcome.received_bytes,
                    pause_seconds=outcome.pause_seconds,
                )
            )
        if outcome.failed_phase is not None:
            self._drop(outcome.failed_phase.value, outcome.cause, outcome.connections_broken)
        return outcome

    def _take_over(self, placement: Placement) -> None:
        """A round is committed: maps change in place, before anybody routes again."""
        self._earlier.append((self._counter.buckets, self._placement))
        self._placement = placement
        self._table.update(placement)
        if self._splitter is not None and self._replicas is not None:
            self._splitter.follow(placement)
            self._replicas.follow(placement)

    def _drop(self, phase: str, cause: str, connections_broken: bool) -> None:
        logger.warning(
            "step %d: rebalance dropped (%s): %s; training goes on with placement epoch %d",
            self._step,
            phase,
            cause,
            self._placement.epoch,
        )
        self.events.emit(RebalanceAborted(self._step, self._placement.epoch, phase, cause))
        if connections_broken:
            self._reconnect()

    def _reconnect(self) -> None:
        """After a timeout: new groups on all ranks, or no more rebalancing on this one."""
        try:
            self._groups.rebuild()
            self._agreement, transport = Agreement(self._groups.control), self._new_transport()
            self._decisions.reconnect(self._groups.control, self._agreement)
            self._engine.reconnect(transport, self._agreement)
        except Exception:
            self._disabled = True
            logger.error("the ranks did not find together again: no more rebalancing in this job", exc_info=True)

    def _new_transport(self) -> Transport:
        groups = self._groups
        return TorchPointToPoint(groups.migration, groups.backend, self._device, self.config.timeout_seconds)

    # -- gradients -----------------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Average gradients over ranks as the config says; hooked to run before the optimizer's step.

        Gradients of copies are in their homes' by then: they travel during the backward pass, and are summed in float32
        in the order of the slots. What ``no_sync`` kept back follows here.

        Call it yourself when gradients are looked at earlier (clipping by hand; for a GradScaler, see
        `eplb_runtime.GradScaler`). A second call before the next step, or the next forward in training, does nothing.
        Expert gradients need no averaging inside the EP group: the tokens of all ranks reached them in the backward
        pass, already divided by the number of ranks as data parallelism does it.
        """
        self._gradients.reduce()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes leave the gradients of copies where they are; for all micro-batches but the last.

        They are added up in float32 and travel once, with the first backward outside. Copies that are shared between
        layers have no place to keep them and send them all the same.
        """
        if self._replicas is None:
            yield
            return
        with self._replicas.defer():
            yield

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip by the 2-norm over the whole model, each logical expert counted once, as torch's function of that name.

        Args:
            max_norm: gradients are scaled down to it.

        Returns:
            The norm before clipping, a scalar, equal on every rank.
        """
        rows_LH = self._table.logical_of_rows(self._groups.ep_rank)
        return self._gradients.clip(max_norm, rows_LH, self._placement.num_experts, self._device)

    @torch.no_grad()
    def gather_experts(self, layer: int, rows: Tensor) -> Tensor:
        """All experts of a layer in logical order, from every rank's home rows. Collective over all EP groups.

        Args:
            rows: ``[E/R, ...]``, a registered parameter or its optimizer state; whole or sliced.

        Returns:
            ``[E, ...]`` on the same device.
        """
        here = local(rows).detach().contiguous()
        parts = [torch.empty_like(here) for _ in range(self._groups.ep_size)]
        dist.all_gather(parts, here, group=self._groups.dispatch)
        by_slot = torch.cat(parts)
        logical = torch.cat([self._table.logical_of_rows(rank)[layer] for rank in range(self._groups.ep_size)])
        in_order = torch.empty_like(by_slot).index_copy_(0, logical, by_slot)
        if self._groups.expert_data is None or not is_sliced(rows):
            return in_order
        slices = [torch.empty_like(in_order) for _ in self._groups.edp_ranks]
        dist.all_gather(slices, in_order, group=self._groups.expert_data)
        return torch.cat(slices, dim=1)

    # -- state ---------------------------------------------------------------------------------------------------

    def register(self, parameter: str, name: str, tensor: Tensor) -> None:
        """Let a tensor move with the experts of a parameter: an EMA copy, a mask, what else is kept per expert.

        It is moved in place, bit for bit, and saved in checkpoints; not copied to replica slots, not trained.
        Collective in effect: the same names on every rank, in the same order.

        Args:
            parameter: an expert parameter's name in the model (a key of ``layer_of_parameter``).
            name: new for this parameter.
            tensor: ``[E/R, ...]``, rows as the parameter's stand now, on the parameter's device.

        Raises:
            RegistryError: no such parameter, the name is taken, wrong rows or device, or it needs gradients.
        """
        if parameter not in self.layer_of_parameter:
            raise RegistryError(f"{parameter!r} is no expert parameter: take a key of balancer.layer_of_parameter")
        if tensor.device != self._device or tensor.requires_grad:
            raise RegistryError(
                f"{name} of {parameter}: give a tensor on {self._device} without gradients (detach it); this one is on "
                f"{tensor.device}, requires_grad={tensor.requires_grad}"
            )
        layer = self.layer_of_parameter[parameter]
        if self._sliced and not is_sliced(tensor):
            raise RegistryError(f"{name} of {parameter}: give a DTensor placed as the parameter (torch.zeros_like(it))")
        self._registry.add(layer, f"{parameter}/{name}", tensor, "buffer")
        self.extra_tensors[f"{parameter}/{name}"] = (layer, tensor)

    def home_experts(self, layer: int) -> list[int]:
        """The logical expert of each home row of this rank."""
        return [int(expert) for expert in self._placement.homes_LRH[layer, self._groups.ep_rank]]

    def weights_changed(self) -> None:
        """Expert weights were written from outside, between steps: copies follow. Collective."""
        if self._replicas is not None:
            self._replicas.refresh()

    def background_group(self) -> dist.ProcessGroup:
        """A gloo group over all ranks for a thread beside training (an asynchronous save); made once. Collective."""
        return self._groups.background()

    # -- for verification ----------------------------------------------------------------------------------------

    def plan_with(self, planner: Callable[..., Plan]) -> None:
        """Let another function than `planner.plan`, called as that is, make the plans from the next decision on."""
        self._decisions.planner = planner

    @contextmanager
    def unsplit(self) -> Iterator[None]:
        """Inside, every token goes to its expert's home, whether there are copies or not. On every rank alike."""
        if self._splitter is None:
            yield
            return
        self._splitter.at_home = True
        try:
            yield
        finally:
            self._splitter.at_home = False

    @property
    def counted(self) -> Tensor:
        """int64 ``[L, E]``: what this rank's router chose in the step that is running."""
        return self._counter.counts

    # -- life cycle ----------------------------------------------------------------------------------------------

    @contextmanager
    def quiesce(self) -> Iterator[None]:
        """No migration while inside (weight reload, asynchronous save); enter and leave at the same step on all ranks.

        A decision that becomes due meanwhile waits for the first step after.
        """
        self._quiesced += 1
        try:
            yield
        finally:
            self._quiesced -= 1

    def state_dict(self) -> dict[str, Any]:
        """Step and placement, to warm-start a later run; JSON-able."""
        return {"step": self._step, "placement": self._placement.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved placement, moving experts as needed. Collective; between steps.

        Raises:
            PlacementError: the placement is for another model or EP size.
            RuntimeError: the ranks were given different states, or the migration was dropped; the old placement stands.
        """
        problem: PlacementError | None = None
        target, step, digest = self._placement, self._step, bytes(16)
        try:
            target, step = Placement.from_json(state["placement"]), int(state["step"])
            here = self._placement
            target.require_model(here.num_layers, here.num_experts, here.num_ranks, here.replica_slots)
            digest = xxhash.xxh3_128(f"{step} {target.digest()}".encode()).digest()
        except PlacementError as error:
            problem = error
        except (KeyError, TypeError, ValueError) as error:
            problem = PlacementError(f"not what state_dict() gave: {type(error).__name__}: {error}")
        self._forget_pending()
        agreed = self._agreement.same_on_all(digest, "usable saved state")
        if agreed.connections_broken:
            self._reconnect()
        if problem is not None:
            raise problem
        if not agreed.commit:
            raise RuntimeError(f"the saved placement cannot be restored: {agreed.cause}")
        self._step = step
        self._restores += 1
        outcome = self._migrate(target)
        if outcome.failed_phase is not None:
            raise RuntimeError(f"the saved placement could not be restored: {outcome.cause}")
        if self._replicas is not None:
            self._replicas.refresh()

    def _forget_pending(self) -> None:
        """A decision on its way is not acted on; the worker is done with the control group when this returns."""
        if self._pending is not None:
            self._pending.decision.result()
            self._pending = None

    def before_forward(self) -> None:
        """A forward in training begins new gradients, also when the last ones never reached the optimizer."""
        if torch.is_grad_enabled():
            self._gradients.begin()

    def own_hook(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Remove this hook at ``close``."""
        self._hooks.append(handle)

    def close(self) -> None:
        """Stop balancing; collective. The model keeps the homes that stand, spread over ranks; copies are not used any
        more, since nobody refreshes them.
        """
        if self._closed:
            return
        self._closed = True
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._forget_pending()
        self._worker.shutdown()
        self._compiler.shutdown()
        if self._replicas is not None:
            self._take_over(self._placement.without_replicas())
        self._groups.close_balancing()
