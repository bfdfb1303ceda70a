"""Dispatch over kernels that carry rows from GPU to GPU without the host: DeepEP's.

Two orders of a token's sum. `Carried` is exact as `all_to_all` is: each choice is a token of its own with one expert,
so that results come back one for each choice, and are weighed and summed here in the router's order. `CarriedByRank`
is what such kernels are made for: a token goes to each rank once, results are weighed and summed there, and over ranks
on the way back: fewer bytes both ways, and sums that depend on where experts stand.

Dispatch takes rows there and combine back; each one's gradient goes the other's way with the same handle, and so does
activation recompute. How each package wants to be called stands in its carrier (`carrier.py`), what is in a row in
`row_bytes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import ConfigError
from ...distributed.hang_watchdog import Meeting
from ...distributed.transports import deepep_package
from ...distributed.transports.deepep_package import NUM_SMS
from ...utils.spans import phase
from ..routing.splitter import RowCounts
from . import float8, permute, row_bytes
from .base import CountExchange, Dispatched, Dispatcher, Handle
from .carrier import Carrier
from .deepep_low_latency import LowLatency, LowLatencyRoute
from .lanes import Lane, Lanes
from .memory import RowMemory
from .route import Route


class Carried(Dispatcher):
    """Exact: the sum of a token's results does not depend on where its experts stand.

    Args:
        group: the EP group, on GPUs.
        slots_per_rank: S.
        counts_group: the same ranks, to find out whether all are in the same forward; None: ``group``.
        meeting: makes sure of that where nothing else has; None: they are.
        lanes: where there may be a second way beside these groups.
        num_sms: multiprocessors for communication.
        make_carrier: from group, slots, multiprocessors and lanes what takes rows to slots.
        in_float8: hidden states are rounded to float8 on their way to the experts (`float8.py`), and nothing else is.
        make_low_latency: from group, slots and lanes what takes small batches where nothing learns; None: they go as
            others.
        most_tokens: no batch of any rank has more. Then nothing waits for the device: memory is that of the worst case,
            and a forward that does not fit the others' is told a forward later. 0: not known.
        moves: how a token's choices are summed here.

    Raises:
        ConfigError: the package is not there or cannot serve this group.
    """

    combine_order: ClassVar[Literal["logical", "by_rank"]] = "logical"

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots_per_rank: int,
        counts_group: dist.ProcessGroup | None = None,
        meeting: Meeting | None = None,
        lanes: Lanes | None = None,
        *,
        num_sms: int = NUM_SMS,
        make_carrier: Callable[[dist.ProcessGroup, int, int, Lanes], Carrier],
        in_float8: bool = False,
        make_low_latency: Callable[..., LowLatency] | None = None,
        most_tokens: int = 0,
        moves: permute.Moves = permute.PLAIN,
    ) -> None:
        if most_tokens and group.size() > deepep_package.RANKS_OF_A_NODE:
            raise ConfigError(
                f"most_tokens={most_tokens} is for the ranks of one node: DeepEP's kernels between nodes tell the host "
                "how many rows come; leave most_tokens out"
            )
        self._moves = moves
        self._lanes = lanes = lanes or Lanes(Lane(group, counts_group or group))
        self.carrier = make_carrier(group, slots_per_rank, num_sms, lanes)
        self._slots = slots_per_rank
        self._most_tokens = most_tokens
        self._in_float8 = in_float8
        self._low_latency = None if make_low_latency is None else make_low_latency(group, slots_per_rank, lanes=lanes)
        self._meeting = meeting
        self._meet = CountExchange(group, meeting, lanes)
        self._memory = RowMemory()

    def dispatch(
        self,
        hidden_TD: Tensor,
        slots_TK: Tensor | None,
        weights_TK: Tensor,
        *,
        counts: RowCounts | None = None,
        manifest: Route | None = None,
    ) -> Dispatched:
        self._check(hidden_TD, weights_TK)
        if self._low_latency is not None and manifest is None and self._nothing_learns():
            assert slots_TK is not None
            # All ranks take the same way, also where only one has too many tokens for it.
            most = self._meet(slots_TK.new_full((1,), hidden_TD.shape[0])).max()
            if most <= self._low_latency.most_tokens:
                with self.waiting():
                    return self._low_latency.dispatch(hidden_TD, slots_TK, weights_TK)
        elif self._meeting is not None and manifest is None and counts is None:
            assert slots_TK is not None
            nothing = slots_TK.new_empty(0)
            if not self._most_tokens:
                self._meet(nothing)
            elif not self._meeting.has_met:
                self._meet.on_device(nothing)
        weights = weights_TK if self._weights_travel() else None
        rows_MD, weights_M, route = _Dispatch.apply(hidden_TD, weights, slots_TK, manifest, self)
        handle = Handle(self._weights_of_combine(weights_TK, weights_M), hidden_TD.dtype, route)
        return Dispatched(rows_MD, route.counts_S, weights_M if torch.is_grad_enabled() else None, handle)

    def combine(self, out_MD: Tensor, handle: Handle) -> Tensor:
        if isinstance(handle.manifest, LowLatencyRoute):
            assert self._low_latency is not None
            with self.waiting():
                return self._low_latency.combine(out_MD, handle)
        combined_TD: Tensor = _Combine.apply(out_MD, handle, self)
        return combined_TD

    def close(self, deadline: float) -> None:
        self.carrier.close(deadline)

    # -- what the two orders differ in ---------------------------------------------------------------------------------

    def _check(self, hidden_TD: Tensor, weights_TK: Tensor) -> None:
        """Whether such hidden states can be carried; by shapes and dtypes alone, before anything is sent."""
        if 0 < self._most_tokens < hidden_TD.shape[0]:
            raise ConfigError(
                f"a batch of {hidden_TD.shape[0]} tokens with most_tokens={self._most_tokens}: give the largest batch "
                "of any rank, in training and in evaluation, or leave most_tokens out"
            )
        if self._in_float8 and (refused := float8.refusal(hidden_TD, weights_TK)):
            raise ConfigError(refused)

    def _weights_travel(self) -> bool:
        return torch.is_grad_enabled()

    def _weights_of_combine(self, weights_TK: Tensor, weights_M: Tensor | None) -> Tensor:
        return weights_TK.detach()

    def times(self, choices: int) -> int:
        """Rows that a token makes: one for each choice."""
        return choices

    def addresses(self, slots_TK: Tensor) -> Tensor:
        """int64, the slots of each row that is sent."""
        return slots_TK.reshape(-1, 1)

    def results(self, out_MD: Tensor, route: Route, weights: Tensor) -> Tensor:
        """A token's results, weighed and summed: ``[T, D]``."""
        rows_ND, _ = self.homeward(out_MD, None, route)
        return self._moves.sum_choices(rows_ND, self._choices(rows_ND, route), self._memory, weights)

    def gradients(self, grad_MD: Tensor, grad_M: Tensor | None, route: Route) -> tuple[Tensor, Tensor | None]:
        """Those of hidden states, summed in the router's order, and of router weights."""
        rows_ND, grad_N = self.homeward(grad_MD, grad_M, route)
        place_TK = self._choices(rows_ND, route)
        hidden_TD = self._moves.sum_choices(rows_ND, place_TK, self._memory)
        return hidden_TD, None if grad_N is None else grad_N.view(place_TK.shape)

    def homeward(self, rows_MD: Tensor, exact_M: Tensor | None, route: Route) -> tuple[Tensor, Tensor | None]:
        """Rows by slot, and a value of each, back to where their choices were made: ``[N, D]`` and ``[N]``."""
        exact_M1 = None if exact_M is None else exact_M.unsqueeze(1)
        place_U = route.place_UK.reshape(-1).clamp(min=0)  # what is -1 came from nowhere, and goes nowhere
        rows_MD = rows_MD.index_select(0, place_U)
        exact_M1 = None if exact_M1 is None else exact_M1.index_select(0, place_U)
        arrived = row_bytes.pack_sums(rows_MD, exact_M1)
        with self.waiting():
            back = self.carrier.back(arrived, route.ticket)
        exact_dtype = rows_MD.dtype if exact_M is None else exact_M.dtype
        rows_ND, exact_NW = row_bytes.unpack_sums(
            back, rows_MD.shape[1], rows_MD.dtype, exact_M is not None, exact_dtype
        )
        return rows_ND, None if exact_M is None else exact_NW.squeeze(1)

    def _choices(self, rows_ND: Tensor, route: Route) -> Tensor:
        """int64 ``[T, K]``: rows came back where they were sent from."""
        return torch.arange(rows_ND.shape[0], device=rows_ND.device).view(-1, route.choices)

    # -- for both ------------------------------------------------------------------------------------------------------

    def _nothing_learns(self) -> bool:
        """And nothing will: activation checkpointing repeats forwards of training that had no gradients at first."""
        return not torch.is_grad_enabled() and (self._meeting is None or not self._meeting.training)

    def place(self) -> tuple[int, int] | tuple[None, None]:
        """Layer and epoch of the forward that this thread is in, for the names of its phases."""
        return (None, None) if self._meeting is None else self._meeting.place

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, kernels that wait for other ranks are launched, and these may be waited for."""
        with self._lanes.launching(), nullcontext() if self._meeting is None else self._meeting.watch.waiting():
            yield

    def hidden_there(
        self, hidden_TD: Tensor, weights_TK: Tensor | None, slots_TK: Tensor | None, route: Route | None
    ) -> tuple[Tensor, Tensor | None, Route]:
        """Hidden states ``[M, D]`` and weights ``[M]`` by slot, and how they went."""
        pack = float8.pack if self._in_float8 else row_bytes.pack
        rows, route = self.there(pack, hidden_TD, weights_TK, slots_TK, route)
        width, dtype, behind = hidden_TD.shape[1], hidden_TD.dtype, route.place_UK.shape[1]
        if self._in_float8:
            rows_MD = float8.unpack(rows, route.from_M)
        else:
            rows_MD = row_bytes.unpack(rows, route.from_M, width, dtype)
        if weights_TK is None:
            return rows_MD, None, route
        if self._in_float8:
            weights_UK = float8.unpack_weights(rows, behind, weights_TK.dtype)
        else:
            weights_UK = row_bytes.unpack_weights(rows, dtype, width, behind, weights_TK.dtype)
        return rows_MD, weights_UK.reshape(-1).index_select(0, route.choice_M), route

    def there(
        self,
        pack: Callable[[Tensor, Tensor | None, int], Any],
        source_TD: Tensor,
        weights_TK: Tensor | None,
        slots_TK: Tensor | None,
        route: Route | None,
    ) -> tuple[Any, Route]:
        """Rows that arrive, and how they went: a new way by ``slots_TK``, or that of an earlier one."""
        if route is not None:
            rows_NC = pack(source_TD, weights_TK, self.times(route.choices))
            with self.waiting():
                return self.carrier.again(rows_NC, route.ticket), route
        assert slots_TK is not None
        rows_NC = pack(source_TD, weights_TK, self.times(slots_TK.shape[1]))
        with self.waiting():
            most_rows = self._most_tokens * self.times(slots_TK.shape[1])
            arrival = self.carrier.carry(rows_NC, self.addresses(slots_TK), most_rows)
        return arrival.rows_UC, Route.of(arrival, slots_TK.shape[1], self._slots)


class CarriedByRank(Carried):
    """A token goes to each rank once; results are summed on each rank, then over ranks, in bfloat16.

    Args, Raises: as of `Carried`; hidden states must be bfloat16.
    """

    combine_order: ClassVar[Literal["logical", "by_rank"]] = "by_rank"

    def _check(self, hidden_TD: Tensor, weights_TK: Tensor) -> None:
        super()._check(hidden_TD, weights_TK)
        if hidden_TD.dtype != row_bytes.CARRIED:
            raise ConfigError(
                f"combine_order='by_rank' sums bfloat16 over ranks, and these hidden states are {hidden_TD.dtype}: "
                "train in bfloat16 (autocast) or take combine_order='logical'"
            )

    def _weights_travel(self) -> bool:
        return True

    def _weights_of_combine(self, weights_TK: Tensor, weights_M: Tensor | None) -> Tensor:
        assert weights_M is not None
        return weights_M.detach()

    def times(self, choices: int) -> int:
        return 1

    def addresses(self, slots_TK: Tensor) -> Tensor:
        return slots_TK

    def results(self, out_MD: Tensor, route: Route, weights: Tensor) -> Tensor:
        parts_UD = self._summed_here(out_MD, route, weights).to(row_bytes.CARRIED)
        with self.waiting():
            back = self.carrier.back(row_bytes.pack_sums(parts_UD, None), route.ticket)
        width = out_MD.shape[1]
        return back if back.shape[1] == width else back[:, :width].clone()  # no view: the model may go on in place

    def gradients(self, grad_MD: Tensor, grad_M: Tensor | None, route: Route) -> tuple[Tensor, Tensor | None]:
        parts_UD = self._summed_here(grad_MD, route, None).to(row_bytes.CARRIED)
        exact_UK = None
        if grad_M is not None:
            # Each choice is on one rank, and zero from all others.
            place_U = route.place_UK.reshape(-1)
            exact_UK = grad_M.new_zeros(route.place_UK.shape)
            if grad_M.shape[0]:
                exact_U = grad_M.index_select(0, place_U.clamp(min=0))
                exact_UK = torch.where(place_U >= 0, exact_U, 0).view(route.place_UK.shape)
        with self.waiting():
            back = self.carrier.back(row_bytes.pack_sums(parts_UD, exact_UK), route.ticket)
        weights = 0 if exact_UK is None else route.choices
        dtype = parts_UD.dtype if grad_M is None else grad_M.dtype
        grad_TD, grad_TK = row_bytes.unpack_sums(back, grad_MD.shape[1], parts_UD.dtype, weights, dtype)
        return grad_TD, None if grad_M is None else grad_TK

    def _summed_here(self, rows_MD: Tensor, route: Route, weights_M: Tensor | None) -> Tensor:
        """float32 ``[U, D]``: of each token that arrived the results of this rank, in the router's order."""
        total_UD = rows_MD.new_zeros(route.place_UK.shape[0], rows_MD.shape[1], dtype=torch.float32)
        if not rows_MD.shape[0]:
            return total_UD
        for place_U in route.place_UK.unbind(1):
            index_U = place_U.clamp(min=0)
            row_UD = rows_MD.index_select(0, index_U)
            if weights_M is not None:
                row_UD = row_UD * weights_M.index_select(0, index_U).unsqueeze(1)
            total_UD += torch.where((place_U >= 0).unsqueeze(1), row_UD, 0)
        return total_UD


