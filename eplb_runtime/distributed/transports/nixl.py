"""NIXL (extra ``nixl``): one-sided writes with notifications, over UCX: RDMA where there is any, TCP elsewhere.

Who receives says where; who sends writes there, and the notification of the write says that it is done. Writes and not
reads: TCP cannot read from a remote memory, so UCX lets the owner's own progress thread answer, and that thread ends
the owner's *process* when the reader has given up meanwhile (seen with nixl 1.5.1). A cancelled request may still be
carried out later, so a rank that gives up destroys its agent, and with it every way into its memory.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Message, Pending, TransportError, gather_bytes
from .nixl_agent import new_agent
from .progress import PendingMessages, ProgressTransport, to_others, try_out
from .side_stream import LEFT_SECONDS, SideStream, wait_until

SPARE_BYTES = 1 << 16
AT_ONCE = 128
"""Messages in one write, and places in one notification."""
PING_SECONDS = 0.2
"""So often a rank that waits for another looks whether it still answers; only a write or a note finds out."""
SHORTEST_POLL, LONGEST_POLL = 0.0002, 0.002
_HEAD = struct.Struct("<cII")
_PLACE = struct.Struct("<QQQ")
_OFFER, _MEMORY, _WRITTEN, _PING, _GOODBYE = b"O", b"M", b"W", b"P", b"G"


class _Notified(PendingMessages):
    """Attributes:
    spare: registered memory for what is not.
    """

    spare: Tensor | None = None


@dataclass(eq=False)
class _Region:
    """Memory that the agent knows, and peers that were told of it and may write there."""

    memory: Tensor
    handle: Any
    notified: set[int] = field(default_factory=set)

    def holds(self, data: Tensor) -> bool:
        first, start = data.data_ptr(), self.memory.data_ptr()
        return start <= first and first + data.numel() <= start + self.memory.numel()


@dataclass
class _NixlSend:
    """Args:
    data: registered memory that is sent from.
    source: what is copied there, or the same; alive until it is written.
    ready: whether the device has written ``data``.
    """

    data: Tensor
    source: Tensor
    ready: Callable[[], bool]
    pending: _Notified


@dataclass
class _NixlReceive:
    into: Tensor | None
    """Where the bytes go from ``at``; None: they are where they should be."""
    at: Tensor
    number: int
    pending: _Notified


@dataclass
class _NixlTraffic:
    """With one peer. Messages have numbers, as notifications may overtake each other.

    Args:
        name: of its agent.
        sends, receives: by number, not done yet; a send stays until it is written.
        offers: by number, ``(address, bytes, device)``.
        posted, begun: numbers of the next send to be posted, and to be written.
        expected: number of the next receive.
        memories_sent, memories_known: how many registrations the peer was told of, and has told of.
        early: offers of memory that is not known yet, by how many registrations they need.
        writing: writes under way, with the first number and how many.
    """

    name: str
    sends: dict[int, _NixlSend] = field(default_factory=dict)
    receives: dict[int, _NixlReceive] = field(default_factory=dict)
    offers: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    posted: int = 0
    begun: int = 0
    expected: int = 0
    memories_sent: int = 0
    memories_known: int = 0
    early: list[tuple[int, bytes]] = field(default_factory=list)
    writing: list[tuple[Any, int, int]] = field(default_factory=list)
    problem: str = ""


class Nixl(ProgressTransport[_Notified]):
    """Writes through NIXL's UCX agent; the group is only used to exchange addresses."""

    by = "nixl"

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self.device = device
        self.one_by_one = device.type == "cpu"
        self._group = group
        super().__init__(group.rank(), timeout_seconds)
        self._peers = [peer for peer in range(group.size()) if peer != self._rank]
        self._name = f"eplb_runtime {self._rank} {secrets.token_hex(8)}"
        try:
            self._agent: Any = new_agent(self._name)
        except TransportError:
            raise
        except Exception as error:
            raise TransportError(f"nixl cannot be used: {error}") from error
        self._regions: list[_Region] = []
        self._spare: list[Tensor] = []
        self._traffic: dict[int, _NixlTraffic] = {}
        self._rank_of: dict[str, int] = {}
        self._stream = SideStream(device)
        self._arriving: list[tuple[Callable[[], bool], _NixlReceive]] = []
        self._offering: list[tuple[Callable[[], bool], _NixlTraffic, bytes]] = []
        self._ping = 0.0

    def warm_up(self, deadline: float) -> None:
        if self._traffic:
            return
        said = {"name": self._name, "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode()}
        words = gather_bytes(json.dumps(said).encode(), self._group, self.device, deadline)
        try:
            for peer in self._peers:
                theirs = json.loads(words[peer])
                self._agent.add_remote_agent(base64.b64decode(theirs["metadata"]))
                self._traffic[peer] = _NixlTraffic(theirs["name"])
                self._rank_of[theirs["name"]] = peer
        except Exception as error:
            raise TransportError(f"a peer's address cannot be used by nixl: {error}") from error
        gather_bytes(b"", self._group, self.device, deadline)  # nobody writes before all know all
        try_out(self, self._peers, deadline)

    def register(self, regions: Sequence[Tensor]) -> None:
        with self._state:
            self._release()
            for region in regions:
                self._register(region)

    def free_spare(self) -> None:
        with self._state:
            self._spare.clear()
            self._release()

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        out, into = to_others(self._rank, sends, receives)
        with self._state:
            self._stream.after_current()
            pending = _Notified(len(out) + len(into), time.monotonic() + self._timeout, self.give_up)
            if not pending.left:
                return pending
            numbers = pending.expect(self._rank, receives)
            for peer in {message.peer for message in (*out, *into)}:
                self._refuse_if_lost(peer)
            places = self._registered_places([message.data for message in (*into, *out)], pending)
            self._pending.append(pending)
            is_free = self._stream.mark()  # a peer writes past all streams: nothing older may still use that memory
            self._guarded(lambda: self._offer(into, places[: len(into)], numbers, pending, is_free))
            from_places = list(zip(out, places[len(into) :], strict=True))
            with self._stream():
                for message, place in from_places:
                    if place is not message.data:
                        place.copy_(message.data, non_blocking=True)
            ready = self._stream.mark()  # UCX knows of no streams: nothing is sent before the device has written it
            for message, place in from_places:
                traffic = self._traffic[message.peer]
                traffic.sends[traffic.posted] = _NixlSend(place, message.data, ready, pending)
                traffic.posted += 1
            self._run()
        return pending

    def close(self) -> None:
        with self._state:
            self._give_up("the transport is closed")
            thread = self._thread
        if thread is not None:
            thread.join()

    # -- posting -------------------------------------------------------------------------------------------------------

    def _refuse_if_lost(self, peer: int) -> None:
        if not self._problem:
            self._guarded(self._listen)
        self._require_in_use(self._problem)
        traffic = self._traffic.get(peer)
        self._require(peer, None if traffic is None else traffic.problem)

    def _register(self, region: Tensor) -> None:
        if not region.numel() or self._region_of(region) is not None:
            return
        try:
            handle = self._agent.register_memory(region)
            self._regions.append(_Region(region.data, handle))  # a view would keep what it is a view of
        except Exception as error:
            raise TransportError(f"nixl cannot register {region.numel()} bytes: {error}") from error

    def _release(self) -> None:
        """Memory that nobody else has any more is given back: an optimizer may make its state anew in each step."""
        storages = [region.memory.untyped_storage() for region in self._regions]
        ours = Counter(storage._cdata for storage in storages)
        ours.update(set(ours))  # Python's own hold on each
        for region, storage in zip(list(self._regions), storages, strict=True):
            # Peers would go on to believe in memory that they were told of; that is staging memory, which stays.
            if not region.notified and torch._C._storage_Use_Count(storage._cdata) <= ours[storage._cdata]:
                self._regions.remove(region)
                with contextlib.suppress(Exception):  # as little can be done about it as at the end
                    self._agent.deregister_memory(region.handle)

    def _registered_places(self, data: Sequence[Tensor], pending: _Notified) -> list[Tensor]:
        """The tensors themselves where their memory is registered, else as many bytes of memory that is."""
        known = [self._region_of(tensor) is not None for tensor in data]
        needed = sum(tensor.numel() for tensor, there in zip(data, known, strict=True) if not there)
        if needed:
            fitting = [spare for spare in self._spare if spare.numel() >= needed]
            spare = min(fitting, key=Tensor.numel) if fitting else self.empty(max(needed, SPARE_BYTES))
            self._spare = [other for other in self._spare if other is not spare]
            self._register(spare)
            pending.spare = spare
        places, used = [], 0
        for tensor, there in zip(data, known, strict=True):
            if there:
                places.append(tensor)
                continue
            assert pending.spare is not None
            places.append(pending.spare[used : used + tensor.numel()])
            used += tensor.numel()
        return places

    def _region_of(self, data: Tensor) -> _Region | None:
        """The registered memory that a tensor is part of."""
        return next((region for region in self._regions if region.holds(data)), None)

    def _offer(
        self,
        messages: Sequence[Message],
        places: Sequence[Tensor],
        numbers: Sequence[int],
        pending: _Notified,
        is_free: Callable[[], bool],
    ) -> None:
        """Let peers write to these places once they are free."""
        offers: dict[int, list[bytes]] = {}
        first: dict[int, int] = {}
        for message, place, number in zip(messages, places, numbers, strict=True):
            traffic = self._traffic[message.peer]
            into = None if place is message.data else message.data
            first.setdefault(message.peer, traffic.expected)
            traffic.receives[traffic.expected] = _NixlReceive(into, place, number, pending)
            traffic.expected += 1
            self._tell_of(place, message.peer)
            index = place.get_device() if place.is_cuda else 0
            offers.setdefault(message.peer, []).append(_PLACE.pack(place.data_ptr(), place.numel(), index))
        for peer, packed in offers.items():
            traffic = self._traffic[peer]
            for at in range(0, len(packed), AT_ONCE):
                head = _HEAD.pack(_OFFER, traffic.memories_sent, first[peer] + at)
                self._offering.append((is_free, traffic, head + b"".join(packed[at : at + AT_ONCE])))
        self._send_offers()

    def _send_offers(self) -> None:
        while self._offering and self._offering[0][0]():
            _, traffic, note = self._offering.pop(0)
            if not traffic.problem:
                self._agent.send_notif(traffic.name, note)

    def _tell_of(self, place: Tensor, peer: int) -> None:
        """Let a peer write where this is."""
        region, traffic = self._region_of(place), self._traffic[peer]
        if region is not None and peer not in region.notified:
            metadata = self._agent.get_partial_agent_metadata(region.handle, True, ["UCX"])
            self._agent.send_notif(traffic.name, _HEAD.pack(_MEMORY, 0, 0) + metadata)
            region.notified.add(peer)
            traffic.memories_sent += 1

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Until nothing is pending."""
        pause = SHORTEST_POLL
        with torch.no_grad():
            while True:
                with self._state:
                    before = [pending.left for pending in self._pending]
                    self._guarded(self._step)
                    moved = before != [pending.left for pending in self._pending]
                    if not self._pending:
                        self._thread = None
                        return
                pause = SHORTEST_POLL if moved else min(1.5 * pause, LONGEST_POLL)
                time.sleep(pause)

    def _guarded(self, work: Any) -> None:
        """What NIXL raises ends what is pending, on this rank and for its peers."""
        if self._problem:
            self._pending.clear()
            return
        problem = ""
        try:
            work()
        except Exception as error:
            problem = f"nixl: {error}" if str(error) else f"nixl: {type(error).__name__}"
        if problem:  # out here nothing keeps the frames alive that know the agent: it ends when it is let go
            self._give_up(problem)

    def _step(self) -> None:
        self._listen()
        self._send_offers()
        self._end_copies()
        now = time.monotonic()
        for peer, traffic in self._traffic.items():
            if traffic.problem:
                continue
            self._end_writes(peer, traffic)
            self._begin_writes(traffic)
            if now > self._ping and (traffic.receives or traffic.sends):
                self._agent.send_notif(traffic.name, _HEAD.pack(_PING, 0, 0))
        self._ping = now + PING_SECONDS if now > self._ping else self._ping
        for pending in self._pending:
            if pending.finished.is_set() and pending.spare is not None:
                self._spare.append(pending.spare)
                pending.spare = None
        self._drop_finished()
        if self._is_late():
            raise TransportError("messages were not through in time")

    def _listen(self) -> None:
        for name, notes in self._agent.get_new_notifs().items():
            if name in self._rank_of:
                peer = self._rank_of[name]
                for note in notes:
                    self._hear(peer, self._traffic[peer], note)

    def _hear(self, peer: int, traffic: _NixlTraffic, note: bytes) -> None:
        kind, count, number = _HEAD.unpack_from(note)
        rest = note[_HEAD.size :]
        if kind == _MEMORY:
            self._agent.add_remote_agent(rest)
            traffic.memories_known += 1
            early, traffic.early = traffic.early, []
            for needed, offer in early:
                self._hear_offer(traffic, needed, offer)
        elif kind == _OFFER:
            self._hear_offer(traffic, count, note)
        elif kind == _WRITTEN:
            for written in range(number, number + count):
                receive = traffic.receives.pop(written)
                if receive.into is None:
                    self._has_arrived(receive)
                    continue
                with self._stream():
                    receive.into.copy_(receive.at, non_blocking=True)
                self._arriving.append((self._stream.mark(), receive))
        elif kind == _GOODBYE:
            traffic.problem = f"EP rank {peer} does not answer: it has given up"
            if traffic.sends or traffic.receives:
                raise TransportError(traffic.problem)

    def _has_arrived(self, receive: _NixlReceive) -> None:
        receive.pending.here[receive.number] = 1
        receive.pending.one_done()

    def _end_copies(self) -> None:
        """What the device has copied to its place has arrived, and nothing before that."""
        for copied, receive in list(self._arriving):
            if not copied():
                return  # one stream: what comes after it is not done either
            self._arriving.pop(0)
            self._has_arrived(receive)

    def _hear_offer(self, traffic: _NixlTraffic, needed: int, note: bytes) -> None:
        if traffic.memories_known < needed:
            traffic.early.append((needed, note))
            return
        _, _, number = _HEAD.unpack_from(note)
        for index, place in enumerate(_PLACE.iter_unpack(note[_HEAD.size :])):
            traffic.offers[number + index] = place

    def _begin_writes(self, traffic: _NixlTraffic) -> None:
        while True:
            first = end = traffic.begun
            while end < traffic.posted and end in traffic.offers and end - first < AT_ONCE:
                if not traffic.sends[end].ready():
                    break
                end += 1
            if end == first:
                return
            own, theirs = [], []
            for number in range(first, end):
                data, (address, nbytes, index) = traffic.sends[number].data, traffic.offers.pop(number)
                if data.numel() != nbytes:
                    raise TransportError(f"a peer expects {nbytes} bytes and is sent {data.numel()}")
                own.append((data.data_ptr(), nbytes, data.get_device() if data.is_cuda else 0))
                theirs.append((address, nbytes, index))
            kind = "VRAM" if self.device.type == "cuda" else "DRAM"
            write = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(own, kind),
                self._agent.get_xfer_descs(theirs, kind),
                traffic.name,
                _HEAD.pack(_WRITTEN, end - first, first),
            )
            traffic.writing.append((write, first, end - first))
            traffic.begun = end
            if self._agent.transfer(write) == "ERR":
                raise TransportError("a write failed")

    def _end_writes(self, peer: int, traffic: _NixlTraffic) -> None:
        under_way = []
        for write, first, count in traffic.writing:
            state = self._agent.check_xfer_state(write)
            if state == "PROC":
                under_way.append((write, first, count))
                continue
            if state != "DONE":
                raise TransportError(f"a write to EP rank {peer} failed")
            self._agent.release_xfer_handle(write)
            for number in range(first, first + count):
                traffic.sends.pop(number).pending.one_done()
        traffic.writing = under_way

    # -- the end -------------------------------------------------------------------------------------------------------

    def _give_up(self, problem: str) -> None:
        """End all that is pending: without an agent nobody writes here, and nothing here is written elsewhere."""
        if not self._problem:
            self._problem = problem
            for traffic in self._traffic.values():
                with contextlib.suppress(Exception):
                    if not traffic.problem:
                        self._agent.send_notif(traffic.name, _HEAD.pack(_GOODBYE, 0, 0))
            for traffic in self._traffic.values():
                for write, _, _ in traffic.writing:
                    with contextlib.suppress(Exception):
                        self._agent.release_xfer_handle(write)
                traffic.writing.clear()
                with contextlib.suppress(Exception):
                    self._agent.remove_remote_agent(traffic.name)
            for region in self._regions:
                with contextlib.suppress(Exception):
                    self._agent.deregister_memory(region.handle)
            with contextlib.suppress(Exception):  # the device may still copy out of spare memory, or into theirs
                wait_until(self._stream.mark(), time.monotonic() + LEFT_SECONDS, "copies under way")
            self._agent = None
            self._offering.clear()
            self._regions.clear()
            self._spare.clear()
            self._arriving.clear()
        for traffic in self._traffic.values():
            traffic.sends.clear()
            traffic.receives.clear()
        for pending in self._pending:
            pending.fail(problem)
