"""The seam that every dispatcher implements, and the one pair of autograd functions for all of them.

``plan`` -> ``dispatch`` -> compute -> ``combine``; what lies between is the caller's, so that a schedule can put other
work there. The backward of each transfer is the other transfer with the same metadata.

Shape suffixes of this room: T tokens of this rank, K top-k, M rows that arrive here, D model width, E logical experts,
R ranks, S slots a rank, P = R * S slots.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...distributed.consensus import all_gather_into
from ...distributed.step_tag import ForwardTag
from ...load.clock import ExpertClock
from ...utils.spans import phase
from ..experts.compute import SlotCounts
from ..kernel_selection import Kernels
from ..routing.water_filling import RowCounts
from .channels import MicroBatchChannel, MicroBatchChannels
from .permute import RowMemory
from .recompute import InFlight

_SECOND_DERIVATIVES = (
    "a backward pass with create_graph=True through MoE layers (a gradient penalty, second derivatives): their "
    "exchanges have first derivatives only; take such a loss from what comes after or before them, or differentiate "
    "without create_graph"
)


@dataclass(frozen=True, eq=False)
class DispatchContext:
    """What dispatchers of an EP group are made from: channels of its own, S, the tag that checks forwards, what
    permutes and sums rows, and the clock of backward passes."""

    channels: MicroBatchChannels
    slots_per_rank: int
    forward_tag: ForwardTag
    kernels: Kernels = field(default_factory=Kernels)
    expert_clock: ExpertClock = field(default_factory=ExpertClock)

    @classmethod
    def of(cls, group: dist.ProcessGroup, slots_per_rank: int) -> Self:
        """Return a context that uses ``group`` for tokens and counts, with its own tag and clock, and plain torch."""
        tag = ForwardTag(range(group.size()), group.rank())
        return cls(MicroBatchChannels(MicroBatchChannel(group, group)), slots_per_rank, tag)


class DispatchMetadata:
    """Where each row goes; each kind of dispatcher has its own fields. Hidden states with the same choices and router
    weights on all ranks can be dispatched with it again (activation recompute)."""


@dataclass(frozen=True, eq=False)
class Dispatched:
    """The rows that arrived on this rank, and what `Dispatcher.combine` needs to bring their results back.

    Args:
        rows_MD: ordered by local slot; a slot's rows by source rank and position there.
        counts_S: rows of each slot: offsets on the device, numbers on the host if the dispatcher knows them.
        weights_M: the router weight of each row; None without gradients. The backward of ``combine`` returns unweighted
            gradients. The expert compute weighs them (`moe.experts.compute.weigh_gradients`), so ``combine`` saves no
            outputs.
        combine_weights: the router weights that ``combine`` multiplies: ``[T, K]`` in ``"logical"`` order, ``[M]`` by
            rank; without gradients.
        dtype: of the hidden states, and of the result of ``combine``.
        metadata: for another dispatch of the same choices.
    """

    rows_MD: Tensor
    counts_S: SlotCounts
    weights_M: Tensor | None
    combine_weights: Tensor
    dtype: torch.dtype
    metadata: DispatchMetadata


class Dispatcher(ABC):
    """Exchanges tokens within one EP group. Every method is collective over it.

    Attributes:
        combine_order: ``"logical"``: a token's results are summed in the router's order, so that placement changes no
            bit. ``"by_rank"``: summed on each rank first, then over ranks.
    """

    combine_order: Literal["logical", "by_rank"] = "logical"

    def __init__(self, context: DispatchContext) -> None:
        self.channels, self.kernels = context.channels, context.kernels
        self.forward_tag, self.expert_clock = context.forward_tag, context.expert_clock
        self._group, self._slots_per_rank = context.channels.first.tokens, context.slots_per_rank
        self._rank, self._num_ranks = self._group.rank(), self._group.size()
        self._memory = RowMemory()

    def carrier(self, hidden_TD: Tensor, weights_TK: Tensor) -> "Dispatcher":
        """Return the dispatcher that carries this batch, alike on all ranks: here this one. Call it ahead of `plan`. A
        subclass may return another dispatcher, after a collective, or raise ConfigError if none can carry the batch."""
        return self

    @abstractmethod
    def plan(self, slots_TK: Tensor, counts: RowCounts | None = None) -> DispatchMetadata:
        """Return where each row goes, for `dispatch`. ``slots_TK``: int64, the slot of each choice. ``counts``: how
        many rows go where, if that is known; a dispatcher may then skip the exchange of counts. Collective."""

    def dispatch(self, hidden_TD: Tensor, weights_TK: Tensor, metadata: DispatchMetadata) -> Dispatched:
        """Send the hidden state of each choice to its slot, and return what arrived here. ``metadata``: of `plan`, or
        of an earlier dispatch of the same choices. Collective and differentiable."""
        learns, by_rank = torch.is_grad_enabled(), self.combine_order == "by_rank"
        travelling = weights_TK if learns or by_rank else None
        rows_MD, weights_M, counts_S, metadata = _Dispatch.apply(hidden_TD, travelling, metadata, self)
        combine_weights = (weights_M if by_rank else weights_TK).detach()
        return Dispatched(rows_MD, counts_S, weights_M if learns else None, combine_weights, hidden_TD.dtype, metadata)

    def combine(self, out_MD: Tensor, dispatched: Dispatched, in_flight: InFlight | None = None) -> Tensor:
        """Return ``[T, D]``, the sum of each token's results times their router weights, in the dtype of the hidden
        states, in which results travel. Collective and differentiable; the gradient for ``out_MD`` is not multiplied by
        router weights. The backward pass raises RuntimeError under ``create_graph``, and whatever ``in_flight.check()``
        raises, and then calls ``in_flight.end()``."""
        combined_TD: Tensor = _Combine.apply(out_MD.to(dispatched.dtype), dispatched, self, in_flight)
        return combined_TD

    # -- the transfers behind the autograd functions -------------------------------------------------------------------

    @abstractmethod
    def to_experts(
        self, source_TD: Tensor, weights_TK: Tensor | None, metadata: Any, *, gradients: bool = False
    ) -> tuple[Tensor, Tensor | None, SlotCounts, DispatchMetadata]:
        """Send rows to the slots of their choices (collective). Return the rows that arrive here, ``[M, D]`` by slot;
        their router weights ``[M]``, None without ``weights_TK``; the rows of each slot; and metadata to send the same
        choices again. ``gradients``: rows are gradients of results, not hidden states."""

    @abstractmethod
    def to_tokens(
        self, rows_MD: Tensor, weights: Tensor | None, grad_M: Tensor | None, metadata: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Send ``rows_MD`` back (collective). Return ``[T, D]``, the sum of each token's rows, times ``weights`` (those
        of `Dispatched`) if given; and ``[T, K]``, each choice's value in ``grad_M``, or None without it."""

    # -- for every kind ------------------------------------------------------------------------------------------------

    def gather_counts(self, counts_E: Tensor) -> NDArray[np.int64]:
        """Return int64 ``[R, E]`` on the host: ``counts_E``, int64 ``[E]``, of each rank. One collective, one host
        sync. The forward's tag travels along; if tags of ranks differ, all raise OutOfStepError."""
        group = self.channels.current().counts
        mine = torch.cat([counts_E, counts_E.new_full((1,), self.forward_tag.value)])
        all_RW = mine.new_empty(group.size(), len(mine))
        with self.channels.launching():
            all_gather_into(all_RW.view(-1), mine, group=group)
        counts_RW: NDArray[np.int64] = all_RW.cpu().numpy()
        self.forward_tag.check(counts_RW[:, -1])
        return counts_RW[:, :-1]


