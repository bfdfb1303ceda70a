"""NIXL knows of no streams: what the device has not written is not sent, and what it has not copied has not arrived."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_runtime.distributed.transports import nixl
from eplb_runtime.distributed.transports.base import Message

CPU = torch.device("cpu")
PEER = "the other agent"


class HeldStream:
    """Copies are made when they are let go."""

    def __init__(self) -> None:
        self.done = self.inside = False
        self.waited_for_current = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[int]:
        self.inside = True
        yield 0
        self.inside = False

    def after_current(self) -> None:
        self.waited_for_current += 1

    def mark(self) -> Callable[[], bool]:
        return lambda: self.done


class Agent:
    """Notes come from `notes`; writes are only written down."""

    def __init__(self) -> None:
        self.notes: list[bytes] = []
        self.writes: list[Any] = []
        self.sent: list[bytes] = []

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notes, self.notes = self.notes, []
        return {PEER: notes}

    def initialize_xfer(self, *what: Any) -> Any:
        return what

    def transfer(self, write: Any) -> str:
        self.writes.append(write)
        return "PROC"

    def check_xfer_state(self, write: Any) -> str:
        return "PROC"

    def get_xfer_descs(self, places: Any, kind: str) -> Any:
        return places

    def register_memory(self, region: torch.Tensor) -> Any:
        return region

    def get_partial_agent_metadata(self, *what: Any) -> bytes:
        return b""

    def send_notif(self, name: str, note: bytes) -> None:
        self.sent.append(note)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> tuple[nixl.Nixl, Agent, HeldStream]:
    """A transport of rank 0 with one peer, whose thread is the test."""
    agent, stream = Agent(), HeldStream()
    monkeypatch.setattr(nixl, "new_agent", lambda name: agent)
    transport = nixl.Nixl(SimpleNamespace(rank=lambda: 0, size=lambda: 2), "gloo", CPU, 60.0)  # type: ignore[arg-type]
    transport._traffic[1], transport._rank_of[PEER] = nixl._NixlTraffic(PEER), 1
    transport._thread = threading.current_thread()
    transport._stream = stream  # type: ignore[assignment]
    return transport, agent, stream


def test_what_came_has_not_arrived_before_the_device_has_copied_it(joined: Any) -> None:
    transport, agent, stream = joined
    pending = transport.post([], [Message(1, torch.empty(8, dtype=torch.uint8))])
    agent.notes.append(nixl._HEAD.pack(nixl._WRITTEN, 1, 0))
    transport._step()
    assert not pending.finished.is_set() and not any(pending.here)
    stream.done = True
    transport._step()
    assert pending.finished.is_set() and all(pending.here)


def test_memory_is_not_offered_before_the_device_has_left_it(joined: Any) -> None:
    transport, agent, stream = joined
    transport.post([], [Message(1, torch.empty(8, dtype=torch.uint8))])
    transport._step()
    assert nixl._OFFER not in {nixl._HEAD.unpack_from(note)[0] for note in agent.sent}
    stream.done = True
    transport._step()
    assert [nixl._HEAD.unpack_from(note)[0] for note in agent.sent].count(nixl._OFFER) == 1


def test_giving_up_waits_for_copies_under_way(joined: Any) -> None:
    transport, _, stream = joined
    pending = transport.post([Message(1, torch.ones(8, dtype=torch.uint8))], [])
    held = []

    def mark() -> Callable[[], bool]:
        held.append(bool(transport._regions))
        return lambda: True

    stream.mark = mark
    with transport._state:
        transport._give_up("closed")
    assert held == [True] and pending.problem == "closed"


def test_nothing_is_sent_before_the_device_has_packed_it(joined: Any) -> None:
    transport, agent, stream = joined
    transport.post([Message(1, torch.ones(8, dtype=torch.uint8))], [])
    assert stream.waited_for_current == 1
    agent.notes.append(nixl._HEAD.pack(nixl._OFFER, 0, 0) + nixl._PLACE.pack(1 << 20, 8, 0))
    transport._step()
    assert not agent.writes
    stream.done = True
    transport._step()
    assert len(agent.writes) == 1


def test_copies_are_made_on_the_stream_that_is_waited_for(joined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, agent, stream = joined
    copy, beside = torch.Tensor.copy_, []

    def noted(into: torch.Tensor, *source: Any, **options: Any) -> torch.Tensor:
        beside.append(stream.inside)
        return copy(into, *source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    tensors = [torch.ones(8, dtype=torch.uint8) for _ in range(2)]
    transport.post([Message(1, tensors[0])], [Message(1, tensors[1])])
    agent.notes.append(nixl._HEAD.pack(nixl._WRITTEN, 1, 0))
    transport._step()
    assert beside == [True, True], "one to pack, one to where it belongs"
