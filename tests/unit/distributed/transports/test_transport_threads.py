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

from eplb_runtime.distributed.transports import base, nixl, nvshmem, symmetric, windows
from eplb_runtime.distributed.transports.base import Message, Pending, TransportError
from eplb_runtime.distributed.transports.symmetric import SHARING, NodeMemory
from eplb_runtime.distributed.transports.windows import ARRIVED
from eplb_runtime.tools import launch

SECOND_GPU = torch.device("cuda", 1)


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
    double = Double(tmp_path)
    double.init(None, SimpleNamespace(_data=torch.tensor([77]).numpy()), 0, 2, "uid")
    transport = laid_out(nvshmem.Nvshmem, double.tensor)
    transport._library = double.library()
    transport._reading = reading = QueuedStream()  # type: ignore[assignment]
    pending: Pending = transport.post([], [Message(1, torch.zeros(8, dtype=torch.uint8))])
    for _ in range(3):
        assert not pending.poll()
    transport._inbox_RHB[1, 1, :8] = 5
    transport._notes_RKHN[1, ARRIVED, 1] = torch.tensor([1, ~1])
    assert not pending.poll()
    reading.done = True
    assert pending.poll() or pending.poll()  # the first may end what it asked for before


def laid_out(kind: Callable[..., Any], empty: Callable[..., torch.Tensor] = torch.zeros) -> Any:
    """Return a transport of the first of two ranks, whose window is not opened: pieces of `PIECE` bytes."""
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    transport = kind(group, "gloo", torch.device("cpu"), 60.0, object())
    nbytes = 2 * 2 * 2 * PIECE + 8 * 2 * 2 * windows.KINDS * 2 * 2
    transport._lay_out(empty((nbytes,), dtype=torch.uint8), PIECE)
    transport._problem = ""
    return transport


# -- NIXL knows of no streams: what the device has not written is not sent, and what it reads is not written over ------

PEER, OFFSET, PIECE = "the other agent", 1 << 30, 64


class Agent:
    """Writes are only written down, and each is as far as ``state`` says."""

    def __init__(self) -> None:
        self.writes: list[Any] = []
        self.sent: list[tuple[str, bytes]] = []
        self.state = "PROC"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {"a stranger": [nixl._NOTE.pack(ARRIVED, 9)]}

    def send_notif(self, name: str, note: bytes) -> None:
        self.sent.append((name, note))

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


def test_a_piece_is_sent_when_the_device_has_packed_it_and_its_note_when_the_piece_is_there() -> None:
    transport, agent, stream = laid_out(nixl.Nixl), Agent(), QueuedStream()
    transport._agent, transport._leaving, transport._stream = agent, [], stream
    transport._others, transport._rank_of = [("", 0, 0), (PEER, OFFSET, 0)], {PEER: 1}
    transport._next_ask = time.monotonic() + 60
    pending = transport.post([Message(1, torch.ones(8, dtype=torch.uint8))], [])
    assert not pending.poll() and not agent.writes
    stream.done = True
    assert not pending.poll()
    ((_, ((source, *_),), theirs, name),) = agent.writes
    inbox = transport._inbox_RHB[0, 1]
    assert (source, theirs, name) == (transport._outbox_RHB[1, 1].data_ptr(), [(inbox.data_ptr() + OFFSET, 8, 0)], PEER)
    assert not agent.sent
    agent.state = "DONE"
    assert pending.poll() and agent.sent == [(PEER, nixl._NOTE.pack(ARRIVED, 1))]


def test_a_piece_counts_when_those_before_it_are_here() -> None:
    arrived = 0
    for notes, then in (([2, 0], 0), ([2, 1], 2), ([2, 3], 3), ([2, 3], 3)):
        arrived = windows._counted(arrived, notes)
        assert arrived == then


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
