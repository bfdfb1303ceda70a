"""Ranks of one machine that have found each other: short notes through pipes, flags in shared memory, the end of a
process as the kernel tells it.

A pipe and a flag's page have no name: others open them through their owner's process (`segments`), so there is nothing
to guess and nothing to clean up. No bytes of experts here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ...config import launcher_environment
from .base import TransportError, first_problem, gather_bytes
from .segments import Segment, open_segment

_NOTE = struct.Struct("<IIQQQQQ")
_AT_ONCE = select.PIPE_BUF // _NOTE.size * _NOTE.size
"""Bytes of notes that the kernel writes whole or not at all, whoever else writes to that pipe."""
_SECRET, _CLOSED, _BUSY = 0, 1, 2


class Kind(IntEnum):
    """What a note says."""

    OFFER = 1
    """Here is memory for your next message: ``identity descriptor size offset nbytes``."""
    WRITTEN = 2
    """The oldest memory that you have offered me and I have not written yet is written."""
    FREED = 3
    """A segment of mine is gone: ``identity``."""
    GOODBYE = 4
    """I write and read no more."""


@dataclass(frozen=True)
class Notification:
    kind: Kind
    source: int
    identity: int = 0
    descriptor: int = 0
    size: int = 0
    offset: int = 0
    nbytes: int = 0

    def encode(self) -> bytes:
        numbers = (self.identity, self.descriptor, self.size, self.offset, self.nbytes)
        return _NOTE.pack(self.kind, self.source, *numbers)


class PeerFlags:
    """A page of a rank's own that its neighbours can see: that it is who it says, where it writes now, whether it has
    given up."""

    def __init__(self, ranks: int) -> None:
        self.segment = Segment(8 * (_BUSY + ranks))
        self._words: NDArray[np.int64] = self.segment.tensor.view(torch.int64).numpy()
        self._words[_SECRET] = secrets.randbits(62)

    @property
    def secret(self) -> int:
        return int(self._words[_SECRET])

    def close(self) -> None:
        self._words[_CLOSED] = 1

    def write_to(self, rank: int, now: bool) -> None:
        self._words[_BUSY + rank] = now


@dataclass
class Neighbour:
    """Another rank of this machine, and what it has been told.

    Args:
        rank: within the group.
        process: its id.
        end: readable when the process has ended (a pidfd).
        inbox: where notes to it are written.
        words: its card.
        outbox: notes that its pipe had no room for, and what is called when one is written.
    """

    rank: int
    process: int
    end: int
    inbox: int
    words: NDArray[np.int64]
    outbox: deque[tuple[bytes, Callable[[], None]]] = field(default_factory=deque)

    @property
    def closed(self) -> bool:
        return bool(self.words[_CLOSED])

    def writes_to(self, rank: int) -> bool:
        return bool(self.words[_BUSY + rank])

    @property
    def ended(self) -> bool:
        return bool(wait_for([self.end], [], 0.0))

    def send(self) -> None:
        """Write as many of the notes as there is room for."""
        while self.outbox:
            taken: list[tuple[bytes, Callable[[], None]]] = []
            while self.outbox and (len(taken) + 1) * _NOTE.size <= _AT_ONCE:
                taken.append(self.outbox.popleft())
            try:
                os.write(self.inbox, b"".join(note for note, _ in taken))
            except BlockingIOError:
                self.outbox.extendleft(reversed(taken))
                return
            except OSError:
                self.outbox.extendleft(reversed(taken))
                self.forget()  # its process has ended, which others notice
                return
            for _, written in taken:
                written()

    def forget(self) -> None:
        """Nobody hears notes to it any more: they count as written, so that nobody waits for that."""
        while self.outbox:
            self.outbox.popleft()[1]()

    def close(self) -> None:
        for descriptor in (self.end, self.inbox):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def wait_for(readable: Sequence[int], writable: Sequence[int], seconds: float) -> bool:
    """Until one of these descriptors is ready; whether one is."""
    poll = select.poll()
    for descriptors, event in ((readable, select.POLLIN), (writable, select.POLLOUT)):
        for descriptor in descriptors:
            poll.register(descriptor, event)
    return bool(poll.poll(seconds * 1e3))


class Mailbox:
    """The pipe in which this rank is told things."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""

    def read(self) -> list[Notification]:
        """What has come since."""
        data = self._rest
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.reading, 1 << 16):
                data += piece
        whole = len(data) // _NOTE.size * _NOTE.size
        self._rest = data[whole:]
        return [Notification(Kind(kind), *numbers) for kind, *numbers in _NOTE.iter_unpack(data[:whole])]

    def close(self) -> None:
        for descriptor in (self.reading, self.writing):
            os.close(descriptor)


def node_of_this_rank() -> str:
    """Equal on ranks that the launcher has put on the same node of the same machine, and sees as such.

    Memory crosses namespaces of the network and of names, so the launcher's word counts beside the kernel's.
    """
    environment = launcher_environment()
    kernel = Path("/proc/sys/kernel/random/boot_id")
    machine = kernel.read_text().strip() if kernel.exists() else ""
    node = environment.get("GROUP_RANK", environment.get("SLURM_NODEID", ""))
    return f"{os.uname().nodename}/{machine}/{node}"


def introduce(inbox: Mailbox, card: PeerFlags) -> bytes:
    """What the others need to find this rank."""
    said = {
        "node": node_of_this_rank(),
        "process": os.getpid(),
        "inbox": inbox.writing,
        "card": [card.segment.descriptor, card.segment.identity, card.segment.nbytes],
        "secret": card.secret,
    }
    return json.dumps(said).encode()


def neighbour_of(rank: int, introduction: bytes) -> Neighbour:
    """The rank that said this.

    Raises:
        TransportError: it is on another node, or its memory cannot be opened from here.
    """
    said: dict[str, Any] = json.loads(introduction)
    if said["node"] != node_of_this_rank():
        raise TransportError(f"EP rank {rank} is on another node ({said['node']}): shared memory does not reach it")
    process = int(said["process"])
    end = inbox = -1
    try:
        end = os.pidfd_open(process)
        words: NDArray[np.int64] = open_segment(process, *said["card"]).view(torch.int64).numpy()
        if int(words[_SECRET]) != said["secret"]:
            raise OSError(f"process {process} is another than EP rank {rank} (containers with processes of their own?)")
        inbox = os.open(f"/proc/{process}/fd/{said['inbox']}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError) as error:
        for descriptor in (end, inbox):
            if descriptor >= 0:
                os.close(descriptor)
        raise TransportError(f"memory of EP rank {rank} cannot be opened from here: {error}") from error
    return Neighbour(rank, process, end, inbox, words)


def neighbours_of(
    group: dist.ProcessGroup,
    device: torch.device,
    inbox: Mailbox,
    card: PeerFlags,
    peers: Sequence[int],
    deadline: float,
) -> dict[int, Neighbour]:
    """These ranks of a group, by number. Collective over the group.

    Args:
        device: that the group's backend works on.
        deadline: a time of `time.monotonic`.

    Raises:
        TransportError: some rank cannot open another's memory; on every rank.
    """
    words = gather_bytes(introduce(inbox, card), group, device, deadline)
    found: dict[int, Neighbour] = {}
    problem = ""
    try:
        for peer in peers:
            found[peer] = neighbour_of(peer, words[peer])
    except TransportError as error:
        problem = str(error)
    # Who cannot open another's memory says so to all, or they would wait for it.
    failed = first_problem(problem, group, device, deadline)
    if failed is not None:
        for neighbour in found.values():
            neighbour.close()
        raise TransportError(f"EP rank {failed.index}: {failed.text}")
    return found
