"""DeepEP (the package `deep_ep`): experts as rows of tokens, over NVLink inside a node and RDMA between nodes.

DeepEP's calls are collective, and messages are not. So it serves migrations between steps only: every rank of the group
posts once a round, and `post` carries. Ranks tell each other how many bytes go from whom to whom, and make the same
calls, each with the next rows of every pair of ranks. A rank is one of DeepEP's experts here. A row says which one it
is by its router weight, which DeepEP carries along: so nothing depends on the order in which rows arrive, and a row
that is lost is noticed.

The buffer is the one that tokens go by; it is kept when groups are made again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import ConfigError
from ...utils.errors import one_line
from ..consensus import gather_bytes
from ..node_memory import node_of_this_rank
from . import deepep_package
from .base import Message, Pending, PendingGroup, Transport, TransportError
from .progress import SideStream, to_others, try_out, wait_until

ROW_BYTES = 14336
"""A multiple of 32 that one call takes, and the width that DeepEP's own tables are for."""
CHUNK_BYTES = 128 << 20
"""Bytes that a rank sends, and receives, in one call at most: as much to and from each rank."""
_GRACE_SECONDS = 5.0
"""Ranks that know that all have come may take so long to say so, whatever the deadline."""


class DeepEP(Transport):
    """Carries by `deep_ep.Buffer`. Every rank of the group posts equally often, also where it has no messages."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        device: torch.device,
        timeout_seconds: float,
        package: Any = None,
    ) -> None:
        if package is None and device.type != "cuda":
            raise TransportError(f"transport 'deepep': {deepep_package.why_not(device)}")
        self.device = device
        self._group = group
        self._group_device = torch.device("cpu") if backend == "gloo" else device
        self._rank, self._num_ranks = group.rank(), group.size()
        self._most_rows = max(1, CHUNK_BYTES // ROW_BYTES // self._num_ranks)  # from one rank to another in a call
        self._timeout = timeout_seconds
        self._package = package
        self._stream = SideStream(device)
        self._problem = "it is not warmed up"

    def warm_up(self, deadline: float) -> None:
        problem, package = "", self._package
        if package is None:
            problem = deepep_package.why_not(self.device)
            try:
                package = package if problem else deepep_package.imported(asked="transport='deepep'")
            except ConfigError as error:
                problem = str(error)
        word = json.dumps([node_of_this_rank(), problem]).encode()
        said = [json.loads(one) for one in gather_bytes(word, self._group, self._group_device, deadline)]
        nodes = [node for node, _ in said]
        problem = next((f"EP rank {rank}: {text}" for rank, (_, text) in enumerate(said) if text), "")
        if not problem and self._num_ranks > 1 and self._package is None:
            problem = deepep_package.why_not_between(self._num_ranks, min(nodes.count(node) for node in nodes))
        if problem:
            raise TransportError(f"transport 'deepep': {problem}")
        self._problem = ""
        if self._num_ranks == 1:
            return
        try:
            sms = deepep_package.NUM_SMS
            package.Buffer.set_num_sms(sms)
            self._there, back = deepep_package.settings(package, self._num_ranks)
            self._takes_bound = deepep_package.takes_bound(package, self._num_ranks)
            deepep_package.refuse_filled_memory()
            self._buffer = deepep_package.shared_buffer(package, self._group, sms, self._there, back)
        except (RuntimeError, AssertionError, ConfigError) as error:
            raise TransportError(f"transport 'deepep': {one_line(error)}") from error
        try_out(self, (peer for peer in range(self._num_ranks) if peer != self._rank), deadline)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Send and receive; all of it is done then. Collective."""
        if self._problem:
            raise TransportError(f"DeepEP carries no experts any more: {self._problem}")
        out, into = to_others(self._rank, sends, receives)
        if self._num_ranks > 1:
            self._stream.after_current()
            try:
                self._carry(out, list(into.values()), time.monotonic() + self._timeout)
            except Exception as error:  # CUDA, DeepEP, the group
                self._problem = one_line(error)
                raise TransportError(self._problem) from error
        return PendingGroup()

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        """The buffer stays: taking it down would wait for all ranks."""
        self._problem = self._problem or "it is closed"

    def _carry(self, sends: Sequence[Message], receives: Sequence[Message], deadline: float) -> None:
        most = self._most_rows
        rows_RR = [[-(-nbytes // ROW_BYTES) for nbytes in sent_R] for sent_R in self._agree(sends, receives, deadline)]
        whole, deadline = True, max(deadline, time.monotonic()) + self._timeout
        for first in range(0, max(map(max, rows_RR)), most):  # also after a loss: the others make these calls too
            part_RR = [[min(max(rows - first, 0), most) for rows in rows_R] for rows_R in rows_RR]
            with self._stream():
                whole = self._call(sends, receives, part_RR, first, deadline) and whole
        if not whole:
            raise TransportError("rows did not arrive as they were sent")

    def _agree(self, sends: Sequence[Message], receives: Sequence[Message], deadline: float) -> list[list[int]]:
        """Return bytes from each rank (first) to each rank, the same on all; afterwards every rank makes the calls."""
        sizes = [[0] * self._num_ranks for _ in range(2)]
        for of_peer, messages in zip(sizes, (sends, receives), strict=True):
            for message in messages:
                of_peer[message.peer] += message.data.numel()
        try:
            said = gather_bytes(json.dumps(sizes).encode(), self._group, self._group_device, deadline)
            # A rank that gave up before does not come to this one, so no GPU waits for it.
            gather_bytes(b"", self._group, self._group_device, max(deadline, time.monotonic()) + _GRACE_SECONDS)
        except TransportError as error:
            raise TransportError(f"not every rank has come to this round in time: {error}") from error
        of_ranks = [json.loads(word) for word in said]
        for source, (sent_R, _) in enumerate(of_ranks):
            for peer, nbytes in enumerate(sent_R):
                awaited = of_ranks[peer][1][source]
                if nbytes != awaited:
                    raise TransportError(
                        f"EP rank {source} sends {nbytes} bytes where EP rank {peer} waits for {awaited}"
                    )
        return [sent_R for sent_R, _ in of_ranks]

    def _call(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        rows_RR: Sequence[Sequence[int]],
        first: int,
        deadline: float,
    ) -> bool:
        """Carry so many rows from each rank to each, from ``first`` on. Returns whether those for this rank came."""
        going_R, coming_R = rows_RR[self._rank], [rows_R[self._rank] for rows_R in rows_RR]
        count = max(1, sum(going_R))  # where nothing goes, a row to no rank, of number 0
        to_N1, numbers_N1 = torch.full((count, 1), -1, dtype=torch.int64), torch.zeros(count, 1)
        rows_NC = torch.empty(count, ROW_BYTES, dtype=torch.uint8, device=self.device)
        begin = 0
        for peer, rows in enumerate(going_R):
            part = slice(begin, begin + rows)
            to_N1[part], numbers_N1[part, 0] = peer, self._numbers(self._rank, rows)
            for piece, place in _pieces(sends, peer, first, rows):
                rows_NC[part].view(-1)[place].copy_(piece, non_blocking=True)
            begin += rows
        to_N1, numbers_N1 = (t.to(self.device, non_blocking=True) for t in (to_N1, numbers_N1))
        expected_M = torch.cat([self._numbers(source, rows) for source, rows in enumerate(coming_R)])
        of_node = deepep_package.RANKS_OF_A_NODE
        here = self._rank // of_node * of_node  # what crosses to a node comes by the rank of the same place there
        passing = sum(sum(rows_R[here : here + of_node]) for rows_R in rows_RR[self._rank % of_node :: of_node])
        room = max(1, len(expected_M), passing)
        numbers_M, arrived_MC = self._dispatch(rows_NC, to_N1, numbers_N1, len(expected_M), room)
        on_host = numbers_M.to("cpu", non_blocking=True)
        wait_until(self._stream.mark(), deadline, "an exchange by DeepEP")
        if not torch.equal(on_host, expected_M):
            return False
        begin = 0
        for source, rows in enumerate(coming_R):
            for piece, place in _pieces(receives, source, first, rows):
                piece.copy_(arrived_MC[begin : begin + rows].view(-1)[place], non_blocking=True)
            begin += rows
        wait_until(self._stream.mark(), deadline, "copying what DeepEP brought")
        return True

    def _numbers(self, source: int, rows: int) -> Tensor:
        """Return float32 ``[rows]``: numbers from 1 of rows of a rank in one call, ascending with the rank."""
        return torch.arange(1, rows + 1, dtype=torch.float32) + source * self._most_rows

    def _dispatch(
        self, rows_NC: Tensor, to_N1: Tensor, numbers_N1: Tensor, count: int, room: int
    ) -> tuple[Tensor, Tensor]:
        """Send rows of bytes to ranks. Returns what arrives in the order of its numbers: these, float32 ``[M]``, and
        rows of bytes; ``room``: of those, and of rows that pass through. Collective."""
        to_ranks, to_nodes, to_experts, in_rank, _ = self._buffer.get_dispatch_layout(to_N1, self._num_ranks)
        arrived_MC, _, weights_M1, *_ = self._buffer.dispatch(
            rows_NC.view(torch.bfloat16),
            num_tokens_per_rank=to_ranks,
            num_tokens_per_rdma_rank=to_nodes,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=to_experts,
            topk_idx=to_N1,
            topk_weights=numbers_N1,
            num_worst_tokens=room if self._takes_bound else 0,  # inside a node it would wait with Python locked
            config=self._there,
        )
        numbers_M, order_M = weights_M1[:count, 0].sort()
        return numbers_M, arrived_MC.index_select(0, order_M).view(torch.uint8)


def _pieces(messages: Sequence[Message], peer: int, first_row: int, rows: int) -> Iterator[tuple[Tensor, slice]]:
    """Yield parts of the messages to or from a rank that lie in these rows, each with its place in them in bytes."""
    begin = first_row * ROW_BYTES
    end, first = begin + rows * ROW_BYTES, 0
    for message in messages:
        if message.peer != peer:
            continue
        size = message.data.numel()
        low, high = max(begin, first), min(end, first + size)
        if low < high:
            yield message.data[low - first : high - first], slice(low - begin, high - begin)
        first += size