class _Dispatch(torch.autograd.Function):
    """Hidden states and, if they travel, router weights; the backward sums the gradients of a token's choices."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weights_TK: Tensor | None, metadata: DispatchMetadata, dispatcher: Dispatcher
    ) -> tuple[Tensor, Tensor | None, SlotCounts, DispatchMetadata]:
        ctx.dispatcher, ctx.place = dispatcher, dispatcher.forward_tag.place
        rows_MD, weights_M, counts_S, ctx.layout = dispatcher.to_experts(hidden_TD, weights_TK, metadata)
        needs = zip((rows_MD, weights_M), ctx.needs_input_grad, strict=False)
        ctx.mark_non_differentiable(*(rows for rows, need in needs if rows is not None and not need))
        return rows_MD, weights_M, counts_S, ctx.layout

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_MD: Tensor, grad_M: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        hidden_needed, weights_needed, *_rest = ctx.needs_input_grad
        with phase("dispatch", "B", *ctx.place):
            grad_M = grad_M if weights_needed else None
            hidden_TD, weights_TK = ctx.dispatcher.to_tokens(grad_MD, None, grad_M, ctx.layout)
        if ctx.dispatcher.expert_clock.on:
            ctx.dispatcher.expert_clock.backward_ends(ctx.layout)
        return hidden_TD if hidden_needed else None, weights_TK, None, None


class _Combine(torch.autograd.Function):
    """The weighted sum of a token's results, none of which is saved. The experts' backward weighs the gradients."""

    @staticmethod
    def forward(
        ctx: Any, out_MD: Tensor, dispatched: Dispatched, dispatcher: Dispatcher, in_flight: InFlight | None
    ) -> Tensor:
        ctx.dispatcher, ctx.place, ctx.in_flight = dispatcher, dispatcher.forward_tag.place, in_flight
        # Asking for something that was saved makes checkpointing repeat the forward, if it has not yet.
        ctx.save_for_backward(out_MD.new_empty(0))
        ctx.layout, ctx.dtype = dispatched.metadata, out_MD.dtype
        combined_TD, _ = dispatcher.to_tokens(out_MD, dispatched.combine_weights, None, dispatched.metadata)
        return combined_TD.to(dispatched.dtype)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(_SECOND_DERIVATIVES)
        if ctx.in_flight is not None:
            ctx.in_flight.check()
        _ = ctx.saved_tensors
        if ctx.in_flight is not None:
            ctx.in_flight.end()
        if ctx.dispatcher.expert_clock.on:
            ctx.dispatcher.expert_clock.backward_begins(ctx.layout)
        with phase("combine", "B", *ctx.place):
            rows_MD, *_ = ctx.dispatcher.to_experts(grad_TD.to(ctx.dtype), None, ctx.layout, gradients=True)
            return rows_MD, None, None, None
