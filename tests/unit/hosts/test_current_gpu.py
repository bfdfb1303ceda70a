"""A process that works on another GPU than its model's: what that may not change, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eplb_runtime.hosts.attaching.checks import check_current
from eplb_runtime.hosts.attaching.description import AttachError
from eplb_runtime.load import aggregate


def test_the_model_is_on_the_gpu_that_the_process_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    check_current(torch.device("cuda", 1))
    check_current(torch.device("cpu"))
    with pytest.raises(AttachError, match=r"on cuda:0, and this process works on GPU 1: .*set_device\(0\)") as error:
        check_current(torch.device("cuda", 0))
    assert "\n" not in str(error.value)


def test_a_copy_to_the_host_ends_on_the_stream_that_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: an event that is recorded without a stream would be on the current GPU's."""
    recorded: list[object] = []
    event = SimpleNamespace(record=lambda stream=None: recorded.append(stream), synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: SimpleNamespace(copy_=lambda *source, **how: None))
    on_gpu = SimpleNamespace(device=torch.device("cuda", 3), shape=torch.Size([2]), dtype=torch.int64)
    aggregate.HostCopy(on_gpu).wait()  # type: ignore[arg-type]
    assert recorded == ["stream of cuda:3"]
