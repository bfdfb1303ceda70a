"""One expert-parallel MoE layer: count -> slots -> plan -> dispatch -> compute -> combine, for experts of any
framework; or count and slots alone, where the framework does the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from ..distributed.step_tag import ForwardTag
from ..load.counter import LoadCounter, in_recompute
from ..load.expert_clock import ExpertClock
from ..utils.spans import phase
from .dispatch.base import Dispatcher
from .dispatch.channels import MicroBatchChannels
from .dispatch.count_exchange import CountExchange
from .dispatch.recompute import RecomputeCache
from .experts.compute import LocalExperts
from .routing.lookup import SlotTable
from .routing.splitter import BatchSplitter, Counted, RowCounts


def _unseen_by_selective_checkpointing() -> contextlib.AbstractContextManager[Any]:
    """Selective activation checkpointing matches saved operators by call index. A repeated forward here makes fewer
    calls than the first one, so its modes are disabled inside, and all of the layer is repeated."""
    dispatch, checkpoint = torch.utils._python_dispatch, torch.utils.checkpoint
    if not dispatch._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    kinds = checkpoint._CachedTorchDispatchMode, checkpoint._CachingTorchDispatchMode
    if not any(isinstance(mode, kinds) for mode in dispatch._get_current_dispatch_mode_stack()):
        return contextlib.nullcontext()
    without: contextlib.AbstractContextManager[Any] = dispatch._disable_current_modes()
    return without


@dataclass(frozen=True)
class _Counted:
    """What counting found of a batch: its slots, or its counts of each expert, or neither."""

    slots_TK: Tensor | None = None
    counts: Counted | None = None


@dataclass(frozen=True)
class LayerContext:
    """What the layers of a model share. Without a splitter ``table`` says where an expert is; without ``count_and_map``
    (`moe.routing.kernels`) ``counter`` and ``table`` do it."""

    counter: LoadCounter
    table: SlotTable
    splitter: BatchSplitter | None
    dispatcher: Dispatcher
    exchange_counts: CountExchange
    forward_tag: ForwardTag
    channels: MicroBatchChannels
    count_and_map: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None


class ExpertParallelLayer:
    """The way of a batch through one MoE layer.

    Args:
        index: the layer's index among the model's MoE layers.
        module: the host's experts module; its ``training`` flag decides what counts as load.
        real_tokens: bool ``[T]`` mask of the running batch, or None; called once a forward.

    Attributes:
        before: called with the layer's index when a forward begins, before anything is routed; not when one is
            repeated.
        calls: forwards so far that gradients can follow.
        uncounted: those of them whose tokens did not count, because the model was in evaluation mode.
        counts_in_evaluation: whether load counts outside training; inference has nothing else.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        experts: LocalExperts,
        context: LayerContext,
        real_tokens: Callable[[int], Tensor | None],
    ) -> None:
        self.index = index
        self._module = module
        self._experts = experts
        self._context = context
        self._real_tokens = real_tokens
        self._counter, self._table, self._dispatcher = context.counter, context.table, context.dispatcher
        self._in_flight = RecomputeCache(
            lambda: context.channels.busy,
            lambda: int(context.table.changes_L[index]),
            context.channels.before_backward,
        )
        self._one_at_a_time = Lock()  # of two batches at once: hosts' code may change a module while it computes
        self.counts_in_evaluation = True
        self.calls = self.uncounted = 0
        self.before: Callable[[int], None] = lambda index: None

    @torch.compiler.disable
    def __call__(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """``[T, D]`` -> ``[T, D]``; ids are logical."""
        with _unseen_by_selective_checkpointing():
            return self._forward(hidden_TD, topk_ids_TK, topk_weights_TK)

    @torch.compiler.disable
    def see(self, topk_ids_TK: Tensor, columns: int, top_k: int) -> None:
        """Begin a forward of the module's own way, which computes all experts here."""
        if not in_recompute():
            self._begin(torch.empty(len(topk_ids_TK), columns, device="meta"), topk_ids_TK)

    def _forward(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        epoch, repeated, training = self._table.epoch, in_recompute(), self._module.training
        tag, top_k = self._context.forward_tag, topk_ids_TK.shape[-1]
        tag.enter(self.index, self._counter.closed_steps, training, epoch, top_k)
        self._dispatcher.check(hidden_TD, topk_weights_TK)
        if repeated:  # nothing counts again, and metadata that is known is used again
            metadata, counted = self._in_flight.repeated(topk_ids_TK), _Counted()
        else:
            metadata, counted = None, self._begin(hidden_TD, topk_ids_TK)
        with phase("route", "F", self.index, epoch):
            slots_TK, row_counts = counted.slots_TK, None
            if metadata is None and slots_TK is None:
                slots_TK, row_counts = self._slots(topk_ids_TK, counted.counts)
        clock = self._dispatcher.expert_clock
        begin = clock.mark() if clock.on and training else None
        with phase("dispatch", "F", self.index, epoch):
            if metadata is None:
                assert slots_TK is not None
                metadata = self._dispatcher.plan(slots_TK, row_counts)
            dispatched = self._dispatcher.dispatch(hidden_TD, topk_weights_TK, metadata)
        with phase("compute", "F", self.index, epoch), self._one_at_a_time:
            out_MD = self._experts(dispatched.rows_MD, dispatched.counts_S, dispatched.weights_M)
        with phase("combine", "F", self.index, epoch):
            combined_TD = self._dispatcher.combine(out_MD, dispatched)
        if begin is not None:
            clock.forward_ends(begin)
        if repeated:
            return self._in_flight.track_recompute(combined_TD)
        return self._in_flight.track_backward(combined_TD, topk_ids_TK, dispatched.metadata, training)

    def _begin(self, hidden_TD: Tensor, topk_ids_TK: Tensor) -> _Counted:
        """A forward that repeats none: count its load."""
        self._table.require_known(self.index, topk_ids_TK)
        self.before(self.index)
        self._context.forward_tag.set_placement(int(self._table.changes_L[self.index]))
        counted = _Counted()
        with self._one_at_a_time:
            self.calls += torch.is_grad_enabled()
            if self._module.training or self.counts_in_evaluation:
                with phase("count", "F", self.index, self._table.epoch), self._context.channels.shared("counts"):
                    counted = self._count(topk_ids_TK, self._real_tokens(hidden_TD.shape[0]))
            elif hidden_TD.shape[0]:
                self.uncounted += torch.is_grad_enabled()
            # A vector travels in dispatch and in combine, and in training back again in both.
            vectors = 4 if torch.is_grad_enabled() else 2
            self._counter.token_bytes = vectors * hidden_TD.shape[1] * hidden_TD.element_size()
        self._in_flight.begin(self._counter.closed_steps)
        return counted

    @property
    def _splitter(self) -> BatchSplitter | None:
        """Splits this layer's batches; None: its experts have no replicas now."""
        splitter = self._context.splitter
        return splitter if splitter is not None and splitter.splits(self.index) else None

    def _count(self, topk_ids_TK: Tensor, real_T: Tensor | None) -> _Counted:
        splitter, counts_E = self._splitter, self._counter.counts[self.index]
        if splitter is not None and real_T is None:
            counts = splitter.counts(topk_ids_TK)
            counts_E.add_(counts[0])
            return _Counted(counts=counts)
        if splitter is not None or self._context.count_and_map is None:
            self._counter.count(self.index, topk_ids_TK, real_T)
            return _Counted()
        home_E = self._table.home_of_experts(self.index)
        return _Counted(self._context.count_and_map(topk_ids_TK, home_E, counts_E, real_T))

    def _slots(self, topk_ids_TK: Tensor, counts: Counted | None) -> tuple[Tensor, RowCounts | None]:
        """The slot of each choice, and how many rows go where if the split was made on the host."""
        splitter, exchange_counts = self._splitter, self._context.exchange_counts
        if splitter is None:
            return self._table.slots(self.index, topk_ids_TK), None
        counts_E, begins = counts or splitter.counts(topk_ids_TK)
        return splitter.route(self.index, topk_ids_TK, exchange_counts(counts_E), begins)


class HostDispatchedLayer:
    """One MoE layer whose host carries and computes tokens itself, each to the expert of its column. The host believes
    that slot p holds expert p: columns change places, or ids are renamed, and nothing else; there are no replicas. The
    host marks expert work by ``expert_clock``; other arguments as of `ExpertParallelLayer`."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        *,
        counter: LoadCounter,
        table: SlotTable,
        forward_tag: ForwardTag,
        expert_clock: ExpertClock,
    ) -> None:
        self.index = index
        self._module = module
        self._counter = counter
        self._table = table
        self._forward_tag = forward_tag
        self.expert_clock = expert_clock
        self._followed = -1  # changes of the placement that a CUDA graph has been seen to follow
        self.counts_in_evaluation = True
        self.calls = self.uncounted = 0
        self.before: Callable[[int], None] = lambda index: None

    @property
    def logical_of_slots(self) -> Tensor:
        """int64 ``[E]``: the logical expert in each slot, now; changed in place by a commit."""
        return self._table.logical_of_slots(self.index)

    @property
    def changes(self) -> int:
        """How often the layer's placement has changed."""
        return int(self._table.changes_L[self.index])

    @torch.compiler.disable
    def __call__(
        self, hidden_TD: Tensor, chosen_TE: Tensor, weights_TE: Tensor, real_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return which tokens go where, and the router's weights, by slot. ``real_T``: False for padding."""
        epoch = self._begin(hidden_TD, lambda: self._counter.count_chosen(self.index, chosen_TE, real_T))
        with phase("route", "F", self.index, epoch):
            order = self.logical_of_slots
            return chosen_TE.index_select(1, order), weights_TE.index_select(1, order)

    @torch.compiler.disable
    def slots(self, hidden: Tensor, topk_ids: Tensor, real_T: Tensor | None = None) -> Tensor:
        """Return ids of slots for ids of logical experts. ``real_T``: False for padding; None: every token counts."""
        with _unseen_by_selective_checkpointing():
            self._table.require_known(self.index, topk_ids)
            epoch = self._begin(hidden, lambda: self._counter.count(self.index, topk_ids, real_T))
            with phase("route", "F", self.index, epoch):
                return self._table.slots(self.index, topk_ids)

    @torch.compiler.disable
    def begin(self, hidden_TD: Tensor, chosen_TE: Tensor, real_T: Tensor | None) -> None:
        """Begin a forward for a host that itself carries rows to where `logical_of_slots` has them."""
        self._begin(hidden_TD, lambda: self._counter.count_chosen(self.index, chosen_TE, real_T))

    @torch.compiler.disable
    def begin_after_graph(self, hidden_ND: Tensor, counts_E: Tensor, order_P: Tensor) -> None:
        """Begin a forward whose columns a CUDA graph has put in this order, which must be the placement's."""
        changes = self.changes
        if self._followed != changes:  # one wait for the device after a commit, none in other forwards
            if not torch.equal(order_P, self.logical_of_slots):
                raise RuntimeError(
                    f"a CUDA graph of MoE layer {self.index} does not follow the placement: its tokens would go to "
                    "other experts than the router chose; capture graphs after attach, or train without them"
                )
            self._followed = changes
        self._begin(hidden_ND, lambda: self._counter.counts[self.index].add_(counts_E))

    def _begin(self, hidden: Tensor, count: Callable[[], object]) -> int:
        """Begin a forward, and count its load unless it repeats one; returns the epoch."""
        epoch = self._table.epoch
        self._forward_tag.enter(self.index, self._counter.closed_steps, self._module.training, epoch)
        if not in_recompute():
            self.before(self.index)
            self.calls += torch.is_grad_enabled()
            if self._module.training or self.counts_in_evaluation:
                with phase("count", "F", self.index, epoch):
                    count()
            elif hidden.shape[0]:
                self.uncounted += torch.is_grad_enabled()
            vectors = 4 if self._module.training else 2  # in dispatch and in combine, and back again in training
            self._counter.token_bytes = vectors * hidden.shape[-1] * hidden.element_size()
        return epoch
