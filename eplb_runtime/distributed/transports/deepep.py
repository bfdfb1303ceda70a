"""DeepEP (the package `deep_ep`): experts as rows of tokens, over NVLink inside a node and RDMA between nodes.

DeepEP's calls are collective, and messages are not: so ranks write what they post into a log that all read alike
(`common_log.py`, `ledger.py`), and what both sides have posted goes in one exchange that every rank enters, also one
that has posted nothing. Before, each says that it is there: nobody waits on its GPU for a rank that does not come. A
rank is one of DeepEP's experts here, and bytes for several ranks are sent once, as a token with several experts.

The buffer is the one that tokens go by, in an order that all ranks keep (`turns.py`); it is kept when groups are made
anew.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import ConfigError
from ...utils.errors import one_line
from . import deepep_package
from .base import Message, Pending, Transport, TransportError
from .common_log import CommonLog
from .counted import Counted, to_others
from .deepep_rows import ROW_BYTES, Part, call, expected_numbers, parts_of, rows_to_send
from .ledger import Exchange, Ledger, note_of
from .meeting import tell_all
from .neighbours import node_of_this_rank
from .side_stream import SideStream, wait_until

CHUNK_BYTES = 64 << 20
"""What a rank sends in one call; as much of each other rank can come at once."""
_LEFT_SECONDS = 5.0
"""An exchange that all ranks have entered may take so long after somebody has given up."""


@dataclass
class _Post:
    """What this rank has posted: contents that go, messages that come."""

    contents: list[Tensor]
    receives: Sequence[Message]
    pending: Counted


class DeepEP(Transport):
    """Carries by `deep_ep.Buffer`.

    Args:
        group: the migration group; used to meet, and to make the buffer if nobody has.
        backend: its backend's name.
        device: the model's.
        timeout_seconds: nothing that was posted is waited for longer, whatever the deadline.
        package: `deep_ep`; None: imported.

    Raises:
        TransportError: the model is not on a GPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        device: torch.device,
        timeout_seconds: float,
        package: Any = None,
    ) -> None:
        if package is None and device.type != "cuda":
            raise TransportError(f"transport 'deepep': {deepep_package.missing(device)}")
        self.device = device
        self._group = group
        self._meeting_device = torch.device("cpu") if backend == "gloo" else device
        self._rank, self._num_ranks = group.rank(), group.size()
        self._timeout = timeout_seconds
        self._package = package
        self._stream = SideStream(device)
        self._ledger = Ledger(self._num_ranks, ROW_BYTES)
        self._posts: dict[int, _Post] = {}
        self._number = 0
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._ready_until = inf
        self._gone = threading.Event()
        self._said_gone = False
        self._problem = "it is not warmed up"

    def warm_up(self, deadline: float) -> None:
        problem, package = "", self._package
        if package is None:
            problem = deepep_package.missing(self.device)
            try:
                package = package if problem else deepep_package.imported(asked="transport='deepep'")
            except ConfigError as error:
                problem = str(error)
        word = json.dumps([node_of_this_rank(), problem, secrets.token_hex(8)]).encode()
        said = [json.loads(one) for one in tell_all(self._group, self._meeting_device, word, deadline)]
        nodes = [node for node, _, _ in said]
        problem = next((f"EP rank {rank}: {text}" for rank, (_, text, _) in enumerate(said) if text), "")
        if not problem and self._num_ranks > 1 and self._package is None:
            problem = deepep_package.unfit(self._num_ranks, min(nodes.count(node) for node in nodes))
        if problem:
            raise TransportError(f"transport 'deepep': {problem}")
        self._problem = ""
        if self._num_ranks == 1:
            return
        self._shared = deepep_package.shared_between(package, self._group)
        try:
            package.Buffer.set_num_sms(deepep_package.NUM_SMS)
            self._there, back = deepep_package.settings(package, self._num_ranks)
            deepep_package.refuse_filled_memory()
            self._buffer = self._shared.buffer(self._group, deepep_package.NUM_SMS, self._there, back)
        except (RuntimeError, AssertionError, ConfigError) as error:
            raise TransportError(f"transport 'deepep': {one_line(error)}") from error
        store = self._group.get_group_store()
        self._log = CommonLog(store, f"transport {said[0][2]}", self._rank, self._num_ranks)
        self._thread = threading.Thread(target=self._work, daemon=True, name="eplb_runtime transport")
        self._thread.start()
        peers = [peer for peer in range(self._num_ranks) if peer != self._rank]
        out, arrived = self.empty(1).zero_(), self.empty(self._num_ranks)
        self.post(
            [Message(peer, out) for peer in peers], [Message(peer, arrived[peer : peer + 1]) for peer in peers]
        ).wait(deadline)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        out, into = to_others(self._rank, sends, receives)
        with self._lock:
            if self._problem:
                raise TransportError(f"DeepEP carries no experts any more: {self._problem}")
            pending = Counted(len(out) + len(into), time.monotonic() + self._timeout, self.give_up)
            if pending.left:
                self._stream.after_current()
                note, contents = note_of(out, into)
                self._posts[self._number] = _Post([content.detach() for content in contents], into, pending)
                self._number += 1
                self._log.write(note)
        return pending

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        """The buffer stays: taking it down would wait for all ranks."""
        if self._thread is not None:
            self._say_gone("it is closed")
            self._thread.join(_LEFT_SECONDS)
        self._end("it is closed")
        if self._thread is not None:
            self._log.close(_LEFT_SECONDS)

    def give_up(self, pending: Counted, reason: str) -> None:
        """End everything that is not done yet; afterwards nothing of it is read or written."""
        if not pending.finished.is_set():
            self._say_gone(reason)
            # If all ranks have entered an exchange before they could hear of it, that ends first.
            self._gone.wait(_LEFT_SECONDS)
            self._end(reason)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            while not self._gone.is_set():
                word = self._log.next(self._deadline())
                if word is not None:
                    self._hear(word)
                elif self._said_gone:
                    self._end("the launcher's store does not answer")
                else:
                    self._say_gone("messages were not through in time")
        except Exception as error:  # CUDA, DeepEP, the store
            self._say_gone(one_line(error))
            self._end(one_line(error))
        finally:
            self._shared.turns.release(self)

    def _deadline(self) -> float:
        if self._said_gone:
            return time.monotonic() + _LEFT_SECONDS
        with self._lock:
            return min([self._ready_until, *(post.pending.end for post in self._posts.values())])

    def _hear(self, word: dict[str, Any]) -> None:
        """The next word of the log; all ranks hear them in one order, and so they enter exchanges in one order."""
        rank = word["rank"]
        if "gone" in word:
            self._end(word["gone"] if rank == self._rank else f"EP rank {rank} has given up ({word['gone']})")
            return
        if "go" in word:
            self._ready_until = inf
            self._exchange(self._ledger.exchange(), word["go"])
        else:
            self._ledger.enter(rank, word)
        if self._ledger.due and self._ready_until == inf:
            self._ready_until = time.monotonic() + self._timeout
            # Others are waited for no longer than leaves time for the exchange itself.
            self._log.ready(self._shared.turns.hold(self, time.monotonic() + self._timeout / 4))

    def _exchange(self, exchange: Exchange, turn: int) -> None:
        """Every rank is here.

        Args:
            turn: behind so many calls with tokens it goes.
        """
        deadline, chunk, whole = time.monotonic() + self._timeout, CHUNK_BYTES // ROW_BYTES, True
        try:
            self._shared.turns.reach(turn, deadline)
            for first in range(0, max(exchange.rows), chunk):  # all of it, also after a loss: the others enter it too
                with self._stream():
                    whole = self._carry(exchange, first, chunk, deadline) and whole
        finally:
            self._shared.turns.release(self)
        if not whole:
            raise TransportError("rows did not arrive as they were sent: a rank has given up meanwhile")
        with self._lock:
            for message in exchange.messages:
                for rank, (number, _) in ((message.source, message.sent), (message.peer, message.received)):
                    if rank == self._rank:
                        self._posts[number].pending.one_done()
            self._posts = {n: post for n, post in self._posts.items() if not post.pending.finished.is_set()}

    def _carry(self, exchange: Exchange, first: int, chunk: int, deadline: float) -> bool:
        """One call: rows ``first`` to ``first + chunk`` of every rank. Whether those that were to come have come."""
        mine = parts_of(exchange.streams[self._rank], first, chunk)
        rows_NC, to_NK, numbers_NK = rows_to_send(
            mine, self._content, self._rank * chunk, first, exchange.most_peers, self.device
        )
        coming = [
            (source, part)
            for source, streams in enumerate(exchange.streams)
            for part in parts_of(streams, first, chunk)
            if self._rank in part.stream.peers
        ]
        expected_M = expected_numbers([(source * chunk - first, part) for source, part in coming])
        numbers_M, bytes_M = call(
            self._buffer, self._there, self._num_ranks, rows_NC, to_NK, numbers_NK, len(expected_M)
        )
        on_host = numbers_M.to("cpu", non_blocking=True)
        wait_until(self._stream.mark(), deadline, "an exchange by DeepEP")
        if not torch.equal(on_host, expected_M):
            return False
        self._deliver(exchange, [part for _, part in coming], [source for source, _ in coming], bytes_M)
        wait_until(self._stream.mark(), deadline, "copying what DeepEP brought")
        return True

    def _content(self, content: tuple[int, int]) -> Tensor | None:
        """Bytes that this rank sends; None: it has given them up."""
        with self._lock:
            post = self._posts.get(content[0])
            return None if post is None or post.pending.finished.is_set() else post.contents[content[1]]

    def _deliver(self, exchange: Exchange, parts: list[Part], sources: list[int], bytes_M: Tensor) -> None:
        """Copy what has come to where it belongs, unless that was given up."""
        into = {(message.source, message.sent): message for message in exchange.messages if message.peer == self._rank}
        begin = 0
        for source, part in zip(sources, parts, strict=True):
            arrived = bytes_M[begin : begin + part.nbytes]
            begin += part.nbytes
            for content, inside, outside in part.overlaps(
                lambda content, source=source: into[source, content].nbytes  # type: ignore[misc]
            ):
                number, which = into[source, content].received
                with self._lock:
                    post = self._posts.get(number)
                    if post is not None and not post.pending.finished.is_set():
                        post.receives[which].data[outside].copy_(arrived[inside], non_blocking=True)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _say_gone(self, reason: str) -> None:
        """Tell all ranks, once, that nothing goes from here or to here any more."""
        with self._lock:
            if not self._said_gone and self._thread is not None:
                self._said_gone = True
                self._log.write({"gone": reason})

    def _end(self, problem: str) -> None:
        with self._lock:
            self._problem = self._problem or problem
            for post in self._posts.values():
                post.pending.fail(self._problem)
            self._posts.clear()
        self._gone.set()
