"""One expert-parallel MoE layer: count -> slots -> plan -> dispatch -> compute -> combine, for experts of any
framework; or count and slots alone, where the framework does the rest."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from ..load.counter import LoadCounter, in_recompute
from ..utils.spans import phase
from .dispatch.base import Dispatcher
from .dispatch.recompute import MOVED, RecomputeCache
from .experts.compute import LocalExperts
from .routing.slots import BatchSplitter, Counted, RowCounts, SlotTable


def _unseen_by_selective_checkpointing() -> contextlib.AbstractContextManager[Any]:
    """Selective activation checkpointing matches saved operators by call index. A repeated forward here makes fewer
    calls than the first one, so its modes are disabled inside, and all of the layer is repeated."""
    dispatch, checkpoint = torch.utils._python_dispatch, torch.utils.checkpoint
    kinds = checkpoint._CachedTorchDispatchMode, checkpoint._CachingTorchDispatchMode
    if any(isinstance(mode, kinds) for mode in dispatch._get_current_dispatch_mode_stack()):
        return dispatch._disable_current_modes()  # type: ignore[no-any-return]
    return contextlib.nullcontext()


@dataclass(frozen=True)
class LayerContext:
    """What the layers of a model share. Without a splitter ``table`` says where an expert is."""

    counter: LoadCounter
    table: SlotTable
    splitter: BatchSplitter | None
    dispatcher: Dispatcher


class CountedLayer:
    """What happens at the beginning of each forward of a MoE layer, with our dispatch or the host's.

    Attributes:
        index: the layer's index among the model's MoE layers.
        before: called with it when a forward begins, before anything is routed; not when one is repeated.
        calls: forwards so far that gradients can follow: in training also without, which checkpointing may repeat.
        uncounted: those of them whose tokens did not count, because the model was in evaluation mode.
        counts_in_evaluation: whether load counts outside training; inference has nothing else.
    """

    def __init__(self, index: int, module: nn.Module, context: LayerContext) -> None:
        self.index, self._module, self._counter, self._table = index, module, context.counter, context.table
        self._forward_tag, self.expert_clock = context.dispatcher.forward_tag, context.dispatcher.expert_clock
        self.counts_in_evaluation = True
        self.calls = self.uncounted = 0
        self.before: Callable[[int], None] = lambda index: None

    @property
    def changes(self) -> int:
        """Return how often the placement of this layer was set, the first time included."""
        return int(self._table.changes_L[self.index])

    def _enter(self, top_k: int = 0) -> int:
        """Enter a forward, repeated ones too; returns the epoch."""
        tag = self._forward_tag
        tag.enter(self.index, self._counter.closed_steps, self._module.training, self._table.epoch, top_k)
        return self._table.epoch

    def _load_counts(self, hidden: Tensor) -> bool:
        """Note a forward that repeats none; returns whether its load counts."""
        training = self._module.training
        learns, counts = training or torch.is_grad_enabled(), training or self.counts_in_evaluation
        self.calls += learns
        self.uncounted += learns and not counts and hidden.shape[0] > 0
        # A vector travels in dispatch and in combine, and in training back again in both.
        self._counter.token_bytes = (4 if training else 2) * hidden.shape[-1] * hidden.element_size()
        return counts


class ExpertParallelLayer(CountedLayer):
    """The way of a batch through one MoE layer.

    Args:
        module: the host's experts module; its ``training`` flag decides what counts as load.
        real_tokens: bool ``[T]`` mask of the running batch, or None; called once a forward.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        experts: LocalExperts,
        context: LayerContext,
        real_tokens: Callable[[int], Tensor | None],
    ) -> None:
        super().__init__(index, module, context)
        self._experts, self._context, self._real_tokens = experts, context, real_tokens
        self._dispatcher, self._channels = context.dispatcher, context.dispatcher.channels
        self._in_flight = RecomputeCache(self._channels, lambda: self.changes)
        self._one_at_a_time = Lock()  # of two batches at once: hosts' code may change a module while it computes

    @torch.compiler.disable
    def __call__(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """``[T, D]`` -> ``[T, D]``; ids are logical."""
        with _unseen_by_selective_checkpointing():
            index, training, repeated = self.index, self._module.training, in_recompute()
            epoch = self._enter(topk_ids_TK.shape[-1])
            found = (None, None) if repeated else self._begin(hidden_TD, topk_ids_TK)
            # Nothing counts again, and metadata that is known is used again.
            metadata: Any = self._in_flight.repeated(topk_ids_TK) if repeated else None
            with phase("route", "F", index, epoch):
                route = self._slots(topk_ids_TK, *found) if metadata is None else None
            dispatcher = self._dispatcher.carrier(hidden_TD, topk_weights_TK)
            begin = self.expert_clock.mark() if self.expert_clock.on and training else None
            try:
                with phase("dispatch", "F", index, epoch):
                    metadata = metadata if route is None else dispatcher.plan(*route)
                    dispatched = dispatcher.dispatch(hidden_TD, topk_weights_TK, metadata)
                with phase("compute", "F", index, epoch), self._one_at_a_time:
                    out_MD = self._experts(dispatched.rows_MD, dispatched.counts_S, dispatched.weights_M)
                with phase("combine", "F", index, epoch):
                    learns, given = torch.is_grad_enabled() and out_MD.requires_grad, (topk_ids_TK, dispatched.metadata)
                    in_flight = None if repeated else self._in_flight.track(*given, learns, training)
                    combined_TD = dispatcher.combine(out_MD, dispatched, in_flight)
            finally:  # a repeated forward is left as soon as what backward needs is there
                if begin is not None:
                    self.expert_clock.forward_ends(begin)
            return combined_TD

    @torch.compiler.disable
    def see(self, topk_ids_TK: Tensor, columns: int, top_k: int) -> None:
        """Begin a forward of the host's own module, if it repeats none: call ``before``, count it and (in evaluation if
        ``counts_in_evaluation``) its load. ``columns``: hidden width; ``top_k``: unused. ValueError (CPU): bad ids."""
        if not in_recompute():
            self._begin(torch.empty(len(topk_ids_TK), columns, device="meta"), topk_ids_TK)

    def _begin(self, hidden_TD: Tensor, topk_ids_TK: Tensor) -> tuple[Tensor | None, Counted | None]:
        """Begin a forward that repeats none, and count its load; return slots, or counts, or neither, as found."""
        self._table.require_known(self.index, topk_ids_TK)
        self.before(self.index)
        self._forward_tag.set_placement(self.changes)
        found: tuple[Tensor | None, Counted | None] = None, None
        with self._one_at_a_time:
            if self._load_counts(hidden_TD):
                with phase("count", "F", self.index, self._table.epoch), self._channels.shared("counts"):
                    found = self._count(topk_ids_TK, self._real_tokens(hidden_TD.shape[0]))
        self._in_flight.begin(self._counter.closed_steps)
        return found

    @property
    def _splitter(self) -> BatchSplitter | None:
        """Splits this layer's batches; None: its experts have no replicas now."""
        splitter = self._context.splitter
        return splitter if splitter is not None and splitter.splits(self.index) else None

    def _count(self, topk_ids_TK: Tensor, real_T: Tensor | None) -> tuple[Tensor | None, Counted | None]:
        splitter, counts_E = self._splitter, self._counter.counts[self.index]
        if splitter is not None and real_T is None:
            counts = splitter.counts(topk_ids_TK)
            counts_E.add_(counts[0])
            return None, counts
        count_and_map = self._dispatcher.kernels.count_and_map
        if splitter is not None or count_and_map is None:
            self._counter.count(self.index, topk_ids_TK, real_T)
            return None, None
        return count_and_map(topk_ids_TK, self._table.home_of_experts(self.index), counts_E, real_T), None

    def _slots(
        self, topk_ids_TK: Tensor, slots_TK: Tensor | None, counts: Counted | None
    ) -> tuple[Tensor, RowCounts | None]:
        """The slot of each choice, and how many rows go where if the split was made on the host."""
        splitter = self._splitter
        if slots_TK is not None or splitter is None:
            return self._table.slots(self.index, topk_ids_TK) if slots_TK is None else slots_TK, None
        counts_E, begins = counts or splitter.counts(topk_ids_TK)
        return splitter.route(self.index, topk_ids_TK, self._dispatcher.gather_counts(counts_E), begins)


class HostDispatchedLayer(CountedLayer):
    """One MoE layer whose host carries and computes tokens itself, each to the expert of its column. The host believes
    that slot p holds expert p: columns change places, or ids are renamed, and nothing else; there are no replicas. The
    host marks expert work by ``expert_clock``."""

    @property
    def logical_of_slots(self) -> Tensor:
        """Return int64 ``[E]``, the logical expert in each slot: live memory, which a commit changes in place."""
        return self._table.logical_of_slots(self.index)

    @torch.compiler.disable
    def __call__(
        self, hidden_TD: Tensor, chosen_TE: Tensor, weights_TE: Tensor, real_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return which tokens go where, and the router's weights, by slot. ``real_T``: False for padding."""
        with phase("route", "F", self.index, self.begin(hidden_TD, chosen_TE, real_T)):
            order = self.logical_of_slots
            return chosen_TE.index_select(1, order), weights_TE.index_select(1, order)

    @torch.compiler.disable
    def slots(self, hidden: Tensor, topk_ids: Tensor, real_T: Tensor | None = None) -> Tensor:
        """Return the physical slot of each logical id, in the shape of ``topk_ids``, and begin the forward (`begin`).
        Raises ValueError, on a CPU, for ids of no expert. ``real_T``: False for padding; None: every token counts."""
        with _unseen_by_selective_checkpointing():
            self._table.require_known(self.index, topk_ids)
            with phase("route", "F", self.index, self.begin(hidden, topk_ids, real_T)):
                return self._table.slots(self.index, topk_ids)

    @torch.compiler.disable
    def checked(self, out: Tensor) -> Tensor:
        """Return the results of a forward that `slots` began. Their backward pass raises RuntimeError ahead of the
        experts' if the layer's placement has changed since, so that gradients would go to other experts."""
        if out.requires_grad:
            out.register_hook(partial(self._check, self.changes))
        return out

    @torch.compiler.disable
    def _check(self, changes: int, gradient: Tensor) -> None:
        if changes != self.changes:
            raise RuntimeError(MOVED)

    @torch.compiler.disable
    def begin(self, hidden: Tensor, chosen: Tensor, real_T: Tensor | None) -> int:
        """Begin a forward of a host that itself carries rows to their slots, and return the epoch. Set the forward's
        tag; unless the forward is repeated, call ``before``, count the forward and (in evaluation if
        ``counts_in_evaluation``) its load. ``chosen``: ids or bools, as `LoadCounter.count` takes them. ``real_T``:
        False for padding; None: no padding."""
        epoch = self._enter()
        if not in_recompute():
            self.before(self.index)
            if self._load_counts(hidden):
                with phase("count", "F", self.index, epoch):
                    self._counter.count(self.index, chosen, real_T)
        return epoch
