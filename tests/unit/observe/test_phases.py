"""Spans of a profiler's trace that say what a rank does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from eplb_runtime.observe.traces import analyse
from eplb_runtime.utils.spans import phase


def test_without_a_profiler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: pytest.fail("it was recorded"))
    with phase("dispatch", "F", 0, 0):
        pass


def test_phases_of_all_threads_are_in_the_trace(tmp_path: Path) -> None:
    def work(name: str) -> None:
        with phase(name, "", 1, 0):
            torch.ones(3).add(1)

    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    steps = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=steps,
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(tmp_path / "rank0.json.gz")),
        experimental_config=all_threads,
    ) as recorded:
        for _ in range(5):
            work("here")
            beside = threading.Thread(target=work, args=("beside",))
            beside.start()
            beside.join()
            recorded.step()
    work("here")
    found = analyse(tmp_path / "rank0.json.gz")
    assert found.steps == 2
    assert {(p.phase, p.layer, p.spans) for p in found.phases} == {("here", 1, 2), ("beside", 1, 2)}
