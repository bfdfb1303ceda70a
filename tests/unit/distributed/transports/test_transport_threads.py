"""Threads and streams of transports on a GPU: which one they work on, what they wait for, and what they do not."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.nvshmem_double import Double

from eplb_runtime.distributed.transports import base, nvshmem, symmetric, windows
from eplb_runtime.distributed.transports.base import Message, Pending, TransportError
from eplb_runtime.distributed.transports.nixl import _NOTE, _AgentWindow
from eplb_runtime.distributed.transports.nvshmem import HeapWindow
from eplb_runtime.distributed.transports.symmetric import SHARING, NodeMemory
from eplb_runtime.distributed.transports.windows import ARRIVED, TAKEN
from eplb_runtime.tools import launch

SECOND_GPU = torch.device("cuda", 1)


def test_a_thread_works_on_the_models_gpu_from_its_first_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on the first GPU: each rank's would take memory there, and NIXL would copy there."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device)))
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    transport = nvshmem.Nvshmem(group, "gloo", torch.device("cpu"), 60.0, object())  # type: ignore[arg-type]
    transport.device = SECOND_GPU
    transport._go_on = lambda: bool(calls.append(("works", threading.current_thread().name)))  # type: ignore[method-assign]
    transport._run()
    assert transport._thread is None or transport._thread.join(30) is None
    assert calls == [("device", SECOND_GPU), ("works", "eplb_runtime transport")]


def test_a_device_that_has_no_end_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: end.wait(60))
    with pytest.raises(TransportError, match="did not end in time"):
        base.synchronize(SECOND_GPU, time.monotonic())
    end.set()


class QueuedStream:
    """Comes after kernels of training until it is let go."""

    pointer = 0

    def __init__(self) -> None:
        self.done = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        yield

    def after_current(self) -> None:
        pass

    def mark(self) -> Callable[[], bool]:
        return lambda: self.done


def test_notes_behind_kernels_of_training_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one queue for all streams they come when those are done, in seconds. Training is not kept waiting for the
    lock meanwhile, and nothing is given up."""
    monkeypatch.setattr(windows, "LEFT_SECONDS", 0.0)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    double = Double(tmp_path)
    double.init(None, SimpleNamespace(_data=torch.tensor([77]).numpy()), 0, 2, "uid")
    transport = nvshmem.Nvshmem(group, "gloo", torch.device("cpu"), 60.0, double.library())
    memory = double.tensor((HeapWindow.nbytes(2, 64),), torch.uint8)
    window = HeapWindow(memory, double.library(), 0, 2, 64, transport._stream)
    transport._window, reading = window, QueuedStream()
    window._reading = reading  # type: ignore[assignment]
    transport._run = lambda: None  # type: ignore[method-assign]
    pending: Pending = transport.post([], [Message(1, torch.zeros(8, dtype=torch.uint8))])
    for _ in range(3):
        transport._go_on()
    assert not pending.poll()
    window.inbox_RHB[1, 0, :8] = 5
    window.notes_RKN[1, windows.ARRIVED] = torch.tensor([1, ~1])
    reading.done = True
    while transport._go_on():
        pass
    transport._go_on()
    assert pending.poll()
    transport._window = None


# -- NIXL knows of no streams: what the device has not written is not sent, and what it reads is not written over ------

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


def test_nothing_is_sent_nor_a_peer_told_of_room_before_the_device_has_packed_it_and_copied_out(joined: Any) -> None:
    window, agent, stream = joined
    window.write(1, 1, torch.ones(8, dtype=torch.uint8))
    has_left, told = window.tell(1, ARRIVED, 1), window.tell(1, TAKEN, 3)
    window.notes()
    assert not agent.writes and not agent.sent and not told()
    stream.done = True
    window.notes()
    ((_, (own,), (theirs,), name, note),) = agent.writes
    assert own == (window._outbox_RHB[1, 1].data_ptr(), 8, 0) and theirs == (ADDRESS + PIECE, 8, 0)
    assert (name, _NOTE.unpack(note)) == (PEER, (ARRIVED, 1)) and not has_left()
    agent.state = "DONE"
    window.notes()
    assert has_left() and told() and agent.sent == [(TAKEN, 3)]


def test_a_piece_counts_when_those_before_it_are_here(joined: Any) -> None:
    window, agent, _ = joined
    for agent.come, arrived in (([(ARRIVED, 2)], 0), ([(ARRIVED, 3), (ARRIVED, 1)], 3), ([(TAKEN, 2), (TAKEN, 1)], 3)):
        assert window.notes()[1][ARRIVED] == arrived
    assert window.notes()[1][TAKEN] == 2 and not any(window.notes()[0])


# -- Launchers may show each rank one GPU, which is cuda:0 on all of them: GPUs are compared by what they are


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the GPUs that this process sees."""
    seen = ["GPU-a"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=seen[device.index]), raising=False
    )
    return seen


def test_the_only_gpu_that_a_rank_sees_is_its_own(gpus: list[str]) -> None:
    assert launch._gpu(3) == torch.device("cuda", 0)
    gpus.extend("bcd")
    assert launch._gpu(3) == torch.device("cuda", 3)
    with pytest.raises(launch.LaunchError, match="4 GPUs and a rank 4"):
        launch._gpu(4)
    gpus.clear()
    with pytest.raises(launch.LaunchError, match="0 GPUs"):
        launch._gpu(0)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ([("node 0", "GPU-a"), ("node 0", "GPU-b")], ""),
        ([("node 0", "GPU-a"), ("node 0", "GPU-b"), ("node 0", "GPU-a")], "ranks 0 and 2 have the same GPU: start as"),
        ([("node 0", "GPU-a"), ("node 1", "GPU-a")], ""),
        ([("node 0", ""), ("node 0", "")], ""),
    ],
)
def test_ranks_that_share_a_gpu_are_refused_and_equal_numbers_are_not(
    monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, str]], refused: str
) -> None:
    monkeypatch.setattr(launch, "gather_bytes", lambda *arguments: [json.dumps(one).encode() for one in said])
    monkeypatch.setattr(launch.dist.distributed_c10d, "_get_default_group", lambda: None)
    if not refused:
        launch.refuse_shared_gpus("GPU-a")
        return
    with pytest.raises(launch.LaunchError, match=refused) as error:
        launch.refuse_shared_gpus("GPU-a")
    assert "\n" not in str(error.value)


def test_torchs_refusal_of_gpus_of_one_number_says_what_to_set() -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDASymmetricMemoryAllocator::rendezvous: detected allocations from overlapping devices")

    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    package = SimpleNamespace(empty=torch.empty, rendezvous=refuse)
    memory = NodeMemory(group, torch.device("cpu"), 1.0, package)  # type: ignore[arg-type]
    memory.zeros((2,), torch.float32, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as alone, pytest.raises(RuntimeError, match=f"overlapping .*set {SHARING}=1"):
        alone.setattr(symmetric, "gather_json", lambda word, *_: [word])
        memory.open()
