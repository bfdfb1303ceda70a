"""NIXL (extra ``nixl``): writes into windows (`windows.py`) over UCX: RDMA where there is any, else TCP.

Writes and not reads: TCP cannot read from a remote memory, so UCX lets the owner's own progress thread answer, which
ends the owner's *process* when the reader has given up meanwhile (seen with nixl 1.5.1). UCX knows of no streams: a
write begins when the device has written what it sends.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import logging
import os
import secrets
import struct
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...utils.text import one_line
from .base import SideStream, TransportError
from .windows import ARRIVED, GOODBYE, HALVES, KINDS, Window, Windows, piece_bytes_for

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
_DEVICES = Path("/sys/class/infiniband")
_WITHOUT_SHARED_MEMORY = "TLS=^sm"
"""UCX must not write into another process without its help: nothing could end that."""
_NOTE = struct.Struct("<BQ")
_ASK = KINDS
"""A kind of note that says nothing: only a write or a note finds out that a rank is gone."""


def rdma_devices() -> list[str]:
    """Return the names of this host's RDMA devices."""
    return sorted(device.name for device in _DEVICES.iterdir()) if _DEVICES.is_dir() else []


def why_not() -> str:
    """Return what this process lacks to use NIXL, or "". Makes an agent and destroys it."""
    try:
        new_agent(f"probe {secrets.token_hex(8)}")
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def new_agent(name: str) -> Any:
    """Return an agent of NIXL's with the UCX back end; TransportError: it cannot be made."""
    found = next((package for package in PACKAGES if importlib.util.find_spec(package)), None)
    if found is None:
        raise TransportError("the nixl package is not installed: pip install 'eplb-runtime[nixl]'")
    try:
        api = importlib.import_module(f"{found}._api")
        api.logger.setLevel(logging.WARNING)  # else each agent says so on the standard output
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
        agent.create_backend("UCX", {} if "UCX_TLS" in os.environ else {"engine_config": _WITHOUT_SHARED_MEMORY})
    except Exception as error:
        raise TransportError(f"nixl cannot be used: {one_line(error)}") from error
    return agent


class Nixl(Windows):
    """Writes into the windows of other ranks through NIXL's UCX agent."""

    by = "nixl"

    def _open(self, deadline: float) -> Window:
        name, ranks = f"eplb_runtime {self._rank} {secrets.token_hex(8)}", self._num_ranks
        agent = new_agent(name)
        piece_bytes = piece_bytes_for(2 * ranks)  # of what comes in, and as much for what goes out
        memory = torch.empty(2 * ranks * HALVES * piece_bytes, dtype=torch.uint8, device=self.device)
        try:
            handle = agent.register_memory(memory)
        except Exception as error:
            raise TransportError(f"nixl cannot register {memory.numel()} bytes: {error}") from error
        metadata = base64.b64encode(agent.get_agent_metadata()).decode()
        said = self._gather([name, metadata, memory.data_ptr(), max(0, memory.get_device())], deadline)
        window = _AgentWindow(memory, self._rank, ranks, piece_bytes, self._stream, agent, handle)
        try:
            for peer, (of_peer, theirs, address, index) in enumerate(said):
                if peer != self._rank:
                    agent.add_remote_agent(base64.b64decode(theirs))
                    window.add(peer, of_peer, address, index)
        except Exception as error:
            raise TransportError(f"a peer's address cannot be used by nixl: {error}") from error
        return window

    def close(self) -> None:
        window = self._window
        super().close()
        if isinstance(window, _AgentWindow):
            window.end()


