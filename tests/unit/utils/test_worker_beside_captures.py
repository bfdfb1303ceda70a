"""Threads that use a GPU beside one that captures a CUDA graph say that they have no part in it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_runtime.distributed.transports.progress import PendingMessages, ProgressTransport
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


class Carries(ProgressTransport[PendingMessages]):
    """Nothing; it looks at the mode of its thread."""

    by = "a test's"

    def __init__(self, modes: dict[int, int]) -> None:
        super().__init__(0, 1.0)
        self.device = torch.device("cpu")
        self.modes, self.seen, self.ended = modes, None, threading.Event()

    def _work(self) -> None:
        self.seen = self.modes.get(threading.get_ident())
        self.ended.set()

    def _give_up(self, problem: str) -> None: ...

    def warm_up(self, deadline: float) -> None: ...

    def post(self, sends: Any, receives: Any) -> Any: ...

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes)

    def close(self) -> None: ...


def test_a_thread_that_carries_experts_has_none_either(modes: dict[int, int]) -> None:
    transport = Carries(modes)
    transport._run()
    assert transport.ended.wait(10.0) and transport.seen == 1
