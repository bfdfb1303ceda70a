"""The balancer as its user sees it: the calls that a training loop makes. `rebalancer.py` changes the placement."""

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ..distributed.transports.base import Transport
from ..events import EventLog, LoadMeasured, RebalanceAborted, RebalanceCommitted
from ..load.counter import HostCopy, aggregate, saved_load
from ..load.declared import checked_declaration
from ..moe.dispatch import choosing
from ..moe.dispatch.channels import MicroBatchChannel, MicroBatchChannels
from ..moe.experts.slices import has_memory, in_logical_order
from ..placement import Placement
from ..utils.spans import phase
from ..utils.text import counted, text_table
from .gradients.reduction import Gradients
from .loop_state import LoopState, OpenStream, TensorStream
from .phases import Phases, restore
from .rebalancer import Rebalancer, use_device
from .runtime import ModelTensors, Runtime

logger = logging.getLogger("eplb_runtime")
T = TypeVar("T")
U = TypeVar("U")
C = TypeVar("C", bound=type)
EXPORT_SECONDS = 120.0
"""Ranks wait so long for each other between buckets of an export, if the balancer's timeout is no longer."""


def _end_threads(of: "weakref.ref[Balancer]") -> None:
    """Close a balancer at the end of its process if ``close`` was not called: a thread that returned from a wait into a
    finalized interpreter would end the process by a signal."""
    balancer = of()
    if balancer is not None and not balancer.closed and not balancer.in_a_child:
        balancer.loop.closed = True
        balancer.rebalancer.abandon()
        balancer.close_listeners()
        balancer.runtime.groups.store.close()


def _outside_graphs(methods_of: C) -> C:
    """Keep the public methods of a class out of graphs of torch.compile."""
    for name, method in [*vars(methods_of).items()]:
        if callable(method) and not name.startswith("_"):
            setattr(methods_of, name, torch.compiler.disable(method))
    return methods_of


