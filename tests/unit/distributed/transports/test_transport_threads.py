"""Threads and streams of transports on a GPU: which one they work on, what they wait for, and what they do not."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.nvshmem_double import Double
from support.seen import said_by
from torch.multiprocessing.reductions import StorageWeakRef

from eplb_runtime.distributed import consensus
from eplb_runtime.distributed.transports import base, nixl, nvshmem, symmetric, windows
from eplb_runtime.distributed.transports.base import Message, Pending, TransportError
from eplb_runtime.distributed.transports.symmetric import SHARING, NodeMemory
from eplb_runtime.distributed.transports.windows import ARRIVED, GOODBYE
from eplb_runtime.tools import launch

GROUP: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
SECOND_GPU = torch.device("cuda", 1)


def test_a_device_that_has_no_end_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: end.wait(60))
    with pytest.raises(TransportError, match="did not end in time"):
        base.synchronize(SECOND_GPU, time.monotonic())
    end.set()


class QueuedStream:
    """Comes after kernels of training until it is let go."""

    pointer, done = 0, False

    def __call__(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

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
    transport = kind(GROUP, "gloo", torch.device("cpu"), 60.0, object())
    nbytes = 2 * 2 * 2 * PIECE + 8 * 2 * 2 * windows.KINDS * 2 * 2
    transport._lay_out(empty((nbytes,), dtype=torch.uint8), PIECE)
    transport.problem = ""
    return transport


def test_who_cannot_warm_up_gives_its_window_back(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Any] = []
    monkeypatch.setattr(consensus, "first_problem", lambda *_: "")
    ways = {"_put": lambda *_: bool, "_try_out": lambda *_: 1 / 0, "_release": lambda one: released.append(one)}
    ways["_open"] = lambda self, nbytes, deadline: torch.zeros(nbytes, dtype=torch.uint8)
    transport = type("Lent", (windows.Windows,), ways)(GROUP, "gloo", torch.device("cpu"), 60.0)
    with pytest.raises(ZeroDivisionError):
        transport.warm_up(0.0)
    transport.close()
    assert released == [transport]


# -- NIXL knows of no streams: what the device has not written is not sent, and what it reads is not written over ------

PEER, OFFSET, PIECE = "the other agent", 1 << 30, 64


class Agent:
    """Writes are only written down, and each is as far as ``state`` says."""

    def __init__(self) -> None:
        self.writes, self.sent, self.said, self.state = list[Any](), list[Any](), list[bytes](), "PROC"
        self.get_new_notifs = lambda: {"a stranger": [nixl._NOTE.pack(ARRIVED, 9)], PEER: self.said}
        self.transfer = lambda write: self.writes.append(write) or self.state
        self.get_xfer_descs = lambda places, kind: places
        self.initialize_xfer = lambda *what: what
        self.check_xfer_state = lambda write: self.state
        self.release_xfer_handle = self.writes.index

    def send_notif(self, name: str, note: bytes) -> None:
        assert not self.said, "it is gone"
        self.sent.append((name, note))


def with_agent() -> tuple[Any, Agent]:
    transport, agent = laid_out(nixl.Nixl), Agent()
    transport._agent, transport._leaving = agent, []
    transport._others, transport._rank_of = [("", 0, 0), (PEER, OFFSET, 0)], {PEER: 1}
    return transport, agent


def test_what_a_rank_wrote_before_it_closed_is_here_and_nothing_is_written_to_it() -> None:
    transport, agent = with_agent()
    agent.said = [nixl._NOTE.pack(ARRIVED, 1), nixl._NOTE.pack(GOODBYE, 1)]
    transport._inbox_RHB[1, 1, :8] = 5
    pending = transport.post([], [Message(1, into := torch.zeros(8, dtype=torch.uint8))])
    assert pending.poll() and into.tolist() == [5] * 8
    with pytest.raises(TransportError, match="EP rank 1 has given up"):
        transport.post([Message(1, into)], []).wait(time.monotonic() + 5)
    assert not agent.writes and not agent.sent


def test_a_peer_that_is_always_there_keeps_nobody_beyond_a_deadline() -> None:
    (transport, _), steps = with_agent(), iter(range(400))
    transport._step = lambda: time.sleep(0.001) or next(steps, -1) >= 0
    with pytest.raises(TransportError, match="in time"):
        transport.post([], [Message(1, torch.zeros(8, dtype=torch.uint8))]).wait(time.monotonic() + 0.01)
    assert next(steps) < 300


def test_a_piece_is_sent_when_the_device_has_packed_it_and_its_note_when_the_piece_is_there() -> None:
    """Until it has left it is held, though nobody else holds it."""
    transport, agent = with_agent()
    transport._stream = stream = QueuedStream()
    transport._next_ask = time.monotonic() + 60
    data = torch.ones(8, dtype=torch.uint8)
    held, pending = StorageWeakRef(data.untyped_storage()), transport.post([Message(1, data)], [])
    del data
    assert not pending.poll() and not agent.writes and not held.expired()
    stream.done = True
    assert not pending.poll()
    ((_, ((source, *_),), theirs, *rest),) = agent.writes
    assert (source, rest) == (transport._outbox_RHB[1, 1].data_ptr(), [PEER, nixl._NOTE.pack(ARRIVED, 1)])
    assert theirs == [(transport._inbox_RHB[0, 1].data_ptr() + OFFSET, 8, 0)] and not pending.poll()
    agent.state = "DONE"
    assert pending.poll() and not agent.sent and held.expired()


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
    assert launch.gpu_of(3) == torch.device("cuda", 0)
    gpus.extend("bcd")
    assert launch.gpu_of(3) == torch.device("cuda", 3)
    with pytest.raises(launch.LaunchError, match="4 GPUs and a rank 4"):
        launch.gpu_of(4)
    gpus.clear()
    with pytest.raises(launch.LaunchError, match="0 GPUs"):
        launch.gpu_of(0)


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
    line = said_by(lambda: launch.refuse_shared_gpus("GPU-a"))
    assert line.startswith(refused) and bool(line) == bool(refused) and "\n" not in line


def test_torchs_refusal_of_gpus_of_one_number_says_what_to_set() -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDASymmetricMemoryAllocator::rendezvous: detected allocations from overlapping devices")

    package = SimpleNamespace(empty=torch.empty, rendezvous=refuse)
    memory = NodeMemory(GROUP, torch.device("cpu"), 1.0, package)
    memory.zeros((2,), torch.float32, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as alone, pytest.raises(RuntimeError, match=f"overlapping .*set {SHARING}=1"):
        alone.setattr(consensus, "first_problem", lambda *_: "")
        alone.setattr(symmetric, "gather_json", lambda word, *_: [word])
        memory.open()
