"""Compiling by a process of its own: once on a machine, whoever asks, and never in the way of a job."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from eplb_runtime.balancer import compile_ahead
from eplb_runtime.utils.jit import cache_folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was compiled; nothing is, really."""
    asked: list[str] = []
    monkeypatch.setattr(compile_ahead, "compile_here", asked.append)
    monkeypatch.setattr(compile_ahead, "_mark", lambda policy: tmp_path / f"{policy}.compiled")
    return asked


def test_processes_that_come_together_compile_once(compiled: list[str]) -> None:
    ranks = [threading.Thread(target=compile_ahead.main, args=("incremental",)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert compiled == ["incremental"]


def test_what_was_compiled_before_starts_no_process(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ahead.main("")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    compile_ahead.compile_apart("")


def test_control_another_policy_starts_one(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(command: list[str], **_: object) -> None:
        started.append(command)
        raise OSError("no processes here")

    monkeypatch.setattr(subprocess, "Popen", start)
    compile_ahead.main("")
    compile_ahead.compile_apart("incremental")
    assert started == [[sys.executable, "-m", "eplb_runtime.balancer.compile_ahead", "incremental"]]


def test_a_process_that_fails_is_in_nobodys_way(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    compile_ahead.compile_apart("incremental")
    assert compiled == []


def test_the_mark_changes_with_the_policy() -> None:
    one, other = compile_ahead._mark("incremental"), compile_ahead._mark("")
    assert one != other and one.parent == other.parent == cache_folder()
