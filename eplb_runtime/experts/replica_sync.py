"""Keep copies and homes together: weights from home to copies, gradients from copies to home.

Both are point to point between the ranks concerned, on a group of their own, in an order that every rank derives from
the placement. Sums are in float32 (float64 for float64 weights) and in the order of the slots: timing changes nothing.
A layer's gradients leave when its backward is through and are added when the next layer's is: one exchange at a time
is on its way, beside the backward of the layers before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ..placement import EMPTY, Placement
from .replicas import ReplicaBank, accumulation_dtype


@dataclass(frozen=True)
class _Copy:
    """A replica slot that concerns this rank: as holder of the copy, or as its home."""

    home_rank: int
    home_row: int
    rank: int
    replica: int


@dataclass(frozen=True)
class _Exchange:
    """Gradients of one layer on their way home; ``arrivals``: for each lent copy, one row per trained tensor."""

    layer: int
    works: list[dist.Work]
    arrivals: list[list[Tensor]]


class ReplicaSync:
    """Weights and gradients of one rank's banks.

    Args:
        banks: one per layer.
        group: the EP group, on the weights' device, used by nothing else.
        ep_rank: this rank in it.
        gradient_divisor: what copies' gradients are divided by, as the homes' are (ranks of the job).
        shared: the banks share their replica rows: copies are fetched layer by layer instead of refreshed at once.
    """

    def __init__(
        self,
        banks: Sequence[ReplicaBank],
        group: dist.ProcessGroup,
        ep_rank: int,
        gradient_divisor: int,
        shared: bool = False,
    ) -> None:
        self._banks = banks
        self._group = group
        self._ep_rank = ep_rank
        self._divisor = gradient_divisor
        self._shared = shared
        self._held: list[list[_Copy]] = [[] for _ in banks]
        self._lent: list[list[_Copy]] = [[] for _ in banks]
        self._has_copies = [False for _ in banks]
        self._pending: list[list[dist.Work]] = [[] for _ in banks]
        self._fetched: int | None = None
        self._exchange: _Exchange | None = None
        self._deferring = False
        self._arrivals: dict[tuple[int, int, torch.Size, torch.dtype], Tensor] = {}

    def follow(self, placement: Placement) -> None:
        """Take over a committed placement: which copies this rank holds, and which of its homes are copied where."""
        self.wait_all()
        self._fetched = None
        slots, homes = placement.slots_per_rank, placement.homes_per_rank
        for layer in range(placement.num_layers):
            held, lent = [], []
            by_rank = placement.physical_to_logical[layer].reshape(placement.num_ranks, slots)[:, homes:]
            for rank, replicas in enumerate(by_rank.tolist()):
                for replica, expert in enumerate(replicas):
                    if expert == EMPTY:
                        continue
                    assert placement.home is not None
                    home = int(placement.home[layer, expert])
                    copy = _Copy(home // slots, home % slots, rank, replica)
                    if rank == self._ep_rank:
                        held.append(copy)
                    if copy.home_rank == self._ep_rank:
                        lent.append(copy)
            self._held[layer], self._lent[layer] = held, lent
            self._has_copies[layer] = bool((by_rank != EMPTY).any())

    def has_copies(self, layer: int) -> bool:
        """Whether any rank holds a copy of an expert of this layer."""
        return self._has_copies[layer]

    # -- weights -------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """The homes' weights are new. Post them to their copies, in layer order; shared rows are fetched when used."""
        if self._shared:
            self.wait_all()
            self._fetched = None
            return
        for layer in range(len(self._banks)):
            self._post_weights(layer)

    def fetch(self, layer: int) -> None:
        """Post this layer's weights to their copies, unless the shared rows hold them already; then `wait`."""
        if self._fetched == layer or not self._has_copies[layer]:
            return
        if self._fetched is not None:
            self.wait(self._fetched)
        self._fetched = layer
        self._post_weights(layer)

    def wait(self, layer: int) -> None:
        """Until this layer's copies are fresh and its homes may change again."""
        for work in self._pending[layer]:
            work.wait()
        self._pending[layer] = []

    def wait_all(self) -> None:
        for layer in range(len(self._banks)):
            self.wait(layer)

    def _post_weights(self, layer: int) -> None:
        self.wait(layer)
        bank = self._banks[layer]
        sends = [
            (copy.rank, parameter[copy.home_row].detach())
            for copy in self._lent[layer]
            for parameter in bank.parameters
        ]
        receives = [(copy.home_rank, row) for copy in self._held[layer] for row in bank.replica_rows(copy.replica)]
        self._pending[layer] = self._post(2 * layer, sends, receives)

    # -- gradients -----------------------------------------------------------------------------------------------

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Gradients of kept copies stay where they are, for as many backward passes as run inside."""
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    def collect(self, layer: int, gradients: Sequence[Tensor | None]) -> None:
        """A layer's backward is through on this rank: take its copies' gradients and send them home. On every rank.

        Args:
            gradients: ``[k, ...]`` per tensor; None where the backward gave none.
        """
        self._finish()
        self._banks[layer].collect(gradients)
        if self._shared or not self._deferring:
            self._send(layer)
            # The engine calls it when this backward pass is over: then every gradient is whole.
            Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def reduce_gradients(self) -> None:
        """Bring home what was deferred. Collective over the ranks concerned."""
        for layer in reversed(range(len(self._banks))):
            if self._banks[layer].unsent:
                self._finish()
                self._send(layer)
        self._finish()

    def _send(self, layer: int) -> None:
        bank = self._banks[layer]
        sends = [(copy.home_rank, row) for copy in self._held[layer] for row in bank.gradient_rows(copy.replica)]
        arrivals = [
            [self._arrival(index, position, p) for position, p in enumerate(bank.trained())]
            for index in range(len(self._lent[layer]))
        ]
        receives = [(copy.rank, row) for copy, rows in zip(self._lent[layer], arrivals, strict=True) for row in rows]
        self._exchange = _Exchange(layer, self._post(2 * layer + 1, sends, receives), arrivals)

    def _finish(self) -> None:
        """Add what has been on its way to the homes' gradients; the copies' are free then."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        for work in exchange.works:
            work.wait()
        bank = self._banks[exchange.layer]
        self._add_to_homes(self._lent[exchange.layer], bank.trained(), exchange.arrivals)
        bank.unsent = False

    @torch.no_grad()
    def _add_to_homes(
        self, lent: Sequence[_Copy], trained: Sequence[Tensor], arrivals: Sequence[Sequence[Tensor]]
    ) -> None:
        """Sum in float32, the home's own first, then the copies in the order of their slots; round once."""
        for home_row in sorted({copy.home_row for copy in lent}):
            for index, parameter in enumerate(trained):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                total = parameter.grad[home_row].to(accumulation_dtype(parameter))
                for copy, rows in zip(lent, arrivals, strict=True):
                    if copy.home_row == home_row:
                        total = total + rows[index] / self._divisor
                parameter.grad[home_row] = total.to(parameter.grad.dtype)

    def _arrival(self, index: int, position: int, parameter: Tensor) -> Tensor:
        """Memory for one copy's gradient of one tensor, kept from layer to layer and step to step."""
        key = (index, position, parameter.shape[1:], accumulation_dtype(parameter))
        if key not in self._arrivals:
            self._arrivals[key] = torch.empty(key[2], dtype=key[3], device=parameter.device)
        return self._arrivals[key]

    # -- the wire ------------------------------------------------------------------------------------------------

    def _post(
        self, channel: int, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> list[dist.Work]:
        operations = [*self._operations(channel, dist.isend, sends), *self._operations(channel, dist.irecv, receives)]
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
        return works

    def _operations(
        self, channel: int, kind: Callable[..., Any], messages: Sequence[tuple[int, Tensor]]
    ) -> list[dist.P2POp]:
        # Several layers are on their way at once: a tag of its own for every message of a pair keeps them apart.
        count: Counter[int] = Counter()
        operations = []
        for rank, row in messages:
            tag = channel * _TAGS_PER_CHANNEL + count[rank]
            count[rank] += 1
            data = row.reshape(-1).view(torch.uint8)
            peer = dist.get_global_rank(self._group, rank)
            operations.append(dist.P2POp(kind, data, peer, self._group, tag=tag))
        return operations


_TAGS_PER_CHANNEL = 1 << 12
