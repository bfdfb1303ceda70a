"""Threads that use a GPU beside one that captures a CUDA graph say that they have no part in it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_runtime.distributed.transports.cuda_ipc import CudaIpc
from eplb_runtime.utils import worker
from eplb_runtime.utils.worker import Worker


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By thread, as CUDA's driver holds them; 0, its default, forbids calls beside others' captures."""
    found: dict[int, int] = {}

    def exchange(mode: Any) -> int:
        found[threading.get_ident()] = mode._obj.value
        return 0

    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(worker, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return found


def test_a_worker_has_no_part_in_captures_of_others(modes: dict[int, int]) -> None:
    worker = Worker("a test's")
    assert worker.do(lambda: modes.get(threading.get_ident()), 10.0) == 1
    worker.close(10.0)
    assert threading.get_ident() not in modes, "the thread that trains keeps its own"


def test_a_thread_that_carries_experts_has_none_either(modes: dict[int, int]) -> None:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    transport = CudaIpc(group, "gloo", torch.device("cpu"), 1.0, object())
    seen = []
    transport._go_on = lambda: bool(seen.append(modes.get(threading.get_ident())))  # type: ignore[method-assign]
    transport._run()
    assert transport._thread is None or transport._thread.join(10.0) is None
    assert seen == [1]
