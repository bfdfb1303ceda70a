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

from ..experts.compute import SlotCounts
from ..phases import phase
from ..routing.splitter import RowCounts
from ..watch import Meeting
from . import permute
from .base import Dispatched, Dispatcher, Handle
from .lanes import Lane, Lanes
from .manifest import Cargo, Manifest, begins, worth_sending_once
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
    """

    combine_order: ClassVar[Literal["logical", "by_rank"]] = "logical"

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots_per_rank: int,
        counts_group: dist.ProcessGroup | None = None,
        meeting: Meeting | None = None,
        lanes: Lanes | None = None,
    ) -> None:
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
        manifest: Manifest | None = None,
    ) -> Dispatched:
        if manifest is None:
            assert slots_TK is not None
            manifest = self._manifest(slots_TK, counts)
        weights = weights_TK if torch.is_grad_enabled() else None
        rows_MD, weights_M = _Dispatch.apply(hidden_TD, weights, manifest, self)
        handle = Handle(weights_TK.detach(), hidden_TD.dtype, manifest)
        return Dispatched(rows_MD, manifest.counts_S, weights_M, handle, None)

    def combine(self, out_MD: Tensor, handle: Handle) -> Tensor:
        combined_TD: Tensor = _Combine.apply(out_MD, handle, self)
        return combined_TD

    # -- the two ways --------------------------------------------------------------------------------------------

    def to_experts(self, source: Tensor, cargo: Cargo) -> Callable[[], Tensor]:
        """Send rows of ``source`` ``[*, D]``.

        Returns:
            A function that waits for them and gives ``[M, D]``, by slot.
        """
        own, index_U = cargo.own, cargo.index_U
        there = self._memory.like(source, own + sum(cargo.received))
        sent = self._memory.like(source, index_U.shape[0] - own)
        permute.gather(source, index_U[own:], sent)
        work = self._exchange(there[own:], sent, cargo.received, cargo.sent)
        permute.gather(source, index_U[:own], there[:own])

        def arrived() -> Tensor:
            self._wait(work, sent)
            by_slot_MD = self._memory.like(there, cargo.arrived_M.shape[0])
            permute.gather(there, cargo.arrived_M, by_slot_MD)
            return by_slot_MD

        return arrived

    def to_tokens(self, rows_MD: Tensor, manifest: Manifest) -> Callable[[], Tensor]:
        """Send rows back to where their tokens are.

        Returns:
            A function that waits for them and gives ``[N, D]``; ``place_TK`` says which choice lies where.
        """
        rows_MD = rows_MD.contiguous()
        choices, slot_place_M = manifest.choices, manifest.slot_place_M
        own = choices.own
        back_ND = self._memory.like(rows_MD, own + sum(choices.sent))
        sent = self._memory.like(rows_MD, rows_MD.shape[0] - own)
        permute.gather(rows_MD, slot_place_M[own:], sent)
        work = self._exchange(back_ND[own:], sent, choices.sent, choices.received)
        permute.gather(rows_MD, slot_place_M[:own], back_ND[:own])

        def arrived() -> Tensor:
            self._wait(work, sent)
            return back_ND

        return arrived

    def place(self) -> tuple[int, int] | tuple[None, None]:
        """Layer and epoch of the forward that this thread is in, for the names of its phases."""
        return (None, None) if self._meeting is None else self._meeting.place

    def sum_choices(self, rows_ND: Tensor, manifest: Manifest, weights_TK: Tensor | None = None) -> Tensor:
        return permute.sum_choices(rows_ND, manifest.place_TK, self._memory, weights_TK)

    def _exchange(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> dist.Work | None:
        if self._num_ranks == 1:
            return None
        return dist.all_to_all_single(out, rows, received, sent, group=self._lanes.here().tokens, async_op=True)

    def _wait(self, work: dist.Work | None, sent: Tensor) -> None:
        """``sent`` is named so that it stays while it is read."""
        if work is not None:
            with nullcontext() if self._meeting is None else self._meeting.watch.waiting():
                work.wait()

    # -- what goes where -----------------------------------------------------------------------------------------

    def _manifest(self, slots_TK: Tensor, counts: RowCounts | None) -> Manifest:
        slots, me, slots_N = self._slots_per_rank, self._rank, slots_TK.reshape(-1)
        visits_TR: Tensor | None = None
        tokens_2R: NDArray[np.int64] | None = None
        if counts is None:
            if worth_sending_once(self._num_ranks, slots_TK.shape[1]):
                visits_TR = permute.visits(slots_TK, slots, self._num_ranks)
            counts, tokens_2R = self._exchange_counts(slots_N, visits_TR)
        choice_N = permute.order_by_slot(slots_N, me * slots, slots, self._num_ranks * slots)
        arrived_M, slot_place_M = permute.regroup(counts.received_RS, me, slots_TK.device)
        sent_R, received_R = counts.sent_P.reshape(-1, slots).sum(axis=1), counts.received_RS.sum(axis=1)
        choices = Cargo.of(choice_N, sent_R, received_R, me, arrived_M)
        if visits_TR is None or tokens_2R is None:
            tokens = replace(choices, index_U=choice_N // slots_TK.shape[1])
        else:
            tokens = self._each_token_once(slots_TK, visits_TR, tokens_2R, choices, counts)
        return Manifest(
            tokens=tokens,
            choices=choices,
            place_TK=permute.inverse(choice_N).view(slots_TK.shape),
            slot_place_M=slot_place_M,
            counts_S=SlotCounts.of(counts.received_RS.sum(axis=0).tolist(), slots_TK.device),
        )

    def _exchange_counts(self, slots_N: Tensor, visits_TR: Tensor | None) -> tuple[RowCounts, NDArray[np.int64] | None]:
        """The one host sync of a dispatch without known counts: torch.distributed takes sizes as host integers.

        Returns:
            Rows for each choice; and, if asked for, int64 ``[2, R]``: tokens that go to each rank, and come from it.
        """
        ranks, slots = self._num_ranks, self._slots_per_rank
        columns = [permute.count(slots_N, ranks * slots).view(ranks, slots)]
        if visits_TR is not None:
            columns.append(visits_TR.sum(dim=0).unsqueeze(1))
        if self._meeting is not None:
            columns.append(columns[0].new_full((ranks, 1), self._meeting.word))
        sent = torch.cat(columns, dim=1)
        received = torch.empty_like(sent)
        with nullcontext() if self._meeting is None else self._meeting.watch.waiting():
            dist.all_to_all_single(received, sent, group=self._lanes.here().counts)
            both: NDArray[np.int64] = torch.stack([sent, received]).cpu().numpy()
        if self._meeting is not None:
            self._meeting.check(both[1, :, -1])
        rows = RowCounts(both[0, :, :slots].reshape(-1), both[1, :, :slots])
        return rows, None if visits_TR is None else both[:, :, slots]

    def _each_token_once(
        self,
        slots_TK: Tensor,
        visits_TR: Tensor,
        tokens_2R: NDArray[np.int64],
        choices: Cargo,
        counts: RowCounts,
    ) -> Cargo:
        """A token goes to each rank once, and each of its choices there says which of the rows it means."""
        device, (sent_R, received_R) = slots_TK.device, tokens_2R
        begin_R = torch.from_numpy(begins(sent_R, self._rank)).to(device, non_blocking=True)
        token_U, within_TR = permute.each_once(visits_TR, begin_R, int(sent_R.sum()))
        meant_TK = within_TR.gather(1, slots_TK // self._slots_per_rank)
        meant = self.to_experts(meant_TK.view(-1, 1), choices)
        from_each_SR = np.tile(begins(received_R, self._rank), self._slots_per_rank)
        groups = torch.from_numpy(np.stack([from_each_SR, counts.received_RS.T.ravel()])).to(device, non_blocking=True)
        rows = choices.arrived_M.shape[0]
        begin_M = torch.repeat_interleave(groups[0], groups[1], output_size=rows)
        return Cargo.of(token_U, sent_R, received_R, self._rank, begin_M + meant().squeeze(1))


class _Dispatch(torch.autograd.Function):
    """Hidden states, and router weights if they travel. Backward sums the gradients of a token's choices in the
    router's order."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weights_TK: Tensor | None, manifest: Manifest, wire: AllToAll
    ) -> tuple[Tensor, Tensor | None]:
        ctx.manifest, ctx.wire, ctx.place = manifest, wire, wire.place()
        rows = wire.to_experts(hidden_TD.contiguous(), manifest.tokens)
        if weights_TK is None:
            return rows(), None
        weights = wire.to_experts(weights_TK.reshape(-1, 1), manifest.choices)
        rows_MD, weights_M = rows(), weights().squeeze(1)
        needs = zip((rows_MD, weights_M), ctx.needs_input_grad, strict=False)
        ctx.mark_non_differentiable(*(arrived for arrived, need in needs if not need))
        return rows_MD, weights_M

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor, grad_M: Tensor | None) -> tuple[Tensor | None, ...]:
        manifest, wire = ctx.manifest, ctx.wire
        hidden_need, weights_need, *_ = ctx.needs_input_grad
        with phase("dispatch", "B", *ctx.place):
            rows = wire.to_tokens(grad_MD, manifest) if hidden_need else None
            weights = wire.to_tokens(grad_M.unsqueeze(1), manifest) if weights_need and grad_M is not None else None
            return (
                None if rows is None else wire.sum_choices(rows(), manifest),
                None if weights is None else weights().squeeze(1)[manifest.place_TK],
                None,
                None,
            )


class _Combine(torch.autograd.Function):
    """The weighted sum of a token's results, none of which is kept. Backward leaves weighing to the experts."""

    @staticmethod
    def forward(ctx: Any, out_MD: Tensor, handle: Handle, wire: AllToAll) -> Tensor:
        ctx.manifest, ctx.wire, ctx.dtype, ctx.place = handle.manifest, wire, out_MD.dtype, wire.place()
        out_ND = wire.to_tokens(out_MD, handle.manifest)()
        return wire.sum_choices(out_ND, handle.manifest, handle.weights).to(handle.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        with phase("combine", "B", *ctx.place):
            return ctx.wire.to_experts(grad_TD.to(ctx.dtype).contiguous(), ctx.manifest.tokens)(), None, None
