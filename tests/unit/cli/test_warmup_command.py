"""``eplb-runtime warmup`` says what it found and fails where nothing can be compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from eplb_runtime.balancer import compile_ahead
from eplb_runtime.cli import warmup
from eplb_runtime.cli.program import main


def test_it_compiles_for_rank_0_and_for_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled: set[str] = set()

    monkeypatch.setattr(compile_ahead, "compile_apart", compiled.add)
    monkeypatch.setattr(compile_ahead, "is_compiled", compiled.__contains__)
    assert main(["warmup"]) == 0
    assert "compiled in" in capsys.readouterr().out
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