class _Dispatch(torch.autograd.Function):
    """Hidden states and, if they travel, router weights; and the way that they went."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weights_TK: Tensor | None,
        slots_TK: Tensor | None,
        route: Route | None,
        wire: Carried,
    ) -> tuple[Tensor, Tensor | None, Route]:
        rows_MD, weights_M, route = wire.hidden_there(hidden_TD, weights_TK, slots_TK, route)
        ctx.route, ctx.wire, ctx.place = route, wire, wire.place()
        needs = zip((rows_MD, weights_M), ctx.needs_input_grad, strict=False)
        ctx.mark_non_differentiable(*(one for one, need in needs if one is not None and not need))
        return rows_MD, weights_M, route

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_MD: Tensor, grad_M: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        hidden_need, weights_need, *_rest = ctx.needs_input_grad
        with phase("dispatch", "B", *ctx.place):
            hidden, weights = ctx.wire.gradients(grad_MD, grad_M if weights_need else None, ctx.route)
            return hidden if hidden_need else None, weights, None, None, None


class _Combine(torch.autograd.Function):
    """The weighted sum of a token's results. Backward leaves weighing to the experts."""

    @staticmethod
    def forward(ctx: Any, out_MD: Tensor, handle: Handle, wire: Carried) -> Tensor:
        ctx.route, ctx.wire, ctx.dtype, ctx.place = handle.manifest, wire, out_MD.dtype, wire.place()
        return wire.results(out_MD, handle.manifest, handle.weights).to(handle.dtype)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        with phase("combine", "B", *ctx.place):
            grad_TD = grad_TD.to(ctx.dtype)
            rows_UC, route = ctx.wire.there(row_bytes.pack, grad_TD, None, None, ctx.route)
            return row_bytes.unpack(rows_UC, route.from_M, grad_TD.shape[1], ctx.dtype), None, None
