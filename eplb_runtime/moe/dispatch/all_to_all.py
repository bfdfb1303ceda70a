"""Dispatch over torch.distributed's all-to-all: uneven splits, empty ranks, exact.

Exactness (the order of every sum is independent of where experts stand): a slot's rows come ordered by (source rank,
position in the source's batch); the K results of a token are summed in the router's order, and so are the K gradients
of its hidden state.

Two ways carry everything. To the experts: a row for each choice, or one for each rank that a token visits -> exchange
-> rows by slot. To the tokens: the results, or gradients, of each choice -> exchange -> sums. Dispatch goes the first,
combine the second, and each one's gradient the other. Rows that stay on this rank do not enter the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...distributed.hang_watchdog import Meeting
from ...utils.spans import phase
from ..experts.compute import SlotCounts
from ..routing.splitter import RowCounts
from . import permute
from .base import Dispatched, Dispatcher, Handle
from .lanes import Lane, Lanes
from .manifest import Cargo, Choices, Leg, Manifest, worth_sending_once
from .memory import RowMemory


class AllToAll(Dispatcher):
    """Dispatch and combine for one EP group.

    Args:
        group: the EP group, on the tokens' device; nobody else has tensors on their way there meanwhile.
        slots_per_rank: S.
        counts_group: the same ranks, for counts. A group of its own, ranks that are not in the same forward or backward
            wait for each other there, where all messages are of one size; None: ``group``.
        meeting: makes sure that ranks are in the same forward, and sees how long they wait; None: they are.
        lanes: where there may be a second way beside these groups.
        moves: how rows are put in order and summed here.
    """

    combine_order: ClassVar[Literal["logical", "by_rank"]] = "logical"

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots_per_rank: int,
        counts_group: dist.ProcessGroup | None = None,
        meeting: Meeting | None = None,
        lanes: Lanes | None = None,
        moves: permute.Moves = permute.PLAIN,
    ) -> None:
        self._moves = moves
        self._lanes = lanes or Lanes(Lane(group, counts_group if counts_group is not None else group))
        self._meeting = meeting
        self._rank = group.rank()
        self._num_ranks = group.size()
        self._slots_per_rank = slots_per_rank
        self._memory = RowMemory()

    def dispatch(
        self,
        hidden_TD: Tensor,
        slots_TK: Tensor | None,
        weights_TK: Tensor,
        *,
        counts: RowCounts | None = None,
        manifest: Any = None,
    ) -> Dispatched:
        if manifest is None:
            assert slots_TK is not None
            manifest = self._manifest(slots_TK, counts)
        learns = torch.is_grad_enabled()
        weights = weights_TK if learns or self.combine_order == "by_rank" else None
        rows_MD, weights_M = _Dispatch.apply(hidden_TD, weights, manifest, self)
        weights = weights_TK if self.combine_order == "logical" else weights_M
        assert weights is not None
        handle = Handle(weights.detach(), hidden_TD.dtype, manifest)
        return Dispatched(rows_MD, manifest.choices.counts_S, weights_M if learns else None, handle)

    def combine(self, out_MD: Tensor, handle: Handle) -> Tensor:
        combined_TD: Tensor = _Combine.apply(out_MD, handle, self)
        return combined_TD

    # -- what others may do their own way ------------------------------------------------------------------------

    def outward(self, source_TD: Tensor, manifest: Any) -> Callable[[], Tensor]:
        """Send what a token has to its experts; a function that waits for it and gives ``[M, D]``, by slot."""
        return self.to_experts(source_TD, manifest.tokens)

    def homeward(self, rows_MD: Tensor, manifest: Any, weights: Tensor | None) -> Callable[[], Tensor]:
        """Send rows by slot to their tokens; a function that waits for them and gives each token's sum ``[T, D]``.

        Args:
            weights: those of ``Handle``; None: a plain sum.
        """
        back = self.to_tokens(rows_MD, manifest)
        return lambda: self._moves.sum_choices(back(), manifest.choices.place_TK, self._memory, weights)

    # -- the two ways --------------------------------------------------------------------------------------------

    def to_experts(self, source: Tensor, cargo: Cargo) -> Callable[[], Tensor]:
        """Send rows of ``source`` ``[*, D]``; a function that waits for them and gives ``[M, D]``, by slot."""
        there = self.to_ranks(source, cargo.leg)

        def arrived() -> Tensor:
            rows = there()
            by_slot_MD = self._memory.like(rows, cargo.arrived_M.shape[0])
            permute.gather(rows, cargo.arrived_M, by_slot_MD)
            return by_slot_MD

        return arrived

    def to_tokens(self, rows_MD: Tensor, manifest: Any) -> Callable[[], Tensor]:
        """Send rows of choices back; a function that waits for them and gives ``[N, D]``: ``place_TK`` says which
        choice lies where."""
        return self.to_ranks(rows_MD.contiguous(), manifest.choices.cargo.leg.back(manifest.choices.slot_place_M))

    def to_ranks(self, source: Tensor, leg: Leg) -> Callable[[], Tensor]:
        """Send rows of ``source`` ``[*, D]``; a function that waits for those that come and gives them: what has stayed
        here first, then by rank."""
        own, index_U, part = leg.own, leg.index_U, self._moves.part
        there = self._memory.like(source, leg.arriving)
        leaving = source[own:]
        if index_U is not None:
            leaving = self._memory.like(source, index_U.shape[0] - own)
            if part is not None:
                part(source, index_U, there[:own], leaving)
            else:
                permute.gather(source, index_U[own:], leaving)
        work = self._exchange(there[own:], leaving, leg.received, leg.sent)
        if index_U is None:
            there[:own].copy_(source[:own])
        elif part is None:
            permute.gather(source, index_U[:own], there[:own])

        def arrived() -> Tensor:
            self._wait(work, leaving)
            return there

        return arrived

    def place(self) -> tuple[int, int] | tuple[None, None]:
        """Layer and epoch of the forward that this thread is in, for the names of its phases."""
        return (None, None) if self._meeting is None else self._meeting.place

    def _exchange(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> dist.Work | None:
        if self._num_ranks == 1:
            return None
        with self._lanes.launching():
            return dist.all_to_all_single(out, rows, received, sent, group=self._lanes.here().tokens, async_op=True)

    def _wait(self, work: dist.Work | None, sent: Tensor) -> None:
        """``sent`` is named so that it stays while it is read."""
        if work is not None:
            with nullcontext() if self._meeting is None else self._meeting.watch.waiting():
                work.wait()

    # -- what goes where -----------------------------------------------------------------------------------------

    def _manifest(self, slots_TK: Tensor, counts: RowCounts | None) -> Any:
        """Of a batch whose way is new. Collective."""
        slots, me = self._slots_per_rank, self._rank
        once = counts is None and worth_sending_once(self._num_ranks, slots_TK.shape[1])
        leaving = self._leaving(slots_TK, once, told=counts is None)
        told = None
        if counts is None:
            both_2RW, told = self._exchange_counts(leaving.told_2RW)
        else:
            both_2RW = np.stack([counts.sent_P.reshape(-1, slots), counts.received_RS])
        sent_R, received_R = both_2RW[:, :, :slots].sum(axis=2)
        choices_leg = Leg.of(leaving.choice_N, sent_R, received_R, me)
        meant = tokens_leg = None
        if once:
            sent_R, received_R = both_2RW[:, :, slots]
            tokens_leg = Leg.of(leaving.token_N[: int(sent_R.sum())], sent_R, received_R, me)
            assert leaving.meant_N1 is not None
            meant = self.to_ranks(leaving.meant_N1, replace(choices_leg, index_U=None))()
        arriving = self._moves.arriving(both_2RW[1], me, slots, slots_TK.device, meant, told)
        tokens = Cargo(tokens_leg or replace(choices_leg, index_U=leaving.token_N), arriving.row_M)
        return Manifest(self._choices(leaving, choices_leg, arriving, both_2RW[1]), tokens)

    def _leaving(self, slots_TK: Tensor, once: bool, told: bool) -> permute.Leaving:
        """What leaves; ``told``: ranks are told of it, and of where this one is."""
        word = self._meeting.word if told and self._meeting is not None else None
        return self._moves.leaving(slots_TK, self._rank, self._num_ranks, self._slots_per_rank, once=once, word=word)

    def _choices(
        self, leaving: permute.Leaving, leg: Leg, arriving: permute.Arriving, told_RW: NDArray[np.int64]
    ) -> Choices:
        rows_S = told_RW[:, : self._slots_per_rank].sum(axis=0).tolist()
        return Choices(
            Cargo(leg, arriving.arrived_M),
            leaving.place_TK,
            arriving.slot_place_M,
            SlotCounts(arriving.ends_S, rows_S),
        )

    def _exchange_counts(self, told_2RW: Tensor) -> tuple[NDArray[np.int64], Tensor]:
        """The one host sync of a dispatch without known counts: torch.distributed takes sizes as host integers.

        Args:
            told_2RW: as of `permute.Leaving`, with a word for `Meeting`.

        Returns:
            int64 ``[2, R, W]``: what was told to each rank, and by it; and the latter on the device.
        """
        with nullcontext() if self._meeting is None else self._meeting.watch.waiting():
            with self._lanes.launching():
                dist.all_to_all_single(told_2RW[1], told_2RW[0], group=self._lanes.here().counts)
            both: NDArray[np.int64] = told_2RW.cpu().numpy()
        if self._meeting is not None:
            self._meeting.check(both[1, :, -1])
        return both, told_2RW[1]


class _Dispatch(torch.autograd.Function):
    """Hidden states, and router weights if they travel. Backward sums the gradients of a token's choices in the
    router's order."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weights_TK: Tensor | None, manifest: Any, wire: AllToAll
    ) -> tuple[Tensor, Tensor | None]:
        ctx.manifest, ctx.wire, ctx.place = manifest, wire, wire.place()
        rows = wire.outward(hidden_TD.contiguous(), manifest)
        if weights_TK is None:
            return rows(), None
        weights = wire.to_experts(weights_TK.reshape(-1, 1), manifest.choices.cargo)
        rows_MD, weights_M = rows(), weights().squeeze(1)
        needs = zip((rows_MD, weights_M), ctx.needs_input_grad, strict=False)
        ctx.mark_non_differentiable(*(arrived for arrived, need in needs if not need))
        return rows_MD, weights_M

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_MD: Tensor, grad_M: Tensor | None) -> tuple[Tensor | None, ...]:
        manifest, wire = ctx.manifest, ctx.wire
        hidden_need, weights_need, *_ = ctx.needs_input_grad
        with phase("dispatch", "B", *ctx.place):
            rows = wire.homeward(grad_MD, manifest, None) if hidden_need else None
            weights = wire.to_tokens(grad_M.unsqueeze(1), manifest) if weights_need and grad_M is not None else None
            return (
                None if rows is None else rows(),
                None if weights is None else weights().squeeze(1)[manifest.choices.place_TK],
                None,
                None,
            )


class _Combine(torch.autograd.Function):
    """The weighted sum of a token's results, none of which is kept. Backward leaves weighing to the experts."""

    @staticmethod
    def forward(ctx: Any, out_MD: Tensor, handle: Handle, wire: AllToAll) -> Tensor:
        ctx.manifest, ctx.wire, ctx.dtype, ctx.place = handle.manifest, wire, out_MD.dtype, wire.place()
        return wire.homeward(out_MD, handle.manifest, handle.weights)().to(handle.dtype)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        with phase("combine", "B", *ctx.place):
            return ctx.wire.outward(grad_TD.to(ctx.dtype).contiguous(), ctx.manifest)(), None, None
