"""Threads of transports on a GPU: which one they work on, and what they do not wait for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvshmem_double import Double

from eplb_runtime.distributed.transports import nvshmem, progress, windows
from eplb_runtime.distributed.transports.base import Message, Pending, TransportError
from eplb_runtime.distributed.transports.nvshmem import HeapWindow

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
    with pytest.raises(TransportError, match="not done in time"):
        progress.synchronize(SECOND_GPU, time.monotonic())
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