@_outside_graphs
class Balancer:
    """Keeps the experts of one model balanced; made by ``attach``, which also hooks it into the optimizer.

    Attributes:
        topology: ranks, nodes and measured bandwidths.
        events: history of the run (`eplb_runtime.events`).
        layer_of_parameter: MoE layer index of each expert parameter, by its name in the model.
        config, runtime, tensors, loop, guard, gradients, rebalancer, optimizer_hooks: its parts, for hosts and other
            rooms.
        closing: what ends at `close`, the last first.
    """

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        hook_optimizers: Callable[["Balancer"], Any],
        export_with: Callable[["Balancer"], Any],
    ) -> None:
        self.config = config = runtime.config
        self.topology = runtime.topology
        self.layer_of_parameter = dict(runtime.layer_of_parameter)
        self.events = EventLog(begin=partial(use_device, runtime.device))
        self.runtime = runtime
        self.tensors = ModelTensors(runtime)
        self.loop = LoopState(self.tensors)
        self.gradients = Gradients(runtime, self.loop)
        self.rebalancer = Rebalancer(runtime, transport, self.events, self.loop)
        self.guard = self.rebalancer.guard
        self._stream = OpenStream()
        self.loop.hooks += [self._stream, self.gradients, self.guard, self.rebalancer]
        for layer in runtime.layers if config.overlap else ():
            layer.before = self.rebalancer.overlapped.before_layer
        if runtime.maps.replicas is not None:
            runtime.maps.replicas.replan(runtime.placement, self.gradients.arrives)
        self.shown: Any = None
        self._listeners: list[Callable[[], None]] = []
        self._process = os.getpid()
        self._export = export_with(self)
        self._phases = Phases(runtime, self.rebalancer, self.events, self.loop)
        self.closing = ExitStack()
        listeners, rebalancer = self.close_listeners, self.rebalancer.close
        for end in (runtime.groups.close_balancing, self.guard.end, listeners, rebalancer, self._phases.end):
            self.closing.callback(end)
        self.optimizer_hooks = hook_optimizers(self)

    def begin(self) -> None:
        """Begin to copy the weights of homes to replicas, and register a function that ends this balancer's threads at
        the exit of a process that has not called `close`. Collective, once every rank has a balancer."""
        self.rebalancer.refresh_replicas()
        atexit.register(_end_threads, weakref.ref(self))

    def __str__(self) -> str:
        """The model and the state of its balancing, as a table of 80 columns."""
        config, placement, events, steps = self.config, self.placement, self.events, self.rebalancer.step
        measured, dropped = events.of_type(LoadMeasured), len(events.of_type(RebalanceAborted))
        committed = [event for event in events if isinstance(event, RebalanceCommitted)]
        moved, pause = sum(event.moved_experts for event in committed), sum(event.pause_seconds for event in committed)
        whole = sum(not event.left_layers for event in committed)
        placed = counted(sum(event.placed_replicas for event in committed), "replica")
        cadence = f"a decision every {config.interval} steps" if config.interval else "decisions by rebalance() alone"
        rows = [
            ("experts", f"{placement.num_layers} layers of {placement.num_experts}"),
            ("ranks", f"{placement.num_ranks} share a layer, {self.topology.ranks_per_node} a node"),
            ("slots per rank", f"{placement.slots_per_rank}, {placement.replica_slots} of them for replicas"),
            ("policy", f"{config.policy}, {cadence}, gate {config.gate}"),
            ("placement", f"epoch {placement.epoch}, {(placement.copy_count - 1).sum()} replicas, at step {steps}"),
            ("measured last", measured[-1].brief() if measured else "nothing yet"),
            ("rebalances", f"{whole}, {counted(moved, 'expert')} moved, {placed} placed, {pause:.3g} s pause"),
            ("dropped", str(dropped)),
        ]
        return text_table(("balancer", ""), rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an attached model cannot be copied or pickled, its experts are spread over ranks: save it with "
            "eplb_runtime.checkpoint, copy its state with logical_state_dict, and keep averages of experts (EMA) as "
            "tensors of your own, given to balancer.register"
        )

    @property
    def closed(self) -> bool:
        """Return whether the balancer was closed, by `close` or at the end of the process."""
        return self.loop.closed

    @property
    def placement(self) -> Placement:
        """The current placement; its ``epoch`` counts commits. During an overlapped migration it waits for other ranks'
        commits of the running step: ask on every rank at the same place. A forward that runs on this thread is taken
        for one that broke off: layers that it has not reached migrate after the next step."""
        self.loop.end_broken_off()
        return self.rebalancer.placement()

    # -- ahead of training ---------------------------------------------------------------------------------------------

    def register(self, parameter: str, name: str, tensor: Tensor) -> None:
        """Register a tensor that moves with the experts of a parameter (an EMA copy, a mask, other state of each
        expert): migrations write it in place, bit for bit, and checkpoints save it; replicas do not get it. If the
        model has it, DistributedDataParallel is told to ignore it: wrap after this. Not collective; the same names on
        every rank, in one order. ``parameter``: a key of ``layer_of_parameter``. ``tensor``: ``[E/R, ...]``, rows in
        the parameter's current order; where ``fully_shard`` slices experts, a DTensor placed as it. RegistryError: no
        such parameter, ``name`` taken, other rows or device, requires_grad, expanded, freed, of inference_mode."""
        self.tensors.register(parameter, name, tensor)

    def register_all(self, name: str, tensors: Any, *, moves: bool = True) -> None:
        """`register` the tensor of each expert parameter in an average (EMA, SWA, Lookahead), a snapshot or masks of
        the whole model; tensors of other parameters are passed over. Call it before experts have moved. ``tensors``: a
        module with the model's names, a mapping by these names, or a list in the order of ``model.parameters()``.
        Migrations write its tensors, and a saved state dict's marks of the placement, in place. ``moves=False``:
        register none. In any case ``eplb-runtime verify`` passes over all tensors in ``tensors``.
        Raises RegistryError: an expert parameter has no tensor, or one of another shape; or as `register`."""
        self.tensors.register_all(name, tensors, moves)

    def adopt(self, optimizer: torch.optim.Optimizer, *, instead_of: torch.optim.Optimizer | None = None) -> None:
        """Hook an element-wise optimizer of the attached model's parameters, as ``attach`` does: gradients are reduced
        before it steps, and its state of experts moves with them. All optimizers step once in a training step.
        Parameters that it holds outside the model are taken to be the same on every rank. ``instead_of``: an optimizer
        to let go of, which may not step the model any more; a decision or migration in flight is dropped. Complete
        checks by the guard begin again with the first optimizer, and with ``instead_of``. Collective, between steps.
        Raises AttachError: it cannot be used (inference with replica slots has no place for gradients) or replaced;
        RuntimeError: a rank did not come; with ``instead_of``, between a backward pass and a step."""
        began = self.loop.has_optimizer
        if instead_of is not None:
            self.loop.require("adopt()")
        self.runtime.barrier("balancer.adopt()")
        self.optimizer_hooks.adopt(optimizer, instead_of)
        if not began or instead_of is not None:
            self.guard.begin()

    def logical_expert_ids(self, layer: int) -> list[int]:
        """Return the current logical expert of each row of this rank's expert parameters in a layer, for settings of
        single experts (a learning rate, a freeze). Experts move, so ask again after each step. Waits as `placement`."""
        rows_RH = self.placement.homes_over(len(self.runtime.job.row_ranks))[layer]
        return [int(expert) for expert in rows_RH[self.runtime.job.row_rank]]

    # -- a training step -----------------------------------------------------------------------------------------------

    def declare(self, load: ArrayLike | Tensor) -> None:
        """Declare the coming load in tokens of all L MoE layers and E experts: ``[L, E]``, ``[T, L, E]`` of T
        micro-batches, or whole numbers ``[N, L, K]``, K < E, the experts of N tokens (-1: padding); or a list of these,
        one or more micro-batches each. The next decision plans for it instead of a forecast, and only that decision.
        Ranks' declarations are added up, and only proportions matter. Not collective, but ranks that declare do so
        before the same step. Another call replaces what this rank has declared.
        Raises DeclaredLoadError (another shape, or no load), RuntimeError (static, closed, or after `plan_ahead`)."""
        if self.closed or self.config.policy == "static":
            why = "the balancer is closed" if self.closed else "policy='static' never moves experts"
            raise RuntimeError(f"declare() has no effect: {why}")
        if self.rebalancer.has_planned_ahead:
            raise RuntimeError("declare() after plan_ahead(), which has planned already: call declare() first")
        sizes = self.placement.num_layers, self.placement.num_experts
        self.rebalancer.declared = checked_declaration(load, *sizes)

    def plan_ahead(self) -> None:
        """Begin the decision that the next `rebalance()` acts on, on a thread, and do not wait for it. It takes the
        load that was declared and counted so far; counting starts again from zero. An open stream of weights is ended.
        Collective, between steps, with ``interval=None``; also while suspended, when nothing moves.
        Raises RuntimeError as `rebalance`; also if decisions are periodic or static, or one was begun already."""
        self._enter("plan_ahead()")
        if self.config.interval is not None or self.config.policy == "static":
            raise RuntimeError("plan_ahead() is for interval=None and a policy that moves experts")
        if self.rebalancer.has_planned_ahead:
            raise RuntimeError("plan_ahead() was called before: rebalance() acts on that decision first")
        self.runtime.barrier("plan_ahead()")
        if not self.loop.has_optimizer:
            self.runtime.counter.advance()
        self.rebalancer.plan_ahead()

    def rebalance(self) -> bool:
        """Decide now, on the load since the last decision, and migrate if it pays; a decision that was begun earlier is
        waited for and acted on instead. Returns whether the placement has changed. Training waits for the plan and the
        migration. An overlapped migration in flight, and an open stream of weights, are ended first. Events are
        emitted, and after a change replicas are refreshed. Periodic decisions go on. Collective, between steps.
        Raises RuntimeError: where `loop_state.CALLS` refuses it, inside ``quiesce``, or while ranks connect again."""
        self._enter("rebalance()")
        # Without a barrier, this rank's decision would mix with comparisons in the other ranks' steps.
        self.runtime.barrier("rebalance()")
        if not self.loop.has_optimizer:
            self.runtime.counter.advance()  # without an optimizer nothing else closes what was counted
        return self.rebalancer.rebalance_now()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of replicas back in backward passes inside, for all micro-batches but the last; without
        replica slots nothing changes. These gradients are summed in float32 and sent home by the first backward pass
        outside. Where ``fully_shard`` slices experts, `reduce_gradients` sends them home, inside or outside."""
        replicas = self.runtime.maps.replicas
        with nullcontext() if replicas is None else replicas.defer():
            yield

    def reduce_gradients(self) -> None:
        """Average gradients in place: those of experts over the ranks that hold the same experts, unless the framework
        does it; with ``dense_gradients="allreduce"`` the others, too. Hooked to run before the optimizer's step.
        Gradients of replicas are added to their homes' first, in float32 in the order of slots, with what ``no_sync``
        held back. Parameters that ``add_param_group`` has added are taken in. Collective. Call it to use gradients
        earlier (clipping by hand; for a GradScaler, see `eplb_runtime.GradScaler`): each contribution is reduced once,
        however often, and backward passes may go on. Inside the EP group layers divide gradients already."""
        self.optimizer_hooks.register_added()
        self.gradients.reduce()

    def clip_grad_norm_(
        self, max_norm: float, parameters: Tensor | Iterable[Tensor] | None = None, norm_type: float = 2.0
    ) -> Tensor:
        """Reduce gradients, and scale them in place so that their norm over the whole model, each logical expert
        counted once, is at most ``max_norm``. Returns the norm before, a float64 scalar, equal on every rank.
        Collective. ``parameters``: clip these alone, by their own norm over all experts of those that have experts (a
        layer, say); the same on every rank. ``norm_type``: above 0, or ``math.inf``.
        Raises ValueError: another ``norm_type``, a tensor that is no parameter of the model, or some of a layer's
        experts alone; RuntimeError: the framework's own optimizer clips."""
        if self.tensors.host_steps:
            raise RuntimeError(
                "clip_grad_norm_: the framework's own optimizer clips the gradients of this model: set its clip option "
                "instead (the norm counts each expert once, on whatever rank the expert is)"
            )
        with phase("clip"):
            self.optimizer_hooks.register_added()
            return self.gradients.clip(max_norm, parameters, norm_type)

    def step(self) -> None:
        """Close a training step, before the next forward, on every rank: count it and, until `close`, check, decide and
        move experts, and refresh replicas. ``attach`` hooks it to the optimizer; call it yourself only without one."""
        if not self.closed:
            return self.loop.end_step()
        self.loop.pass_over_step()
        self.gradients.on_step_end()
        self.runtime.counter.advance()  # tags of forwards tell steps, and other ranks may close later

    def at_once(self, first: Callable[[], T], second: Callable[[], U]) -> tuple[T, U]:
        """Run two functions with a batch each at once, the second on a thread, and return both results: one computes
        while the other's tokens travel. Each result has the same bits as by itself; random numbers come from one
        generator, in any order. The first call opens a second channel. Collective, as many forwards in each on every
        rank. In training call ``backward()`` afterwards, of one result after the other.
        Raises RuntimeError: a backward pass inside, two at once already, or a job that cannot have two."""
        self.loop.require("at_once()")
        return self.open_second_channel().both(first, second, forwards_only=True)

    # -- phases --------------------------------------------------------------------------------------------------------

    @contextmanager
    def quiesce(self) -> Iterator[None]:
        """Hold migrations back inside (weight reload, asynchronous save); enter and leave at the same step on all
        ranks. Layers that an overlapped migration has not committed wait until the end, as does a decision that is due.
        RuntimeError: a call of `rebalance` inside."""
        self.rebalancer.overlapped.settle()
        self.rebalancer.quiesced += 1
        try:
            yield
        finally:
            self.rebalancer.quiesced -= 1

    def suspend(self) -> int:
        """Begin a rollout: free what the balancer keeps outside the model (staging memory, replicas), and decide and
        move nothing until `resume`; `loop_state.CALLS` lists what is refused till then. Returns the bytes freed here,
        and emits `Suspended`; suspended already: ranks meet, it returns 0. A migration in flight is completed first
        (dropped inside ``quiesce`` or while ranks connect again), an open stream of weights ended. With replica slots
        parameters get their own memory: call it before weights are freed; else it may come after. Collective, between
        steps. RuntimeError: a rank did not come, or lacks weights with replica slots, or `CALLS` says so."""
        self._enter("suspend()")
        return self._phases.suspend()

    def resume(self) -> None:
        """End a rollout, after weights, gradients and optimizer state are loaded: take the memory of replicas again,
        refresh them, and emit `SuspensionEnded`. The rollout's seconds do not count as a step's. Collective. Without
        `suspend` it does nothing; after a `close` with freed weights it gives layers of experts their memory back.
        Raises RuntimeError on all ranks: one did not come, or lacks memory for weights or replicas; call it again."""
        self.loop.require("resume()")
        self._phases.resume()

    def weights_changed(self) -> None:
        """Refresh replicas after weights of experts were written in place between steps (clamped, swapped for an
        evaluation, loaded by torch): else the next forward is refused. `eplb_runtime.checkpoint` calls it itself. An
        open stream of weights is ended; without replica slots, or after `close`, nothing else happens. Collective, also
        for a rank that wrote nothing. Raises RuntimeError: a rank did not come."""
        self._stream.end("weights_changed()")
        if self.runtime.maps.replicas is None or self.closed:
            return
        self.runtime.barrier("weights_changed()")
        self.rebalancer.refresh_replicas()

    # -- weights and state that leave or come --------------------------------------------------------------------------

    @torch.no_grad()
    def gather_experts(self, layer: int, rows: Tensor, *, device: torch.device | str | None = None) -> Tensor:
        """Return all experts of a layer in logical order, ``[E, ...]``, equal on every rank, on ``device`` (None: that
        of ``rows``), from every rank's home rows ``[E/R, ...]`` of a registered parameter or its optimizer state, whole
        or sliced. Collective over all EP groups. Experts come one after another: it takes the memory of two or three
        and the result. Raises RuntimeError: inside a schedule of stages, or rows without memory."""
        self.loop.require("gather_experts()")
        if not has_memory(rows):
            raise RuntimeError("gather_experts(): the experts' memory is freed; load the weights first")
        homes_LRH = self.placement.homes_over(len(self.runtime.job.row_ranks))
        return in_logical_order(rows, homes_LRH[layer], self.runtime.groups, device)

    def named_logical_tensors(
        self,
        *,
        bucket_bytes: int = 1 << 29,
        dtype: torch.dtype | None = None,
        rank: int | None = None,
        timeout_seconds: float | None = None,
    ) -> TensorStream:
        """Return a stream of the model's weights in logical order: an iterator over ``(name, tensor)``, whole copies
        under the framework's names; its ``experts`` maps names to (MoE layer, expert or None). Tensors travel in
        buckets of ``bucket_bytes``, of which a rank holds one or two. Collective, between steps: every rank runs
        through the stream; a rank that stops, or moves or steps experts, ends it. A migration in flight, and another
        stream, are ended. ``dtype``: of floating point tensors. ``rank``: it alone receives. ``timeout_seconds``: that
        ranks wait for each other (None: 120 or the config's, the longer).
        Raises ExportError (a rank stopped or failed, weights have no memory), RuntimeError (as `rebalance`)."""
        stream = self._export.stream(
            bucket_bytes, dtype, rank, self.begin_export("named_logical_tensors()", timeout_seconds)
        )
        self._stream.stream = weakref.ref(stream)
        return stream

    def verify_export(
        self,
        tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | Callable[[], object],
        *,
        dtype: torch.dtype | None = None,
        timeout_seconds: float | None = None,
    ) -> str:
        """Compare exported weights with the model's, by a checksum for each tensor. Returns a line that says how many
        are equal. Collective, between steps; a migration in flight is ended. ``tensors``: pairs (name, tensor) under
        the names of `named_logical_tensors`, a mapping, or a function that gives either or begins a stream; together
        ranks give every expert. ``dtype``: of the export. ``timeout_seconds``: for the slowest rank.
        Raises ExportError, on all ranks: which differ or are missing; or another name or shape."""
        return self._export.verify(tensors, dtype, self.begin_export("verify_export()", timeout_seconds))

    @contextmanager
    def logical_order(self, *, timeout_seconds: float | None = None) -> Iterator[None]:
        """Move every expert to its initial rank and row, and back at the end, also if the body raises: inside, a walk
        over the modules of a rank that takes expert ``i`` for ``ep_rank * E/R + i`` is right. Replica slots are empty
        inside, and nothing else migrates. Collective, in and out, between steps; two migrations. ``timeout_seconds``:
        that ranks wait for each other, in and out (None: as for `named_logical_tensors`, which moves nothing).
        Raises RuntimeError: a rank did not come, a migration was dropped, or as `rebalance`; after an error in the body
        the way back only logs these."""
        seconds = self.begin_export("logical_order()", timeout_seconds)
        before = self.placement
        sizes = before.num_layers, before.num_experts, before.num_ranks, before.replica_slots
        with self.quiesce():
            self._move_all(Placement.initial(*sizes), "experts are in logical order")
            self.loop.in_logical_order, raised = True, True
            try:
                yield
                raised = False
            finally:
                self.loop.in_logical_order = False
                try:
                    self.runtime.barrier("logical_order()", seconds)
                    self._move_all(before, "experts are back from logical order")
                except RuntimeError as error:
                    if not raised:  # what the body raised must not be hidden
                        raise
                    logger.error("%s; experts are in placement epoch %d", error, self.placement.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return step, placement and measured load, JSON-able and equal on all ranks, for `load_state_dict` in a later
        run. Waits for a decision in flight. Collective; after `close` it is not, and the load is left out."""
        state = {"step": self.rebalancer.step, "placement": self.placement.to_json()}
        if self.closed:
            return state
        # Without a barrier, this rank's sum would mix with comparisons in the other ranks' steps.
        self.runtime.barrier("balancer.state_dict()")
        self.rebalancer.wait_for_decision()

        def summed(load: Tensor) -> NDArray[np.int64]:
            total: NDArray[np.int64] = self.rebalancer.run(lambda group, _: aggregate(HostCopy(load), group))[0].numpy()
            return total

        return {**state, "load": saved_load(self.rebalancer.decisions.history, self.runtime.counter, summed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Migrate to the placement of a `state_dict`, and go on from its step and load. A decision or migration in
        flight is dropped. A state of another EP size or other replica slots moves no experts until the next decision.
        Load that does not fit is left out, with a log line. Collective, between steps.
        Raises PlacementError: it is for another model; RuntimeError: ranks have different states, the migration was
        dropped (the placement stays); or as `rebalance`."""
        self._enter("load_state_dict()")
        restore(state, self.runtime, self.rebalancer)

    def close(self) -> None:
        """Stop balancing: drop what is in flight, emit `BalancingEnded`, end threads and listeners, and give back the
        groups that only balancing needs. Collective. The model keeps its current homes, spread over ranks, and
        gradients are still reduced; replicas are not used any more. It does nothing if it was called before, or in a
        process that was forked from a rank.
        Raises RuntimeError, with replicas: a rank did not come. The balancer stays open then, as on the other ranks."""
        if self.closed or self.in_a_child:
            return
        if self.runtime.maps.replicas is not None and sys.exc_info()[0] is None:
            self.runtime.barrier("close()")
        self._stream.end("close()")
        self.loop.closed = True
        self.closing.close()

    # -- for hosts and other rooms, and what the calls above share -----------------------------------------------------

    def close_with(self, close: Callable[[], None]) -> None:
        """Call a function, without arguments, once the last event was heard, at `close` or the end of the process."""
        self._listeners.append(close)

    def close_listeners(self) -> None:
        for close in (self.events.close, *self._listeners):
            try:
                close()
            except Exception:
                logger.exception("an event listener failed as it was closed; the job goes on")

    def show_on(self, shown: Any) -> None:
        """Keep an `observe.start.Observers` as ``shown``; give it all events from now on, and close it at the end."""
        self.shown = shown
        shown.listen_to(self.events)
        self.close_with(shown.close)

    def place(self, target: Placement) -> None:
        """Migrate to a placement at the end of a step: at once, or in the next steps with ``overlap``. While a
        migration is in flight none is begun. Replicas are refreshed. Collective."""
        self.rebalancer.place(target)

    def begin_export(self, what: str, timeout_seconds: float | None) -> float:
        """Wait for all ranks to come to a call, and return for how many seconds: ``timeout_seconds``, or for None 120
        or the config's, the longer. A migration in flight, and an open stream of weights, are ended. Collective.
        Raises RuntimeError: the call is refused in the loop's state, or a rank did not come."""
        self._enter(what)
        seconds = max(EXPORT_SECONDS, self.config.timeout_seconds) if timeout_seconds is None else timeout_seconds
        self.runtime.barrier(what, seconds)
        if self.rebalancer.drain():
            self.loop.on_moved()
        return seconds

    @property
    def in_a_child(self) -> bool:
        """Return whether this process was forked from the rank: it has its connections and none of its threads."""
        return os.getpid() != self._process

    def open_second_channel(self) -> MicroBatchChannels:
        """Return this rank's channels, after opening a second one if there is none, so that two batches can exchange
        tokens at once (`moe.dispatch.channels`). RuntimeError: the job cannot have two. Collective, between steps."""
        if self.runtime.host_dispatches:
            raise RuntimeError("two batches at once need eplb's dispatch, not the framework's: run one after the other")
        if self.tensors.sliced and self.runtime.maps.replicas is not None:
            raise RuntimeError(
                "whole copies of experts that fully_shard slices are gathered for one layer at a time, and two batches "
                "at once are in two: set replica_slots=0, or run one batch after the other"
            )
        runtime, channels = self.runtime, self.runtime.channels
        if channels.second is None:
            if why := choosing.micro_batch_overlap_problem(self.config, runtime.device, self.tensors.is_sharded):
                raise RuntimeError(f"two batches at once on a device: {why}; or run one batch after the other")
            second, replicas = MicroBatchChannel(*runtime.groups.second_channel), runtime.maps.replicas
            # both streams wait for what the caller's has waited for
            channels.open(second, *(() if replicas is None or runtime.device.type == "cpu" else (replicas.wait_all,)))
        return channels

    def _enter(self, what: str) -> None:
        """Refuse a call where it is wrong (`loop_state`), else end a stream of weights that is open."""
        self.loop.require(what)
        self._stream.end(what)

    def _move_all(self, target: Placement, what: str) -> None:
        """Migrate while training waits; nothing once closed. RuntimeError: the migration was dropped."""
        if self.closed or np.array_equal(self.placement.physical_to_logical, target.physical_to_logical):
            return
        progress = self.rebalancer.migrate_to(target)
        self._stream.end("the end of logical_order()")
        if progress.failed_phase is not None:
            raise RuntimeError(f"experts did not move: {progress.cause}; wanted: {what}")
        logger.info("%s: %d experts moved", what, progress.moved_experts)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for an attached model; use it in the same way. A step is skipped on every rank or on
    none: each looks at the gradients of its own experts, so an overflow may show on one rank alone. Gradients that
    replicas hold back are reduced before they are unscaled. ``options``: torch's, as ``init_scale`` and ``enabled``.
    """

    def __init__(self, balancer: Balancer, **options: Any) -> None:
        super().__init__(balancer.runtime.device.type, **options)
        self._balancer = balancer

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce gradients over ranks, divide them by the scale in place, and set torch's flag of infinite or NaN
        gradients on every rank if any rank has some. Collective. A scaler that is not enabled does nothing."""
        if not self._enabled:
            return
        self._balancer.reduce_gradients()
        super().unscale_(optimizer)
        # As torch's ShardedGradScaler does it for FSDP, whose flag has a shape that fused optimizers cannot take.
        found: dict[torch.device, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        device = self._balancer.runtime.device
        anywhere = torch.stack([torch.zeros((), device=device), *(flag.to(device) for flag in found.values())]).amax()
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self._balancer.runtime.groups.everyone)
        for key in found or [device]:
            found[key] = anywhere.to(key)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale gradients if that was not done, and step the optimizer unless a rank has infinite or NaN gradients.
        Returns what the optimizer's step returns, None if it is skipped, which the balancer notes. Fused optimizers are
        always called: they skip by the flag that the ranks agreed on. If one of several overflows, the others step."""
        if self._enabled and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        with self._balancer.optimizer_hooks.around_step(optimizer):
            return super().step(optimizer, *args, **kwargs)
