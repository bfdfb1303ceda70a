"""``eplb-runtime warmup`` says what it found and fails where nothing can be compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from eplb_runtime.balancer import planner_process
from eplb_runtime.cli.program import main
from eplb_runtime.utils import jit


def test_it_compiles_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(jit, "_mark", lambda: tmp_path / "compiled")
    compiles = Mock(**{"return_value.is_ready": lambda seconds: jit.note_compiled()})
    monkeypatch.setattr(planner_process, "PlannerProcess", compiles)
    assert main(["warmup"]) == 0
    assert "compiled in" in capsys.readouterr().out
    assert main(["warmup", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compiled_before"] is True and compiles.call_count == 1


def test_without_a_compiler_it_says_so_and_fails() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "eplb_runtime.cli", "warmup"],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1 and "nothing was compiled" in ended.stdout
