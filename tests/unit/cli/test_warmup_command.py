"""``eplb-runtime warmup`` says what it found and fails where nothing can be compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from eplb_runtime.balancer import compile_ahead
from eplb_runtime.cli import warmup
from eplb_runtime.cli.program import main


def test_it_compiles_for_rank_0_and_for_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled: set[str] = set()

    def compile_apart(policy: str, on_wait: Callable[[], None]) -> None:
        on_wait()
        compiled.add(policy)

    monkeypatch.setattr(compile_ahead, "compile_apart", compile_apart)
    monkeypatch.setattr(compile_ahead, "is_compiled", compiled.__contains__)
    monkeypatch.setattr(compile_ahead, "functions_on_disk", lambda: 7 * len(compiled))
    said: list[str] = []
    monkeypatch.setattr(warmup, "spinner", lambda: nullcontext(SimpleNamespace(update=said.append)))
    assert main(["warmup"]) == 0
    assert "compiled in" in capsys.readouterr().out
    assert said == [
        "compiling policy incremental: 0 functions so far",
        "compiling for ranks that plan nothing: 7 functions so far",
    ]
    assert compiled == set(warmup.POLICIES)
    assert main(["warmup", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compiled_before"] is True


def test_without_a_compiler_it_says_so_and_fails() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "eplb_runtime.cli", "warmup"],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1 and "nothing was compiled" in ended.stdout
