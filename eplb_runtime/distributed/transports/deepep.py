"""DeepEP (the package `deep_ep`): experts as rows of tokens, over NVLink inside a node and RDMA between nodes.

DeepEP's calls are collective, and messages are not. So it serves migrations between steps only: every rank of the group
posts once a round, and waits for it. Ranks then tell each other how many bytes go from whom to whom, and make the same
calls. A rank is one of DeepEP's experts here.

The buffer is the one that tokens go by; it is kept when groups are made anew.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import ConfigError
from ...utils.errors import one_line
from ..node import node_of_this_rank
from . import deepep_package
from .base import Message, Pending, Transport, TransportError, gather_bytes
from .deepep_rows import (
    ROW_BYTES,
    RowStream,
    addresses,
    as_rows,
    call,
    expected_numbers,
    rows_of,
    spans_of,
    streams_of,
)
from .progress import to_others
from .side_stream import SideStream, wait_until

CHUNK_BYTES = 64 << 20
"""What a rank sends in one call; as much of each other rank can come at once."""
_GRACE_SECONDS = 5.0
"""Ranks that know that all have come may take so long to say so, whatever the deadline."""


@dataclass(eq=False)
class _Post(Pending):
    """One rank's messages of a round. Asking for it carries it by ``transfer``: `poll` waits for the other ranks."""

    transfer: Callable[[_Post, float], None]
    sends: Sequence[Message]
    receives: Sequence[Message]
    end: float
    done: bool = False
    problem: str = ""

    def poll(self) -> bool:
        self.wait(self.end)
        return True

    def wait(self, deadline: float) -> None:
        if not self.done and not self.problem:
            self.transfer(self, min(deadline, self.end))
        if self.problem:
            raise TransportError(self.problem)

    def abort(self) -> None:
        if not self.done:
            self.problem = self.problem or "messages were aborted"


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
        self._timeout = timeout_seconds
        self._package = package
        self._stream = SideStream(device)
        self._posts: list[_Post] = []
        self._lock = threading.Lock()
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
            package.Buffer.set_num_sms(deepep_package.NUM_SMS)
            self._there, back = deepep_package.settings(package, self._num_ranks)
            deepep_package.refuse_filled_memory()
            shared = deepep_package.shared_between(package, self._group)
            self._buffer = shared.buffer(self._group, deepep_package.NUM_SMS, self._there, back)
        except (RuntimeError, AssertionError, ConfigError) as error:
            raise TransportError(f"transport 'deepep': {one_line(error)}") from error
        peers = [peer for peer in range(self._num_ranks) if peer != self._rank]
        out, arrived = self.empty(1).zero_(), self.empty(self._num_ranks)
        self.post(
            [Message(peer, out) for peer in peers], [Message(peer, arrived[peer : peer + 1]) for peer in peers]
        ).wait(deadline)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        if self._problem:
            raise TransportError(f"DeepEP carries no experts any more: {self._problem}")
        out, into = to_others(self._rank, sends, receives)
        post = _Post(self._transfer, out, into, time.monotonic() + self._timeout, done=self._num_ranks == 1)
        if not post.done:
            self._stream.after_current()
            self._posts.append(post)
        return post

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        """The buffer stays: taking it down would wait for all ranks."""
        self._end("it is closed")

    def _transfer(self, post: _Post, deadline: float) -> None:
        """Carry what was posted, in that order, up to this post."""
        with self._lock:
            try:
                while self._posts and not post.done and not post.problem:
                    self._exchange(self._posts[0], deadline)
                    self._posts.pop(0)
            except Exception as error:  # CUDA, DeepEP, the group
                self._end(one_line(error))

    def _end(self, problem: str) -> None:
        self._problem = self._problem or problem
        for post in self._posts:
            post.problem = post.problem or problem
        self._posts.clear()

    def _exchange(self, post: _Post, deadline: float) -> None:
        """Carry out one round, with all ranks."""
        sent_RR = self._agree(post, deadline)
        streams_R = [streams_of(sent_R) for sent_R in sent_RR]
        rows, chunk = max(_rows(streams) for streams in streams_R), CHUNK_BYTES // ROW_BYTES
        whole, deadline = True, max(deadline, time.monotonic()) + self._timeout
        for first in range(0, rows, chunk):  # all of it, also after a loss: the others make these calls too
            with self._stream():
                whole = self._call(post, streams_R, first, chunk, deadline) and whole
        if post.problem:
            raise TransportError(post.problem)
        if not whole:
            raise TransportError("rows did not arrive as they were sent: a rank has given up meanwhile")
        post.done = True

    def _agree(self, post: _Post, deadline: float) -> list[list[int]]:
        """Return bytes from each rank (first) to each rank, the same on all; afterwards every rank makes the calls."""
        sizes = [[0] * self._num_ranks for _ in range(2)]
        for of_peer, messages in zip(sizes, (post.sends, post.receives), strict=True):
            for message in messages:
                of_peer[message.peer] += message.data.numel()
        try:
            said = gather_bytes(json.dumps(sizes).encode(), self._group, self._group_device, deadline)
            # A rank that gave up before does not come to this one, so nobody waits on its GPU for it.
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
        self, post: _Post, streams_R: Sequence[Sequence[RowStream]], first: int, chunk: int, deadline: float
    ) -> bool:
        """Rows ``first`` to ``first + chunk`` of every rank. Whether those that were to come have come."""
        mine = spans_of(streams_R[self._rank], first, chunk)
        to_N1, numbers_N1 = addresses(mine, self._rank * chunk, first)
        flat = torch.empty(len(to_N1) * ROW_BYTES, dtype=torch.uint8, device=self.device)
        if post.problem:
            numbers_N1.zero_()  # its memory may be somebody else's by now: these rows are no expert's
        for part, rows in zip(mine, rows_of(mine), strict=True):
            for piece, place in _pieces(post.sends, part.stream.peer, part.first_byte, part.nbytes):
                flat[rows.start * ROW_BYTES :][place].copy_(piece, non_blocking=True)
        coming = [
            (source, part)
            for source, streams in enumerate(streams_R)
            for part in spans_of(streams, first, chunk)
            if self._rank == part.stream.peer
        ]
        expected_M = expected_numbers([(source * chunk - first, part) for source, part in coming])
        to_N1, numbers_N1 = (t.to(self.device, non_blocking=True) for t in (to_N1, numbers_N1))
        numbers_M, bytes_M = call(
            self._buffer, self._there, self._num_ranks, as_rows(flat), to_N1, numbers_N1, len(expected_M)
        )
        on_host = numbers_M.to("cpu", non_blocking=True)
        wait_until(self._stream.mark(), deadline, "an exchange by DeepEP")
        if post.problem or not torch.equal(on_host, expected_M):
            return False
        begin = 0
        for source, part in coming:
            for piece, place in _pieces(post.receives, source, part.first_byte, part.nbytes):
                piece.copy_(bytes_M[begin:][place], non_blocking=True)
            begin += part.nbytes
        wait_until(self._stream.mark(), deadline, "copying what DeepEP brought")
        return True


def _rows(streams: Sequence[RowStream]) -> int:
    return sum(stream.rows for stream in streams)


def _pieces(messages: Sequence[Message], peer: int, begin: int, nbytes: int) -> Iterator[tuple[Tensor, slice]]:
    """Yield parts of the messages to or from a rank that lie in some bytes of all of them, each with its place in
    those."""
    first = 0
    for message in messages:
        if message.peer != peer:
            continue
        size = message.data.numel()
        low, high = max(begin, first), min(begin + nbytes, first + size)
        if low < high:
            yield message.data[low - first : high - first], slice(low - begin, high - begin)
        first += size
