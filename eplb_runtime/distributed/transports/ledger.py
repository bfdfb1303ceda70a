"""What all ranks have posted, as every rank knows it alike: which messages go in the next exchange, and in which rows.

A carrier whose calls are collective needs to know of everybody's messages. Bookkeeping: no bytes, no communication.
A message goes when both its ends have posted it. Bytes that one rank sends to several at once are a stream of their own
that each of them gets.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .base import Message, TransportError


@dataclass(frozen=True)
class Matched:
    """A message that both sides have posted.

    Args:
        source, peer: ranks of the group.
        sent: which content of which post of the source it is.
        received: which message of which post of the peer takes it.
        nbytes: of it.
    """

    source: int
    peer: int
    sent: tuple[int, int]
    received: tuple[int, int]
    nbytes: int


@dataclass
class Stream:
    """Contents one behind another, in whole rows, from one rank to the same ranks.

    Args:
        peers: who gets it, in ascending order.
        first_row: of the source's rows in this exchange.
        rows: how many.
        contents: which ones, and the byte where each begins in the stream.
    """

    peers: tuple[int, ...]
    first_row: int = 0
    rows: int = 0
    contents: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Exchange:
    """What goes at once, equal on all ranks.

    Args:
        streams: of each rank.
        rows: that each rank sends.
        messages: all of it.
    """

    streams: tuple[tuple[Stream, ...], ...]
    rows: tuple[int, ...]
    messages: tuple[Matched, ...]

    @property
    def most_peers(self) -> int:
        """Of a stream."""
        return max((len(stream.peers) for streams in self.streams for stream in streams), default=0)


def note_of(sends: Sequence[Message], receives: Sequence[Message]) -> tuple[dict[str, Any], list[Tensor]]:
    """What the others have to know of a post, and the contents that it sends; the same bytes to several are one."""
    contents: dict[tuple[int, int], int] = {}
    data: list[Tensor] = []
    out = []
    for message in sends:
        place = (message.data.data_ptr(), message.data.numel())
        if place not in contents:
            contents[place] = len(data)
            data.append(message.data)
        out.append([message.peer, contents[place]])
    note = {
        "sizes": [content.numel() for content in data],
        "sends": out,
        "receives": [[message.peer, message.data.numel()] for message in receives],
    }
    return note, data


class Ledger:
    """Posts of all ranks, written down in one order.

    Args:
        num_ranks: R.
        row_bytes: of a row in which bytes travel.
    """

    def __init__(self, num_ranks: int, row_bytes: int) -> None:
        self._num_ranks = num_ranks
        self._row_bytes = row_bytes
        self._posts = [0] * num_ranks
        self._sends: dict[tuple[int, int], deque[tuple[tuple[int, int], int]]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[tuple[tuple[int, int], int]]] = defaultdict(deque)
        self._matched: list[Matched] = []

    @property
    def due(self) -> bool:
        """Whether there is anything for an exchange."""
        return bool(self._matched)

    def enter(self, rank: int, note: dict[str, Any]) -> None:
        """A rank's next post.

        Raises:
            TransportError: two ranks do not mean the same message.
        """
        post = self._posts[rank]
        self._posts[rank] += 1
        pairs = []
        for peer, content in note["sends"]:
            self._sends[rank, peer].append(((post, content), note["sizes"][content]))
            pairs.append((rank, peer))
        for number, (peer, nbytes) in enumerate(note["receives"]):
            self._receives[peer, rank].append(((post, number), nbytes))
            pairs.append((peer, rank))
        for source, peer in dict.fromkeys(pairs):
            sent, received = self._sends[source, peer], self._receives[source, peer]
            while sent and received:
                (content, nbytes), (into, expected) = sent.popleft(), received.popleft()
                if nbytes != expected:
                    raise TransportError(
                        f"EP rank {source} sends {nbytes} bytes where EP rank {peer} waits for {expected}"
                    )
                self._matched.append(Matched(source, peer, content, into, nbytes))

    def exchange(self) -> Exchange:
        """All that is due; it is due no longer."""
        matched, self._matched = self._matched, []
        by_source: list[dict[tuple[int, int], tuple[int, set[int]]]] = [{} for _ in range(self._num_ranks)]
        for message in matched:
            by_source[message.source].setdefault(message.sent, (message.nbytes, set()))[1].add(message.peer)
        streams, rows = zip(*(streams_of(contents, self._row_bytes) for contents in by_source), strict=True)
        return Exchange(tuple(streams), tuple(rows), tuple(matched))


def streams_of(
    contents: Mapping[tuple[int, int], tuple[int, Iterable[int]]], row_bytes: int
) -> tuple[tuple[Stream, ...], int]:
    """What one source sends, and the rows of all of it.

    Args:
        contents: of each its bytes and who gets it.
        row_bytes: of a row in which bytes travel.
    """
    streams: dict[tuple[int, ...], Stream] = {}
    ends: dict[tuple[int, ...], int] = defaultdict(int)
    for content, (nbytes, to) in sorted(contents.items()):
        peers = tuple(sorted(to))
        streams.setdefault(peers, Stream(peers)).contents[content] = ends[peers]
        ends[peers] += nbytes
    row = 0
    for peers, stream in streams.items():
        stream.first_row, stream.rows = row, -(-ends[peers] // row_bytes)
        row += stream.rows
    return tuple(streams.values()), row