class _AgentWindow(Window):
    """A window that others write into through their agents: notes are notifications, which may overtake each other."""

    def __init__(
        self, memory: Tensor, rank: int, ranks: int, piece_bytes: int, stream: SideStream, agent: Any, handle: Any
    ) -> None:
        super().__init__(memory, rank, ranks, piece_bytes)
        self._outbox_RHB = self._rest.view(ranks, HALVES, piece_bytes)
        self._memory, self._handle, self._stream, self._agent = memory, handle, stream, agent
        self._kind = "VRAM" if memory.is_cuda else "DRAM"
        self._peers: dict[int, tuple[str, int, int]] = {}  # name, address of the window, its device
        self._rank_of: dict[str, int] = {}
        self._leaving: dict[int, list[Generator[None, None, None]]] = {}
        self._written: dict[int, tuple[int, int]] = {}
        self._came: set[tuple[int, int]] = set()  # pieces, with those before them on their way
        self._newest = [[0] * (KINDS + 1) for _ in range(ranks)]

    def add(self, peer: int, name: str, address: int, index: int) -> None:
        """Note where a peer's window is."""
        self._peers[peer], self._rank_of[name], self._leaving[peer] = (name, address, index), peer, []

    def write(self, peer: int, half: int, data: Tensor) -> None:
        self._outbox_RHB[peer, half, : data.numel()].copy_(data, non_blocking=True)
        self._written[peer] = half, data.numel()

    def tell(self, peer: int, kind: int, number: int) -> Callable[[], bool]:
        note, has_left, piece = _NOTE.pack(kind, number), threading.Event(), self._written.pop(peer, None)
        self._leaving[peer].append(self._leave(peer, note, self._stream.mark(), piece, has_left))
        if kind == GOODBYE:
            with contextlib.suppress(Exception):
                self._listen()
                if not self._newest[peer][GOODBYE]:  # else its agent is gone, and the library would print an error
                    self.ask(peer, note)
        return has_left.is_set

    def notes(self) -> Sequence[Sequence[int]]:
        for peer, notes in self._leaving.items():
            self._leaving[peer] = [note for note in notes if next(note, True) is None]
        self._listen()
        return self._newest

    def _listen(self) -> None:
        for name, said in self._agent.get_new_notifs().items():
            if (peer := self._rank_of.get(name, self._rank)) == self._rank:
                continue  # a stranger
            newest = self._newest[peer]
            for kind, number in map(_NOTE.unpack, said):
                if kind == ARRIVED:
                    self._came.add((peer, number))
                else:
                    newest[kind] = max(newest[kind], number)
            while (peer, newest[ARRIVED] + 1) in self._came:
                newest[ARRIVED] += 1
                self._came.remove((peer, newest[ARRIVED]))

    def _leave(
        self, peer: int, note: bytes, done: Callable[[], bool], piece: tuple[int, int] | None, has_left: threading.Event
    ) -> Generator[None, None, None]:
        """Send a note when the device has done what is before it, with a piece (its half and bytes) where there is one.
        Goes on each time it is asked."""
        while not done():
            yield
        if piece is None:
            self.ask(peer, note)
            has_left.set()
            return
        name, address, index = self._peers[peer]
        half, nbytes = piece
        own = self._outbox_RHB[peer, half]
        theirs = address + self.inbox_RHB[self._rank, half].data_ptr() - self._memory.data_ptr()
        write = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs([(own.data_ptr(), nbytes, max(0, own.get_device()))], self._kind),
            self._agent.get_xfer_descs([(theirs, nbytes, index)], self._kind),
            name,
            note,
        )
        try:
            state = self._agent.transfer(write)
            while state != "ERR" and (state := self._agent.check_xfer_state(write)) == "PROC":
                yield
            if state != "DONE":
                raise TransportError(f"a write to EP rank {peer} failed")
            has_left.set()
        finally:
            self._agent.release_xfer_handle(write)

    def ask(self, peer: int, note: bytes = _NOTE.pack(_ASK, 0)) -> None:
        self._agent.send_notif(self._peers[peer][0], note)

    def settle(self) -> None:
        """Give up what has not left."""
        for notes in self._leaving.values():
            for note in notes:
                with contextlib.suppress(Exception):
                    note.close()
            notes.clear()

    def end(self) -> None:
        """Let go of the agent: afterwards no rank writes here."""
        self.settle()
        for name in self._rank_of:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)
        with contextlib.suppress(Exception):
            self._agent.deregister_memory(self._handle)
        self._agent = None
