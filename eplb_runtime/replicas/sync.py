"""Keep copies and homes together: weights from home to copies, gradients from copies to home, along trees (`plan.py`).

All layers' weights are posted together after the optimizer's step. A layer's gradients leave when its backward is
through and are added when the next layer's is: one exchange at a time is in flight. Where FSDP slices experts, slices
travel, and gradients leave after the backward pass, because FSDP may write those of the homes until its end.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Variable

from ..moe.dispatch.channels import MicroBatchChannels
from ..moe.experts.slices import local, version
from ..moe.routing.slots import BatchSplitter, SlotTable
from ..placement import EMPTY, Placement
from ..utils.spans import phase
from .bank import ReplicaBank, accumulation_dtype, are_accumulated, slice_of_row
from .plan import Child, PointToPoint, ReplicaPlan, ReplicaPlanner, RowStage, Waiting


class ReplicaSync:
    """Weights and gradients of one rank's banks. Gradients are divided by ``gradient_divisor``, as the homes' are, and
    take turns with other exchanges on ``channels``."""

    def __init__(
        self,
        banks: Mapping[int, ReplicaBank],
        transport: PointToPoint,
        rank: int,
        gradient_divisor: float,
        ranks_per_node: int,
        num_shards: int,
        channels: MicroBatchChannels,
    ) -> None:
        self._banks, self._transport, self._channels = banks, transport, channels
        self._divisor, self._num_shards = gradient_divisor, num_shards
        self._planner = ReplicaPlanner(transport, rank, num_shards, ranks_per_node, self._arrival_memory)
        self._plans = dict.fromkeys(banks, ReplicaPlan())
        self._addresses = {layer: _addresses(bank.parameters) for layer, bank in banks.items()}
        self._versions: dict[int, list[tuple[int, ...]]] = {}
        self._pending: dict[int, tuple[Sequence[Waiting], Sequence[RowStage]]] = {}  # posted, and to hand on then
        self._one_waits = {layer: RLock() for layer in banks}  # a signal's handler may close the balancer inside
        self._sent: tuple[int, ReplicaPlan, Sequence[Waiting]] | None = None
        self._held_gradients: dict[int, ReplicaPlan] = {}
        self._deferring = self._handed_over = False
        self._arrivals: dict[tuple[int, int, torch.Size, torch.dtype], Tensor] = {}
        self._adds: Callable[[Tensor], None] = lambda parameter: None
        self.is_freed = False

    def replan(self, placement: Placement, adds: Callable[[Tensor], None] | None = None) -> None:
        """Replace the plans of all layers by those of a placement; `refresh` then sends weights. ``adds``: called from
        now on with each home parameter before gradients of replicas are added to its ``.grad``; None: as before."""
        self._adds = adds or self._adds
        self.prepare(placement, range(placement.num_layers))()

    def prepare(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Plan these layers under a placement, with all memory for it, on any thread. Return a function that puts these
        plans in force. Before homes are written, copies on their way must have arrived (`wait`)."""
        home_rows, home_LE, plans = placement.home_rows(self._num_shards), placement.require_homes(), {}
        for layer in [layer for layer in layers if layer in self._banks]:
            replicas_RK = placement.replicas_LRK[layer]
            home_RK = np.where(replicas_RK == EMPTY, EMPTY, home_LE[layer][replicas_RK])
            plans[layer] = self._planner.plan(layer, self._banks[layer], home_RK, home_rows)
        return lambda: self._plans.update(plans)

    def free(self) -> int:
        """Free the memory of replicas and their gradients; return the freed bytes. Waits for transfers under way first,
        and drops all plans and gradients that are held back. Sets ``is_freed``: until `allocate` a forward raises."""
        self.wait_all()
        self.abandon()
        self.is_freed = True
        self._plans = dict.fromkeys(self._banks, ReplicaPlan())  # they lead to live rows
        self._held_gradients.clear()
        nbytes = sum(rows.nbytes for rows in self._arrivals.values())
        self._arrivals.clear()
        return nbytes + sum(bank.free() for bank in self._banks.values())

    def allocate(self, placement: Placement) -> None:
        """Allocate this memory again, for homes wherever the job has loaded them, `replan` a placement, and clear
        ``is_freed``. Replicas are zeros until `refresh`."""
        for bank in self._banks.values():
            bank.allocate()
        self._addresses = {layer: _addresses(bank.parameters) for layer, bank in self._banks.items()}
        self.replan(placement)
        self.is_freed = False

    def check_homes(self, layer: int) -> None:
        """Raise RuntimeError if replicas have no memory now (`free`), or the layer's home parameters lie in other
        memory than at attach, or were written since the last `refresh` while the layer has replicas."""
        if self.is_freed:
            raise RuntimeError(
                "a forward while the balancer is suspended, and copies of experts have no memory: call "
                "balancer.resume() first, on every rank"
            )
        if _addresses(self._banks[layer].parameters) != self._addresses[layer]:
            raise RuntimeError(
                f"the expert weights of MoE layer {layer} lie in other memory than at attach (model.to, "
                "model.bfloat16, .data = ..., vector_to_parameters), but replicas read the old memory: move weights "
                "before attach, or write them in place and call balancer.weights_changed()"
            )
        if self.has_copies(layer) and self._versions.get(layer) != self._versions_now(layer):
            raise RuntimeError(
                f"the expert weights of MoE layer {layer} were written since the last optimizer step, and copies hold "
                "what they were: call balancer.weights_changed() after writing, on every rank"
            )

    def has_copies(self, layer: int) -> bool:
        """Return whether any rank holds a replica of an expert of this layer."""
        return bool(self._plans[layer].weights)

    # -- weights -------------------------------------------------------------------------------------------------

    def refresh(self, layers: Collection[int] | None = None) -> None:
        """Post the homes' weights of these layers (None: all) to their replicas; `wait` ends it. Waits for a layer's
        earlier refresh first. Records the homes' versions for `check_homes`. On every rank; nothing while freed."""
        chosen = [] if self.is_freed else [layer for layer in self._banks if layers is None or layer in layers]
        for layer in chosen:
            self.wait(layer)
            self._versions[layer] = self._versions_now(layer)
        plans = {layer: self._plans[layer].weights for layer in chosen if self.has_copies(layer)}
        with phase("refresh copies"):
            posted = self._transport.post([first for first, *_ in plans.values()])
        self._pending.update((layer, (works, plans[layer][1:])) for layer, works in zip(plans, posted, strict=True))

    def wait(self, layer: int) -> None:
        """Wait until this layer's replicas are fresh and its homes may be written; nothing without a refresh under way.
        On every rank: replicas that are parents send weights on to others here. Two threads may wait at once."""
        if layer not in self._pending:
            return
        with self._one_waits[layer], phase("wait for copies", "", layer):
            for work in self._pending.get(layer, ((), ()))[0]:
                work.wait()
            works, later = self._pending.get(layer, ((), ()))  # a signal's handler may have handed on
            self._pending[layer] = works, ()  # and is handed on once
            for stage in later:
                for work in self._transport.post([stage])[0]:
                    work.wait()
            self._pending.pop(layer, None)

    def wait_all(self) -> None:
        for layer in self._banks:
            self.wait(layer)

    def _versions_now(self, layer: int) -> list[tuple[int, ...]]:
        return [version(parameter) for parameter in self._banks[layer].parameters]

    # -- gradients -----------------------------------------------------------------------------------------------

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Hold gradients of replicas back inside, in all backward passes; `reduce_gradients` sends them later."""
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    def collect(self, layer: int, gradients: Sequence[Tensor | None], edges: Sequence[tuple[Any, int]]) -> None:
        """Post a layer's gradients of replicas to their homes, or hold them back for `reduce_gradients` (inside
        `defer`, or of slices); nothing if `takes` is False. First waits for gradients in flight and adds them to the
        homes' ``.grad``; a callback at the end of the backward pass does so for these. On every rank."""
        if not self.takes(layer, edges):
            return
        self._finish()
        hold = self._banks[layer].is_sliced or self._deferring
        backward = torch._C._current_graph_task_id()
        with self._channels.adding():
            self._banks[layer].collect(gradients, hold, backward)
        # Experts move only without gradients: what was held back under an earlier plan has been discarded. Or close()
        # has ended copies, and it goes home by that plan.
        if self.has_copies(layer):
            self._held_gradients[layer] = self._plans[layer]
        if not hold:
            self._send(layer)
        if self._handed_over:
            return
        # The engine calls them when this backward pass is over: then every gradient is whole.
        Variable._execution_engine.queue_callback(self._banks[layer].note if hold else self._finish)  # type: ignore[attr-defined]

    def takes(self, layer: int, edges: Sequence[tuple[Any, int]]) -> bool:
        """Return whether `expects_gradients`, and the pass adds to ``.grad`` or is in `manual_accumulation`."""
        return self.expects_gradients(layer) and (self._handed_over or are_accumulated(edges))

    def expects_gradients(self, layer: int) -> bool:
        """Return whether the layer has replicas, or holds gradients of some back that `Balancer.close` has ended."""
        return self.has_copies(layer) or self._banks[layer].unsent

    @contextmanager
    def manual_accumulation(self) -> Iterator[None]:
        """Collect gradients of replicas inside also from ``torch.autograd.grad`` of a caller that adds to ``.grad``
        itself (the weights' half of a split backward). At the end add those in flight to the homes' ``.grad``."""
        self._handed_over = True
        try:
            yield
        finally:
            self._handed_over = False
        self._finish()
        for bank in self._banks.values():
            if bank.unsent:
                bank.note()

    def abandon(self) -> None:
        """Wait for gradients of replicas in flight, of a backward pass that never ended, and drop them."""
        sent, self._sent = self._sent, None
        for work in sent[2] if sent is not None else ():
            work.wait()

    def reduce_gradients(self, layers: Collection[int] | None = None) -> None:
        """Send held-back gradients of replicas of these layers (None: all) home and add them, and those in flight, to
        the homes' ``.grad``. Collective over the ranks concerned."""
        for layer in reversed(list(self._banks)):
            if self._banks[layer].unsent and (layers is None or layer in layers):
                self._finish()
                self._banks[layer].release()
                self._send(layer)
        self._finish()

    def _send(self, layer: int) -> None:
        # Since what is held back was collected, copies may be gone: close() between a backward pass and the step.
        plan = self._held_gradients.pop(layer)
        self._sent = layer, plan, self._post(plan.gradients[0]) if plan.gradients else []

    def _post(self, gradients: RowStage) -> Sequence[Waiting]:
        """Post gradients, in the order of all that backward passes launch."""
        with self._channels.launching():
            return self._transport.post([gradients])[0]

    @torch.compiler.disable
    @torch.no_grad()
    def _finish(self) -> None:
        """Add what has been on its way to the homes' gradients; the rows that it left from are free then."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        layer, plan, works = sent
        with phase("gradients of copies", "B", layer):
            for number, stage in enumerate(plan.gradients):
                for work in self._post(stage) if number else works:
                    work.wait()
                for into, arrived in () if number else plan.additions:
                    into.add_(arrived)
            with self._channels.adding():
                self._add_to_homes(plan.at_homes, self._banks[layer])

    def _add_to_homes(self, children: Sequence[Child], bank: ReplicaBank) -> None:
        """Sum in float32, the home's own first, then what came from each copy that hangs on it, in the order of their
        slots; round once. Slices of copies are sums over EDP already, as FSDP's of the homes are."""
        for home_row in sorted({child.home_row for child in children}):
            for index, parameter in enumerate(bank.trained()):
                if parameter.grad is None:
                    if not parameter.requires_grad or bank.was_cleared(index):
                        continue  # frozen, or no pass has come since: None as where no replica is
                    parameter.grad = torch.zeros_like(parameter)
                self._adds(parameter)
                gradient = local(parameter.grad)
                total = gradient[home_row].to(accumulation_dtype(parameter), copy=True)
                for child in children:
                    if child.home_row == home_row:
                        part = slice_of_row(total.unsqueeze(0), self._num_shards, child.shard)[0]
                        part += child.arrivals[index] / self._divisor
                gradient[home_row] = total.to(gradient.dtype)

    def _arrival_memory(self, index: int, position: int, parameter: Tensor) -> Tensor:
        """Memory for one copy's gradient of one tensor, kept from layer to layer and step to step."""
        shape, dtype = slice_of_row(local(parameter), self._num_shards).shape[1:], accumulation_dtype(parameter)
        key = index, position, shape, dtype
        if key not in self._arrivals:
            self._arrivals[key] = torch.empty(shape, dtype=dtype, device=local(parameter).device)
        return self._arrivals[key]


def _addresses(parameters: Sequence[Tensor]) -> list[int]:
    return [local(parameter).data_ptr() for parameter in parameters]


@dataclass(frozen=True)
class Maps:
    """Everything that follows a placement, in place, at a commit; no splitter and replicas without replica slots."""

    table: SlotTable
    splitter: BatchSplitter | None
    replicas: ReplicaSync | None

    def prepare(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Prepare slot table, splitter and replicas, all memory included, for a placement that differs in these layers.
        Return a function that makes them follow the placement."""
        maps = (one for one in (self.table, self.splitter, self.replicas) if one is not None)
        ready = [one.prepare(placement, layers) for one in maps]

        def take_over() -> None:
            for take_one_over in ready:
                take_one_over()

        return take_over
