"""NIXL (extra ``nixl``): writes into windows (`windows.py`) over UCX: RDMA where there is any, else TCP.

Writes and not reads: TCP cannot read a remote memory, so UCX lets the owner answer, whose *process* ends when the
reader has given up meanwhile (seen with nixl 1.5.1). UCX knows of no streams: a write begins when the device has
written what it sends. NIXL's own thread asks UCX without a pause, a core of each rank at all times: there is none.
"""

import base64
import contextlib
import importlib
import importlib.util
import logging
import os
import secrets
import struct
import threading
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...utils.text import one_line
from ..consensus import failing_together
from .base import TransportError
from .windows import ARRIVED, HALVES, HasLeft, Windows

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
_DEVICES = Path("/sys/class/infiniband")
_WITHOUT_SHARED_MEMORY = "TLS=^sm"
"""UCX must not write into another process without its help: nothing could end that."""
_NOTE = struct.Struct("<BQ")
Leaving = Generator[None, None, None]
"""A write or note on its way to another rank; each ``next`` lets it go on."""


def rdma_devices() -> list[str]:
    """Return the sorted names of this host's RDMA devices; empty: there are none."""
    return sorted(device.name for device in _DEVICES.iterdir()) if _DEVICES.is_dir() else []


def why_not() -> str:
    """Return why NIXL cannot be used in this process, or "". Makes an agent to find out, and drops it."""
    try:
        new_agent(f"probe {secrets.token_hex(8)}")
    except TransportError as error:
        return str(error)
    return ""


def new_agent(name: str) -> Any:
    """Return a new NIXL agent with the UCX back end. TransportError: nixl is not installed, or fails."""
    found = next((package for package in PACKAGES if importlib.util.find_spec(package)), None)
    if found is None:
        raise TransportError("the nixl package is not installed: pip install 'eplb-runtime[nixl]'")
    try:
        api = importlib.import_module(f"{found}._api")
        api.logger.setLevel(logging.WARNING)  # else each agent says so on the standard output
        locked = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=locked))
        agent.create_backend("UCX", {} if "UCX_TLS" in os.environ else {"engine_config": _WITHOUT_SHARED_MEMORY})
    except Exception as error:
        raise TransportError(f"nixl cannot be used: {one_line(error)}") from error
    return agent


class Nixl(Windows):
    """Writes into the windows of other ranks through NIXL's UCX agent."""

    _agent: Any = None

    def _open(self, nbytes: int, deadline: float) -> Tensor:
        name = f"eplb_runtime {self._rank} {secrets.token_hex(8)}"
        self._leaving, self._rank_of = list[Leaving](), dict[str, int]()
        try:
            with failing_together(self._group, self._group_device, deadline):
                self._agent = new_agent(name)
                window = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                self._registered = self._agent.register_memory(window)
                metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
            said = self._gather([name, metadata, window.data_ptr(), max(0, window.get_device())], deadline)
            with failing_together(self._group, self._group_device, deadline):
                for peer, (other, theirs, *_) in enumerate(said):
                    if peer != self._rank:
                        self._rank_of[other] = peer
                        self._agent.add_remote_agent(base64.b64decode(theirs))
        except Exception as error:
            raise TransportError(f"nixl cannot open {nbytes} bytes to the other ranks: {one_line(error)}") from error
        self._others = [(other, address - window.data_ptr(), index) for other, _, address, index in said]
        return window

    def _put(self, place: Tensor, source: Tensor, peer: int, after: HasLeft | None = None) -> HasLeft:
        return self._leave(partial(self._write, place, source, peer, self._peers[peer].sent), peer)

    def _tell(self, peer: int, kind: int, number: int, after: HasLeft | None = None) -> HasLeft:
        """Notify: to a rank that lets go of its agent at that moment, this fails, and a write may end the process."""
        notify = partial(self._agent.send_notif, self._others[peer][0], _NOTE.pack(kind, number))
        return after if after and kind == ARRIVED else self._leave(notify, peer)

    def _look(self) -> bool:
        for name, said in self._agent.get_new_notifs().items():
            for kind, number in map(_NOTE.unpack, said if name in self._rank_of else ()):
                self._read_RKHN[self._rank_of[name], kind, number % HALVES] = torch.tensor([number, ~number])
        return True

    def _leave(self, act: Callable[[], Leaving | None], peer: int) -> HasLeft:
        """Act when the device is done, not to who leaves, and its agent with it; goes on when asked."""
        is_written, has_left = self._stream.mark(), threading.Event()

        def leave() -> Leaving:
            while not is_written():
                yield
            if not self._peers[peer].leaving:
                yield from act() or ()
            has_left.set()

        self._leaving.append(leave())
        return has_left.is_set

    def _write(self, place: Tensor, source: Tensor, peer: int, number: int) -> Leaving:
        """Done when its note has left, too: who has sent all may ask no more, and then nothing goes on."""
        (name, offset, index), kind = self._others[peer], "VRAM" if source.is_cuda else "DRAM"
        here, there = (source.data_ptr(), max(0, source.get_device())), (place.data_ptr() + offset, index)
        both = [self._agent.get_xfer_descs([(at, source.nbytes, device)], kind) for at, device in (here, there)]
        write = self._agent.initialize_xfer("WRITE", *both, name, _NOTE.pack(ARRIVED, number))
        try:
            state = self._agent.transfer(write)
            while state != "ERR" and (state := self._agent.check_xfer_state(write)) == "PROC":
                yield
            if state != "DONE":
                raise TransportError(f"a write to EP rank {peer} failed")
        finally:
            self._agent.release_xfer_handle(write)

    def _go_on_with_puts(self) -> None:
        leaving, self._leaving, failed = self._leaving, [], None
        for write in leaving:
            try:
                if next(write, True) is None:
                    self._leaving.append(write)
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed

    def _drop_puts(self) -> None:
        for write in self._leaving:
            with contextlib.suppress(Exception):
                write.close()
        self._leaving = []

    def close(self) -> None:
        """Give up what is pending, drop the agent, and deregister the window: no rank writes there any more."""
        super().close()
        if self._agent is not None:
            self._drop_puts()
            for name in self._rank_of:
                with contextlib.suppress(Exception):
                    self._agent.remove_remote_agent(name)
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(self._registered)
            self._agent = None
