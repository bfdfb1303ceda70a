"""NIXL knows of no streams: what the device has not written is not sent, and what it reads is not written over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eplb_runtime.distributed.transports.nixl import _NOTE, _AgentWindow
from eplb_runtime.distributed.transports.windows import ARRIVED, TAKEN

PEER, ADDRESS, PIECE = "the other agent", 1 << 30, 64


class HeldStream:
    done = False

    def mark(self) -> Any:
        return lambda: self.done


class Agent:
    """Writes and notes are only written down."""

    def __init__(self) -> None:
        self.writes: list[Any] = []
        self.sent: list[tuple[int, int]] = []
        self.come: list[tuple[int, int]] = []
        self.state = "PROC"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        came, self.come = self.come, []
        return {PEER: [_NOTE.pack(*note) for note in came], "a stranger": [_NOTE.pack(ARRIVED, 9)]}

    def get_xfer_descs(self, places: Any, kind: str) -> Any:
        return places

    def initialize_xfer(self, *what: Any) -> Any:
        return what

    def transfer(self, write: Any) -> str:
        self.writes.append(write)
        return self.state

    def check_xfer_state(self, write: Any) -> str:
        return self.state

    def release_xfer_handle(self, write: Any) -> None:
        assert write in self.writes

    def send_notif(self, name: str, note: bytes) -> None:
        self.sent.append(_NOTE.unpack(note))


@pytest.fixture
def joined() -> tuple[_AgentWindow, Agent, HeldStream]:
    agent, stream = Agent(), HeldStream()
    memory = torch.zeros(2 * 2 * 2 * PIECE, dtype=torch.uint8)
    window = _AgentWindow(memory, 0, 2, PIECE, stream, agent, None)  # type: ignore[arg-type]
    window.add(1, PEER, ADDRESS, 0)
    return window, agent, stream


def test_nothing_is_sent_before_the_device_has_packed_it(joined: Any) -> None:
    window, agent, stream = joined
    window.write(1, 1, torch.ones(8, dtype=torch.uint8))
    has_left = window.tell(1, ARRIVED, 1)
    window.notes()
    assert not agent.writes and not agent.sent
    stream.done = True
    window.notes()
    ((_, (own,), (theirs,), name, note),) = agent.writes
    assert own == (window._outbox_RHB[1, 1].data_ptr(), 8, 0) and theirs == (ADDRESS + PIECE, 8, 0)
    assert (name, _NOTE.unpack(note)) == (PEER, (ARRIVED, 1)) and not has_left()
    agent.state = "DONE"
    window.notes()
    assert has_left() and not agent.sent


def test_a_peer_is_told_of_room_only_when_the_device_has_copied_out(joined: Any) -> None:
    window, agent, stream = joined
    told = window.tell(1, TAKEN, 3)
    window.notes()
    assert not told() and not agent.sent
    stream.done = True
    window.notes()
    assert told() and agent.sent == [(TAKEN, 3)]


def test_a_piece_counts_when_those_before_it_are_here(joined: Any) -> None:
    window, agent, _ = joined
    for agent.come, arrived in (([(ARRIVED, 2)], 0), ([(ARRIVED, 3), (ARRIVED, 1)], 3), ([(TAKEN, 2), (TAKEN, 1)], 3)):
        assert window.notes()[1][ARRIVED] == arrived
    assert window.notes()[1][TAKEN] == 2 and not any(window.notes()[0])
