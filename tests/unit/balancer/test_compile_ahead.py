"""Compiling by a process of its own: once on a machine, whoever asks, and never in the way of a job."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from eplb_runtime.balancer import compile_ahead, rebalancer
from eplb_runtime.balancer.decision import DecisionMaker
from eplb_runtime.balancer.rebalancer import Rebalancer
from eplb_runtime.config import BalancerConfig, MigrationConfig
from eplb_runtime.utils import jit
from eplb_runtime.utils.worker import Worker


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


def decisions(policy: str, is_planner: bool = True, **budget: Any) -> Any:
    maker: Any = object.__new__(DecisionMaker)
    maker._config = BalancerConfig(policy=policy, migration=MigrationConfig(**budget))
    maker._is_planner, maker._compiles = is_planner, policy != "static"
    return maker


@pytest.mark.parametrize("policy, first, announced", [("static", 1, 0), ("incremental", 1, 1), ("incremental", 0, 0)])
def test_compiling_is_announced_where_something_will_be_compiled(
    policy: str,
    first: int,
    announced: int,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compile_ahead.main("static")
    monkeypatch.setattr(rebalancer, "COMPILED_SOON_SECONDS", 0.0)
    slow = threading.Event()  # reading from a slow disk, too
    job: Any = object.__new__(Rebalancer)
    job._compiler, job._runtime = Worker("compile"), Mock(**{"job.is_planner": first})
    job.decisions = decisions(policy)
    job.decisions.compile = slow.wait
    with caplog.at_level(logging.INFO, "eplb_runtime"):
        future = job._begin_compiling()
    slow.set()
    future.result(30)
    assert ("compiling the planner" in caplog.text) == announced
    assert not decisions(policy, is_planner=False).lacks_compiled_code, "the others need a part of that"


def test_a_process_that_fails_is_in_nobodys_way(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    compile_ahead.compile_apart("incremental")
    assert compiled == []


def test_what_was_compiled_is_known_by_sources_and_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Times of files are those of an installation."""
    (tmp_path / "fast.py").write_text("@jit\n")
    monkeypatch.setattr(compile_ahead, "cache_folder", lambda: jit.folder_for(tmp_path))
    first = compile_ahead._mark("incremental")
    os.utime(tmp_path / "fast.py", (1, 1))
    assert compile_ahead._mark("incremental") == first
    monkeypatch.setattr(compile_ahead, "PACKAGE", tmp_path / "copy")
    assert compile_ahead._mark("incremental") != first
    (tmp_path / "fast.py").write_text("@jit # changed\n")
    assert compile_ahead._mark("incremental").parent != first.parent


SLOWLY = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"


@pytest.fixture
def slow_process(compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Instead of the compiler: a process that has begun when this file is there, and is not done for ten minutes."""
    begun, start = tmp_path / "begun", subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: start([sys.executable, "-c", SLOWLY, begun], **how))
    return begun


def test_a_compile_that_a_short_job_began_goes_on_for_the_next(slow_process: Path) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=compile_ahead.compile_apart, args=("incremental", ended))
    thread.start()
    while not (slow_process.exists() and slow_process.read_text()):
        assert thread.is_alive()
    ended.set()
    thread.join(30)
    process = int(slow_process.read_text())
    assert not thread.is_alive() and os.getsid(process) == process, "it is alive, in a session of its own"
    os.kill(process, signal.SIGKILL)
